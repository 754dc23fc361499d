"""Studies on disk without training: run folders as the runner writes them, with curves from formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import normsmith
from normsmith.studies import Recipe
from normsmith.studies.cells import record_failure
from normsmith.studies.study import Cell, Plan, Study, make_study

DATA = "0" * 64
BASE = {
    "name": "small",
    "data": {"vocab_size": 280, "sequence_length": 16, "validation_fraction": 0.2},
    "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "training": {"max_steps": 1000, "batch_size": 4, "learning_rate": 1e-2, "log_every": 1},
}
# Final losses: the arm's own, and what each seed adds to all arms, so that differences are less noisy than the losses.
LEVELS = (3.0, 3.2, 2.9, 3.05, 2.95, 3.4, 3.1, 2.8, 3.3, 3.15)
Log = Callable[[int, int, int], dict[str, Any]]
"""Arm's number, seed, step → further numbers of that step."""


def make(
    folder: Path,
    arms: Sequence[str] = ("rmsnorm", "layernorm", "dyt"),
    seeds: Sequence[int] = (0, 1, 2),
    points: int = 20,
    sweep: dict[str, tuple[str, ...]] | None = None,
    diverge: Callable[[Cell], bool] = lambda _: False,
    log: Log = lambda arm, seed, step: {},
    data: dict[str, Any] | None = None,
    further: Callable[[Cell], dict[str, Any]] = lambda _: {},
) -> Path:
    """A whole study; `diverge` chooses the runs that have no result, `further` changes the others' results."""
    base = Recipe(**{**BASE, "data": data or BASE["data"]})
    if sweep and not base.data.test_fraction:
        base = base.changed(data={**base.data.to_dict(), "test_fraction": 0.2})
    command = "normsmith compare small.yaml --arms " + ",".join(arms)
    plan = Plan(
        normsmith=normsmith.__version__,
        command=command,
        data_sha256=DATA,
        base=base,
        arms=tuple(arms),
        seeds=tuple(seeds),
        sweep=sweep or {},
    )
    study = make_study(folder, plan)
    for cell in study.cells:
        write_run(study, cell, points, diverge(cell), log)
        path = cell.folder / "result.json"
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), **further(cell)}))
    return folder


def final_loss(study: Study, cell: Cell) -> float:
    """What the run's result says."""
    number = study.plan.arms.index(cell.arm)
    noise = np.random.default_rng([number, cell.seed]).normal(0, 0.02)
    return (
        LEVELS[number % len(LEVELS)]
        + 0.1 * math.sin(cell.seed)
        + float(noise)
        + 0.1 * list(study.points).index(cell.point)
    )


def write_run(study: Study, cell: Cell, points: int, diverged: bool, log: Log) -> None:
    cell.folder.mkdir(parents=True)
    (cell.folder / ".normsmith").touch()
    (cell.folder / "recipe.yaml").write_text(cell.recipe_text)
    facts = {"normsmith": normsmith.__version__, "torch": "2.9.0", "torch threads": "2", "data_sha256": DATA}
    (cell.folder / "environment.json").write_text(json.dumps(facts))
    final, number = final_loss(study, cell), study.plan.arms.index(cell.arm)
    wobble = np.random.default_rng([number, cell.seed, 1]).normal(0, 0.05, points + 1)
    lines: list[dict[str, Any]] = []
    for step in range(1, points + 1):
        loss = final + 3 * math.exp(-4 * step / points)
        lines.append(
            {"step": step, "loss": loss + wobble[step], "learning_rate": 1e-2 * (1 - step / points), "grad_norm": 1.0}
        )
        lines[-1] |= log(number, cell.seed, step)
        if step % max(points // 10, 1) == 0:
            lines.append({"step": step, "eval_loss": loss})
    if diverged:
        lines = lines[: max(len(lines) // 3, 1)]
    (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if diverged:
        record_failure(cell, "diverged", f"the loss or the weights are not finite since step {len(lines)}")
        return
    result = {"validation_loss": final, "seconds": 10.0 + number, "parameters": 10_000 + number}
    if study.test_split:
        result["test_loss"] = final + 0.01
    (cell.folder / "result.json").write_text(json.dumps(result))
