"""Carry out one recipe: data, model, schedule, training, evaluation, files."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from normsmith import ranks
from normsmith.connections import Connection, connections
from normsmith.data import Facts, TaskData, load_shared
from normsmith.errors import DivergedError, InputError
from normsmith.evaluation.metrics import TaskScore
from normsmith.folders import prepare_folder
from normsmith.models import NormsmithPreTrainedModel
from normsmith.models.branch import Fresh
from normsmith.models.config import initial_deviations
from normsmith.report.attached import Panel
from normsmith.report.results import write_text
from normsmith.schedules import Controller, GateFreezeConfig
from normsmith.studies.corrupted import check_corruptions, measure_corruptions
from normsmith.studies.diagnose import diagnose, watchers, write_panels
from normsmith.studies.environment import environment
from normsmith.studies.files import METRICS, RESULT
from normsmith.studies.memory import PeakMemory
from normsmith.studies.recipe import Recipe
from normsmith.studies.tasks import (
    Data,
    Parts,
    badness,
    facts_of,
    give_moments_,
    judge,
    limited,
    new_model,
    parts_of,
    task_of,
)
from normsmith.surgery import freeze_gates_, schedule_
from normsmith.surgery.gates import gated_norms
from normsmith.training import BestWeights, ProgressCallback, Reporter, Trainer, WeightAverage


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the trained model, its numbers and where they are on disk.

    The metrics are what the task reports beside the loss (`task_of(recipe).metric`); language models have none.
    """

    recipe: Recipe
    model: NormsmithPreTrainedModel
    controller: Controller | None
    data: Data
    validation: Dataset[Any]
    validation_loss: float
    history: tuple[dict[str, float], ...]
    seconds: float
    folder: Path
    test_loss: float | None = None
    validation_metric: float | None = None
    test_metric: float | None = None


def build_model(recipe: Recipe, facts: Facts | int) -> NormsmithPreTrainedModel:
    """The recipe's model with its initial weights, which the seed decides; a number is the size of a vocabulary."""
    return new_model(recipe, facts)


def build_scheduled(
    recipe: Recipe, facts: Facts | int, start: Recipe | None = None
) -> tuple[NormsmithPreTrainedModel, Controller | None]:
    """The recipe's model as it is trained: its norms replaced where a schedule asks for it, with the controller.

    With `start` it begins with the weights of that recipe's model, where `share_start_` can share them.

    Raises:
        InputError: the sizes, the norm, the connection and the schedule do not fit together.
    """
    model = build_model(recipe, facts)
    if start is not None:
        share_start_(model, build_model(start, facts))
    if recipe.schedule is None:
        return model, None
    return model, schedule_(model, recipe.schedule, steps=recipe.training.max_steps)


@torch.no_grad()
def share_start_(model: NormsmithPreTrainedModel, source: NormsmithPreTrainedModel) -> int:
    """Copy initial random weights (of layers and embeddings) of equal name and shape from `source`; how many.

    One seed gives one model, but a layer of another shape shifts the random numbers of all later ones. Nothing is
    copied where the two are meant to start with another spread; parameters of norms and connections start at fixed
    values, which may be what differs.
    """
    spreads = [(initial_deviations(m.config), _family(m).unit_weights) for m in (model, source)]
    if spreads[0] != spreads[1]:
        return 0
    ours, theirs = _random_weights(model), _random_weights(source)
    shared = [name for name, weight in ours.items() if name in theirs and weight.shape == theirs[name].shape]
    for name in shared:
        ours[name].copy_(theirs[name])
    return len(shared)


