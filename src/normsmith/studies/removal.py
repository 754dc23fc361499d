"""Remove a pretrained model's norms: evaluate, fine-tune while tapering, fold, verify, measure, write."""

from __future__ import annotations

import copy
import datetime
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from normsmith.bench import LABELS, DecodeSpeed, bench_decode
from normsmith.bench.decode import learned_positions
from normsmith.data import PackedWindows, TextData, load_text
from normsmith.diagnostics import audit_removal
from normsmith.errors import DivergedError, InputError
from normsmith.evaluation import language_loss
from normsmith.folders import check_output, write_folder
from normsmith.report import Arm, DecodeRow, Point, Results, write_report
from normsmith.schedules import Controller, TaperConfig
from normsmith.studies.card import model_card
from normsmith.studies.environment import environment
from normsmith.studies.removal_config import METHODS, RemovalConfig, preset
from normsmith.surgery import FoldReport, Sites, find_norms, fold_, remove_one_by_one_, taper_
from normsmith.surgery.export import export_model
from normsmith.surgery.native import MODELLING_FILE
from normsmith.surgery.replace import replace_modules
from normsmith.training import ProgressCallback, Reporter, Trainer
from normsmith.traits import is_causal_lm

__all__ = ["METHODS", "Removal", "RemovalConfig", "preset", "remove_norms"]


# What a row of the decode table is called, so that the speeds of two arms stand in their lines of the result table.
_ROWS = {"baseline": "original", "tapered": "tapered", "folded": "removed", "twin": "twin"}
_METHODS = {"taper": "tapered", "fakeln": "FakeLN"}  # what was done before folding


@dataclass(frozen=True, eq=False)
class Removal:
    """What came out: the folded model, and every number for card and report."""

    model: nn.Module
    report: FoldReport
    results: Results


@dataclass(frozen=True, eq=False)
class _Trained:
    loss: float
    seconds: float
    history: tuple[dict[str, float], ...]


