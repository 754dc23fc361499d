"""A study of three arms that takes seconds, and what its tests ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normsmith
from normsmith.data import TextData
from normsmith.studies import Recipe
from normsmith.studies.cells import read_cell
from normsmith.studies.execute import Here, StudyProgress
from normsmith.studies.study import Plan, Study, load_study
from normsmith.training import Reporter

BASE: dict[str, Any] = {
    "name": "small",
    "data": {"vocab_size": 280, "sequence_length": 16, "validation_fraction": 0.2},
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.1},
    "training": {"max_steps": 6, "batch_size": 4, "learning_rate": 1e-2, "log_every": 2},
    "evaluation": {"windows": 30},
}
ARMS = ("rmsnorm", "layernorm", "sphere:p=2,decay=none")


def plan_of(base: Recipe, data: TextData, **changes: Any) -> Plan:
    settings = {"arms": ARMS, "seeds": (0, 1, 2), "command": "normsmith compare …", **changes}
    return Plan(normsmith=normsmith.__version__, data_sha256=data.data_hash, base=base, **settings)


def run(study: Study, data: TextData) -> None:
    Here().run(study, data, StudyProgress(Reporter(quiet=True), study))


def states(folder: Path) -> list[str]:
    study = load_study(folder)
    return [read_cell(study, cell).state for cell in study.cells]