def _random_weights(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            found[name] = module.weight
        elif isinstance(module, Fresh):
            found.update(module.named_parameters(name, recurse=False))
    return found


def _family(model: NormsmithPreTrainedModel) -> type[Connection]:
    return connections.get(model.config.connection_spec.kind)


def run_recipe(
    recipe: Recipe,
    folder: Path,
    reporter: Reporter,
    *,
    overwrite: bool = False,
    resume: bool = False,
    data: Data | None = None,
    progress_name: str | None = None,
    save: bool = True,
    start: Recipe | None = None,
) -> Run:
    """Train and evaluate one recipe and write everything to `folder`.

    The folder is made (or with `overwrite` emptied) once data, model and schedule are known to fit, so that a mistake
    in the recipe costs no earlier result.

    Files: `recipe.yaml`, `environment.json`, `metrics.jsonl` (one line per logged step; what is not finite is null),
    `checkpoints/`, and at the end the model with its tokenizer, `diagnostics.json` if the recipe asks for it, and
    `result.json`, which comes last. `start` is the recipe whose initial weights are shared (see `build_scheduled`).

    Where several processes share the run (torchrun), rank 0 alone reports, writes and evaluates, and every rank returns
    the same numbers or fails.
    """
    peak = PeakMemory(alone=data is None)
    data = data or load_shared(recipe.data, reporter.say)
    training, causal = recipe.training, recipe.data.kind == "text"
    checkpoints = folder / "checkpoints"

    def prepare() -> tuple[Parts, NormsmithPreTrainedModel, Controller | None, TrainingArguments]:
        model, controller = build_scheduled(recipe, facts_of(data), start)
        if controller is None and gated_norms(model):
            # Gates that nothing freezes are watched all the same: entropy and weights are logged, τ goes to `tau_end`.
            controller = freeze_gates_(model, GateFreezeConfig(rule="never"), steps=training.max_steps)
        give_moments_(model, data)
        if ranks.rank() == 0:  # which alone reads them
            check_corruptions(recipe, data)
        arguments = training.arguments(checkpoints, recipe.seed)
        return parts_of(recipe, data), model, controller, arguments

    def open_folder() -> str | None:
        prepare_folder(folder, overwrite, resume)
        _describe_run(recipe, folder, data, resume)
        return _last_complete(checkpoints, kept) if resume else None

    parts, model, controller, arguments = ranks.together(prepare)
    kept = _kept(recipe, model, parts)
    last = ranks.on_first(open_folder)
    watched = limited(parts.validation, 64 if parts.collate is None else 512)
    if ranks.world_size() > 1:
        watched, arguments.per_device_eval_batch_size = _even(watched, training.batch_size)
    extra = watchers(controller, causal) if recipe.evaluation.diagnostics else []
    trainer = Trainer(
        model,
        arguments,
        train_dataset=parts.train,
        eval_dataset=watched,
        data_collator=parts.collate,
        controller=controller,
        callbacks=[ProgressCallback(reporter, progress_name or recipe.name), *extra],
    )
    if kept is not None:
        trainer.add_callback(kept)  # behind the Trainer's own, which may change the weights at a step's end
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=last)
    finally:  # a run that diverged or was interrupted has a curve too
        logged = [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
        history = tuple(_numbers(entry) for entry in logged)
        if ranks.rank() == 0:
            write_text(folder / METRICS, "".join(json.dumps(_strict(entry)) + "\n" for entry in history))
    seconds, memory = time.monotonic() - started, peak.read()
    step = None if kept is None else kept.apply_()
    model.eval()

    def finish() -> dict[str, Any]:
        result = {**_result(recipe, _judge(recipe, model, parts)), "seconds": seconds}
        if save:
            model.save_pretrained(folder)
            if data.tokenizer is not None:
                data.tokenizer.save_pretrained(folder)
        result["parameters"] = model.num_parameters()
        if gates := gated_norms(model):
            result["gate_parameters"] = sum(p.numel() for gate in gates.values() for p in gate.selector_parameters())
        if memory is not None:
            result["peak_memory_bytes"] = memory
        if step is not None:
            result["kept_step"] = step
        measured: list[tuple[list[Panel], dict[str, float]]] = []
        if recipe.evaluation.diagnostics:
            measured.append(diagnose(model, controller, parts.validation, causal, reporter.say))
        if recipe.evaluation.corruptions is not None and isinstance(data, TaskData):
            measured.append(measure_corruptions(model, recipe, data, folder, reporter.say))
        if measured:
            write_panels(folder, [panel for panels, _ in measured for panel in panels])
        for _, numbers in measured:
            result |= numbers
        if last is not None:
            result["resumed"] = True  # then `seconds` is the time of the last part only
        write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
        return result

    result = ranks.on_first(finish)
    return Run(
        recipe,
        model,
        controller,
        data,
        parts.validation,
        result["validation_loss"],
        history,
        seconds,
        folder,
        **{key: result.get(key) for key in ("test_loss", "validation_metric", "test_metric")},
    )


def _even(examples: Dataset[Any], batch_size: int) -> tuple[Dataset[Any], int]:
    """As many of the first examples as all ranks can share, and the largest batch with which none is read twice.

    accelerate fills the last batches up with examples from the beginning, which would shift the mean loss.
    """
    world, length = ranks.world_size(), len(examples)  # pyright: ignore[reportArgumentType] (ours have a length)
    each = max(1, length // world)
    return limited(examples, each * world), max(b for b in range(1, batch_size + 1) if each % b == 0)


def _kept(recipe: Recipe, model: nn.Module, parts: Parts) -> WeightAverage | BestWeights | None:
    """What keeps other weights than the last ones, where the recipe asks for it."""
    training = recipe.training
    if training.weight_average:
        return WeightAverage(model, training.weight_average)
    if training.keep == "last":
        return None
    start = 0 if recipe.schedule is None else recipe.schedule.span(training.max_steps)[1]
    return BestWeights(model, lambda: ranks.on_first(lambda: badness(recipe, model, parts.validation)), start)


def _judge(recipe: Recipe, model: nn.Module, parts: Parts) -> dict[str, TaskScore]:
    """Split → score; the test split is looked at here and nowhere else."""
    chosen = {"validation": parts.validation, "test": parts.test}
    scores = {name: judge(recipe, model, split) for name, split in chosen.items() if split is not None}
    # The last update can break a model whose every training loss was finite.
    if not math.isfinite(sum(score.loss for score in scores.values())):
        raise DivergedError(
            f"the validation loss is not finite after step {recipe.training.max_steps}: no model is written; "
            "lower the learning rate or lengthen the warm-up"
        )
    return scores


def _result(recipe: Recipe, scores: dict[str, TaskScore]) -> dict[str, Any]:
    """What `result.json` says of the scores; a metric comes with its name and with which values of it are better."""
    result: dict[str, Any] = {f"{name}_loss": score.loss for name, score in scores.items()}
    metric = task_of(recipe).metric
    if metric is not None:
        result |= {f"{name}_metric": score.metric for name, score in scores.items()}
        result |= {"metric": metric.name, "better": metric.better}
    return result


def _describe_run(recipe: Recipe, folder: Path, data: Data, resume: bool) -> None:
    path = folder / "recipe.yaml"
    if resume and path.exists() and not recipe.is_written_in(path.read_text(encoding="utf-8")):
        raise InputError(f"{path}: the interrupted run had another recipe; resume with that one or write --overwrite")
    processes = str(ranks.world_size())
    facts = {**environment(), "processes": processes, "data_sha256": data.data_hash, "data_source": data.source}
    described = folder / "environment.json"
    if resume and described.exists():
        before = json.loads(described.read_text(encoding="utf-8"))
        _check_resumed(folder, before, data, processes)
        facts = {key: _then(before.get(key, now), now) for key, now in facts.items()}
    write_text(path, recipe.to_yaml())
    write_text(described, json.dumps(facts, indent=1) + "\n")


def _then(before: str, now: str) -> str:
    """What a run's environment says of a fact that its parts do not share."""
    return before if before == now or before.endswith(f", then {now}") else f"{before}, then {now}"


def _check_resumed(folder: Path, before: dict[str, str], data: Data, processes: str) -> None:
    if before.get("data_sha256") != data.data_hash:
        raise InputError(
            f"{data.source}: its data are not what the interrupted run in {folder} read; "
            "bring the old data back or write --overwrite"
        )
    if (started := before.get("processes", "1")) != processes:
        raise InputError(
            f"{folder}: the interrupted run had {started} process(es) and this one has {processes}, which would change "
            f"its batches; resume it with {started} (torchrun --nproc-per-node) or write --overwrite"
        )


def _last_complete(checkpoints: Path, kept: WeightAverage | BestWeights | None) -> str | None:
    """The newest checkpoint; those that an interruption cut short go away.

    transformers writes their state last, and `kept` its file after that.
    """
    for folder in checkpoints.glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            whole = kept is None or (folder / kept.file).is_file()
        except (OSError, ValueError):
            whole = False
        if not whole:
            shutil.rmtree(folder, ignore_errors=True)
    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


# What transformers logs about its own pace; it differs between two runs of the same recipe.
_BOOKKEEPING = re.compile(r"epoch|total_flos|num_input_tokens_seen|.*_(runtime|per_second|time)")


def _strict(entry: dict[str, float]) -> dict[str, float | None]:
    # JSON has no NaN: readers other than Python's refuse the whole line.
    return {name: value if math.isfinite(value) else None for name, value in entry.items()}


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    """Every number that was logged, whoever logged it: a new diagnostic needs no line here."""
    kept = {name: float(v) for name, v in entry.items() if _is_number(v) and not _BOOKKEEPING.fullmatch(name)}
    # In one order, since a checkpoint gives the entries of an interrupted run back in another.
    ordered = sorted(kept.keys() - {"step"}, key=lambda name: (name not in ("loss", "eval_loss"), name))
    return {"step": int(entry["step"]), **{name: kept[name] for name in ordered}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