def remove_norms(
    model: Any, source: Path, output: Path, config: RemovalConfig, reporter: Reporter, *, command: str, overwrite: bool
) -> Removal:
    """Remove a pretrained causal language model's norms, fold it, and write `output`: the model, its card, its report.

    Raises:
        InputError: no causal or no pre-norm model, no tokenizer, too little text, a taper that does not fit the run.
        DivergedError: a loss or the final model is not finite; nothing is written.
        VerificationError: folding changed the outputs.
    """
    check_output(source, output, overwrite)
    if not is_causal_lm(model):
        raise InputError(f"{source}: {type(model).__name__} is no causal language model, which is what taper takes")
    data = load_text(config.data.model_copy(update={"tokenizer": str(source)}), reporter.say)
    validation = _validation(data, config)
    model.to(config.training.arguments(Path(), config.seed).device)  # before it is copied, and measured
    taper = _ordered(model, find_norms(model), data, config)
    # So that a model without such norms, or a schedule that does not fit the run, is known before any training.
    _removing(copy.deepcopy(model), taper, config).close()
    reporter.say("evaluating the model as it is")
    before = language_loss(model, validation, config.training.batch_size)
    original = copy.deepcopy(model)
    control, plain = None, copy.deepcopy(model) if config.control else None
    if config.control:
        control = _train(plain, None, data, validation, config, reporter, "fine-tuning with norms")
    controller = _removing(model, taper, config)
    notes = [f"`{n}` was removed whole: {why}" for n, why in getattr(controller, "reasons", {}).items()]
    for note in notes:
        reporter.say(note)
    teacher = plain if control is not None and config.distill else None
    faster = config.training.model_copy(
        update={"learning_rate": config.taper_learning_rate or config.training.learning_rate}
    )
    tapering = config.model_copy(update={"training": faster})
    name = f"fine-tuning, norms {'tapering' if config.method == 'taper' else 'removed one by one'}"
    tapered = _train(model, controller, data, validation, tapering, reporter, name, teacher)
    controller.close()
    whole = copy.deepcopy(model)
    report = fold_(model, example={"input_ids": _rows(validation, 4)})
    folded_loss = language_loss(model, validation, config.training.batch_size)
    if not math.isclose(tapered.loss, folded_loss, rel_tol=1e-3):
        raise DivergedError(f"folding changed the validation loss from {tapered.loss:.5f} to {folded_loss:.5f}")
    task = reporter.task("Decoding with a KV cache", config.decode_rounds)
    family = {"baseline": original, "tapered": whole, "folded": model, "twin": _twin(original, report)}
    length = min(80, learned_positions(original) or 80)
    prompt = _rows(validation, 1)[:, : length * 2 // 5]
    speeds = bench_decode(family, prompt, length - prompt.shape[1], config.decode_rounds, tick=task.update)
    arms = _arms(original, model, before, control, tapered, folded_loss, report, config)
    results = _results(source, config, data, arms, speeds, command)
    _write(model, source, output, data, results, report, notes, overwrite)
    return Removal(model, report, results)


def _validation(data: TextData, config: RemovalConfig) -> Dataset[Any]:
    windows = PackedWindows(data.validation, config.data.sequence_length)
    count = min(config.windows, len(windows))
    return torch.utils.data.Subset(windows, range(count)) if count else windows


def _rows(windows: Any, count: int) -> torch.Tensor:
    return torch.stack([windows[i]["input_ids"] for i in range(min(count, len(windows)))])


def _ordered(model: nn.Module, sites: Sites, data: TextData, config: RemovalConfig) -> TaperConfig:
    if config.order == "together":
        return config.taper
    windows = _rows(PackedWindows(data.train, config.data.sequence_length, config.seed), 32).split(4)
    roles = {"internal": ("pre",), "final": ("final",), "all": ("pre", "final")}[config.taper.placement]
    found = [r for r in audit_removal(model, windows, sites) if r.role in roles and not r.blocked]
    names = tuple(r.name for r in sorted(found, key=lambda r: r.order or 0))
    return config.taper.model_copy(update={"order": names})


def _removing(model: nn.Module, taper: TaperConfig, config: RemovalConfig) -> Controller:
    """Make the norms removable, and what removes them in the course of the run."""
    steps = config.training.max_steps
    if config.method == "fakeln":
        return remove_one_by_one_(model, config.sequential, steps=steps)
    return taper_(model, taper, steps=steps)


def _train(
    model: Any,
    controller: Any,
    data: TextData,
    validation: Dataset[Any],
    config: RemovalConfig,
    reporter: Reporter,
    name: str,
    teacher: nn.Module | None = None,
) -> _Trained:
    training = config.training
    windows = PackedWindows(data.train, config.data.sequence_length, config.seed, training.sequences)
    what = "loss" if teacher is None else "KL to the control" if config.distill == 1 else "loss with KL to the control"
    callbacks = [ProgressCallback(reporter, name, what)]
    with tempfile.TemporaryDirectory() as unused:  # transformers makes the folder, though nothing is saved there
        arguments = training.arguments(Path(unused), config.seed)
        arguments.save_strategy = "no"
        trainer = Trainer(
            model,
            arguments,
            train_dataset=windows,
            controller=controller,
            callbacks=callbacks,
            teacher=teacher,
            distill=config.distill,
        )
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
    loss = language_loss(model.eval(), validation, training.batch_size)
    if not math.isfinite(loss):
        raise DivergedError(f"{name}: the validation loss is not finite; lower the learning rate or lengthen the taper")
    history = tuple(entry for entry in trainer.state.log_history if "loss" in entry)
    return _Trained(loss, seconds, history)


def _twin(original: nn.Module, report: FoldReport) -> nn.Module:
    """The model that never had the removed norms; its weights differ, its speed is the ceiling."""
    twin = copy.deepcopy(original).eval()
    replace_modules(twin, dict.fromkeys(report.removed))
    return twin


def _arms(
    original: Any,
    model: Any,
    before: float,
    control: _Trained | None,
    tapered: _Trained,
    folded_loss: float,
    report: FoldReport,
    config: RemovalConfig,
) -> tuple[Arm, ...]:
    def arm(name: str, label: str, text: str, run: _Trained | None, loss: float, reference: float | None) -> Arm:
        return Arm(
            name=name,
            label=label,
            description=text,
            parameters=(model if name == "removed" else original).num_parameters(),
            seconds=0.0 if run is None else run.seconds,
            validation_loss=loss,
            perplexity=math.exp(loss),
            gap_percent=None if reference is None else 100 * (loss / reference - 1),
            fold_error=report.error if name == "removed" else None,
            curve=() if run is None else tuple(Point.from_log(entry) for entry in run.history),
        )

    reference = before if control is None else control.loss
    rates = config.training.learning_rate, config.taper_learning_rate or config.training.learning_rate
    kept = f"on the data, learning rate {rates[0]:g}"
    gone = f"{_METHODS[config.method]} and folded, learning rate {rates[1]:g}"
    if control is not None and config.distill:
        gone += f", {config.distill:.0%} of the training loss from the model fine-tuned with norms"
    arms = [] if control is None else [arm("control", "Fine-tuned with norms", kept, control, control.loss, None)]
    arms.append(arm("original", "As it was", "before any training", None, before, reference if control else None))
    arms.append(arm("removed", "Norms removed", gone, tapered, folded_loss, reference))
    return tuple(arms)


def _results(
    source: Path,
    config: RemovalConfig,
    data: TextData,
    arms: tuple[Arm, ...],
    speeds: list[DecodeSpeed],
    command: str,
) -> Results:
    method = _METHODS[config.method]
    rows = tuple(
        DecodeRow(
            name=_ROWS[s.name],
            label=LABELS[s.name].replace("tapered", method),
            median=s.median,
            low=s.low,
            high=s.high,
            ratio=s.ratio,
        )
        for s in speeds
    )
    by_name = {arm.name: arm for arm in arms}
    ratio = {s.name: s.ratio for s in speeds}["folded"]
    removed, first = by_name["removed"], by_name["original"]
    against = f"{removed.gap_percent:+.1f} % against " + (
        "the model fine-tuned with norms" if "control" in by_name else "the model as it was"
    )
    gone = "any norm" if config.placement == "all" else f"its {config.placement} norms"
    summary = (
        f"Without {gone} the model has a validation loss of {removed.validation_loss:.4f} "
        f"({against}; {first.validation_loss:.4f} before) and decodes at {ratio:.2f} times the speed. One seed."
    )
    return Results(
        title=f"Norms removed from {source.resolve().name}",
        command=command,
        summary=summary,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seed=config.seed,
        data={
            "source": data.source,
            "SHA-256": data.data_hash,
            "train tokens": len(data.train),
            "validation tokens": len(data.validation),
            "tokens read per arm": config.training.sequences * config.data.sequence_length,
        },
        environment=environment(),
        recipe=config.to_dict(),
        arms=arms,
        decode=rows,
    )


def _write(
    model: Any,
    source: Path,
    output: Path,
    data: TextData,
    results: Results,
    report: FoldReport,
    notes: list[str],
    overwrite: bool,
) -> None:
    def fill(folder: Path) -> None:
        export_model(model, folder)
        data.tokenizer.save_pretrained(folder)
        results.save(folder / "results.json")
        write_report(results, folder / "report.html")
        own_code = (folder / MODELLING_FILE).exists()
        card = model_card(results, report, source.resolve().name, own_code, notes)
        (folder / "README.md").write_text(card, encoding="utf-8")

    try:
        write_folder(output, fill, overwrite)
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror or error})") from None
