"""Carry out one recipe: data, model, schedule, training, evaluation, files."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers.trainer_utils import get_last_checkpoint

from normsmith.data import PackedWindows, TextData, load_text
from normsmith.errors import DivergedError, InputError
from normsmith.evaluation import language_loss
from normsmith.folders import prepare_folder
from normsmith.models import NormsmithForCausalLM
from normsmith.report.results import write_text
from normsmith.schedules import Controller
from normsmith.studies.environment import environment
from normsmith.studies.recipe import Recipe
from normsmith.surgery import taper_
from normsmith.training import ProgressCallback, Reporter, Trainer

METRICS, RESULT = "metrics.jsonl", "result.json"


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the trained model, its numbers and where they are on disk."""

    recipe: Recipe
    model: NormsmithForCausalLM
    controller: Controller | None
    data: TextData
    validation: Dataset[Any]
    validation_loss: float
    history: tuple[dict[str, float], ...]
    seconds: float
    folder: Path
    test_loss: float | None = None


def build_model(recipe: Recipe, vocab_size: int) -> NormsmithForCausalLM:
    """The recipe's model with its initial weights, which the seed decides."""
    changes: dict[str, Any] = {"connection": recipe.connection.to_dict()}
    if recipe.norm is not None:
        changes["norm"] = recipe.norm.to_dict()
    config = recipe.model.build(vocab_size, max(recipe.data.sequence_length, 1024), **changes)
    torch.manual_seed(recipe.seed)
    return NormsmithForCausalLM(config)


def build_scheduled(
    recipe: Recipe, vocab_size: int, start: Recipe | None = None
) -> tuple[NormsmithForCausalLM, Controller | None]:
    """The recipe's model as it is trained: its norms replaced where a schedule asks for it, with the controller.

    With `start` it begins with the weights of that recipe's model, where `share_start_` can share them.

    Raises:
        InputError: the sizes, the norm, the connection and the schedule do not fit together.
    """
    model = build_model(recipe, vocab_size)
    if start is not None:
        share_start_(model, build_model(start, vocab_size))
    if recipe.schedule is None:
        return model, None
    return model, taper_(model, recipe.schedule, steps=recipe.training.max_steps)


@torch.no_grad()
def share_start_(model: NormsmithForCausalLM, source: NormsmithForCausalLM) -> int:
    """Copy initial random weights (linear layers, embeddings) of equal name and shape from `source`; how many.

    One seed gives one model, but a layer of another shape shifts the random numbers of all later ones. Nothing is
    copied where the two are meant to start with another spread; parameters of norms and connections start at fixed
    values, which may be what differs.
    """
    spreads = [(m.config.initializer_range, m.config.scale_residual_init) for m in (model, source)]
    if spreads[0] != spreads[1]:
        return 0
    ours, theirs = (
        {name: m.weight for name, m in module.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
        for module in (model, source)
    )
    shared = [name for name, weight in ours.items() if name in theirs and weight.shape == theirs[name].shape]
    for name in shared:
        ours[name].copy_(theirs[name])
    return len(shared)


def run_recipe(
    recipe: Recipe,
    folder: Path,
    reporter: Reporter,
    *,
    overwrite: bool = False,
    resume: bool = False,
    data: TextData | None = None,
    progress_name: str | None = None,
    save: bool = True,
    start: Recipe | None = None,
) -> Run:
    """Train and evaluate one recipe and write everything to `folder`.

    The folder is made (or with `overwrite` emptied) once data, model and schedule are known to fit, so that a mistake
    in the recipe costs no earlier result.

    Files: `recipe.yaml`, `environment.json`, `metrics.jsonl` (one line per logged step; what is not finite is null),
    `checkpoints/`, and at the end the model with its tokenizer and `result.json`, which comes last. `start` is the
    recipe whose initial weights are shared (see `build_scheduled`).
    """
    data = data or load_text(recipe.data, reporter.say)
    training = recipe.training
    train = PackedWindows(data.train, recipe.data.sequence_length, recipe.seed, training.sequences)
    validation = _limited(PackedWindows(data.validation, recipe.data.sequence_length), recipe.evaluation.windows)
    model, controller = build_scheduled(recipe, data.vocab_size, start)
    checkpoints = folder / "checkpoints"
    arguments = training.arguments(checkpoints, recipe.seed)
    prepare_folder(folder, overwrite, resume)
    _describe_run(recipe, folder, data, resume)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=_limited(validation, 64),
        controller=controller,
        callbacks=[ProgressCallback(reporter, progress_name or recipe.name)],
    )
    started = time.monotonic()
    last = _last_complete(checkpoints) if resume else None
    try:
        trainer.train(resume_from_checkpoint=last)
    finally:  # a run that diverged or was interrupted has a curve too
        logged = [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
        history = tuple(_numbers(entry) for entry in logged)
        write_text(folder / METRICS, "".join(json.dumps(_strict(entry)) + "\n" for entry in history))
    seconds = time.monotonic() - started
    model.eval()
    loss = language_loss(model, validation, training.batch_size)
    test_loss = None
    if data.test is not None:
        test = _limited(PackedWindows(data.test, recipe.data.sequence_length), recipe.evaluation.windows)
        test_loss = language_loss(model, test, training.batch_size)
    if not math.isfinite(
        loss + (test_loss or 0.0)
    ):  # the last update can break a model whose every training loss was finite
        raise DivergedError(
            f"the validation loss is not finite after step {training.max_steps}: no model is written; "
            "lower the learning rate or lengthen the warm-up"
        )
    if save:
        model.save_pretrained(folder)
        data.tokenizer.save_pretrained(folder)
    result = {"validation_loss": loss, "seconds": seconds, "parameters": model.num_parameters()}
    if test_loss is not None:
        result["test_loss"] = test_loss
    if last is not None:
        result["resumed"] = True  # then `seconds` is the time of the last part only
    write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return Run(recipe, model, controller, data, validation, loss, history, seconds, folder, test_loss)


def _describe_run(recipe: Recipe, folder: Path, data: TextData, resume: bool) -> None:
    path = folder / "recipe.yaml"
    if resume and path.exists() and path.read_text(encoding="utf-8") != recipe.to_yaml():
        raise InputError(f"{path}: the interrupted run had another recipe; resume with that one or write --overwrite")
    facts = {**environment(), "data_sha256": data.data_hash, "data_source": data.source}
    described = folder / "environment.json"
    if resume and described.exists() and data.data_hash not in described.read_text(encoding="utf-8"):
        raise InputError(
            f"{data.source}: its text is not what the interrupted run in {folder} read; "
            "bring the old text back or write --overwrite"
        )
    write_text(path, recipe.to_yaml())
    write_text(described, json.dumps(facts, indent=1) + "\n")


def _last_complete(checkpoints: Path) -> str | None:
    """The newest checkpoint; those that an interruption cut short (transformers writes their state last) go away."""
    for folder in checkpoints.glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)
    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


def _limited(windows: Dataset[Any], count: int) -> Dataset[Any]:
    length = len(cast("Any", windows))
    return Subset(windows, range(count)) if 0 < count < length else windows


_KEPT: dict[str, Callable[[float], float]] = {
    "step": int,
    "loss": float,
    "eval_loss": float,
    "gate": float,
    "scale_target": float,
    "auxiliary_loss": float,
    "learning_rate": float,
    "grad_norm": float,
}


def _strict(entry: dict[str, float]) -> dict[str, float | None]:
    # JSON has no NaN: readers other than Python's refuse the whole line.
    return {name: value if math.isfinite(value) else None for name, value in entry.items()}


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {name: _KEPT[name](entry[name]) for name in _KEPT if name in entry}
