"""A study of AutoNorm: its table comes from finished runs on shared data, and gates froze where the log says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normsmith.studies.study import load_study
from tests.cli.conftest import normsmith

FREE, FROZEN = (
    "autonorm:pool=sequence+gate_freeze:freeze=0.5,entropy=0.693",
    "autonorm:pool=sequence+gate_freeze:freeze=0.5",
)
ARMS = ("frozen_ln", FROZEN, FREE, "dyt")
SHORT = ("--set", "training.max_steps=12", "--set", "training.log_every=1", "--set", "training.save_every=6")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("autonorm") / "st"
    done = normsmith("compare", "digits-vit", "--arms", ",".join(ARMS), "--seeds", "2", *SHORT, "-o", folder)
    assert done.code == 0, done
    return folder


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_table_is_made_of_finished_runs_on_the_same_data_and_seeds(study: Path) -> None:
    found = json.loads((study / "results.json").read_text())
    assert found["metric"] == "test accuracy"
    assert [row["arm"] for row in found["arms"]] == list(ARMS)
    assert {run["state"] for run in found["runs"]} == {"finished"}
    for cell in load_study(study).cells:  # 9 sites of width 64, ⌊64/4⌋ hidden channels, two candidates
        result = json.loads((cell.folder / "result.json").read_text())
        expected = 9 * (64 * 16 + 16 + 16 * 2 + 2) if cell.arm.startswith("autonorm") else None
        assert result.get("gate_parameters") == expected
    for arm in ARMS:
        assert sorted(run["seed"] for run in found["runs"] if run["arm"] == arm) == [0, 1]
    for row in found["arms"]:
        own = [run["test_metric"] for run in found["runs"] if run["arm"] == row["arm"]]
        assert row["mean"] == pytest.approx(sum(own) / 2)
    read = {json.loads(path.read_text())["data_sha256"] for path in study.glob("*/*/environment.json")}
    assert len(read) == 1
    # What AutoNorm adds is its selectors; that is what the table's parameters say.
    parameters = {row["arm"]: row["parameters"] for row in found["arms"]}
    selectors = 9 * (64 * 16 + 16 + 16 * 2 + 2)
    dyt = 9 * (2 * 64 + 1)
    assert parameters[FROZEN] - parameters["frozen_ln"] == selectors + dyt


@pytest.mark.parametrize(("arm", "freezes"), [(FROZEN, True), (FREE, False)])
def test_gates_freeze_at_half_of_the_run_where_their_entropy_is_not_below_the_threshold(
    arm: str, freezes: bool, study: Path
) -> None:
    cells = [cell for cell in load_study(study).cells if cell.arm == arm]
    assert len(cells) == 2
    for cell in cells:
        folder = cell.folder
        steps = {e["step"]: e for e in entries(folder) if "gate_frozen" in e}
        threshold = 0.5 * torch.tensor(2.0).log() if freezes else 0.693
        assert (steps[6]["gate_entropy"] >= threshold) == freezes
        assert [steps[n]["gate_frozen"] for n in range(1, 13)] == [0] * 5 + [float(freezes)] * 7
        # The log is right: selectors stand still from there on, and only there; the norms beside them do not.
        middle, end = (load_file(path / "model.safetensors") for path in (folder / "checkpoints/checkpoint-6", folder))
        moved = {name: bool((middle[name] != end[name]).any()) for name in middle if "selector" in name}
        assert set(moved.values()) == {not freezes}
        beside = [name for name in middle if "norm." in name and "selector" not in name]
        assert any((middle[name] != end[name]).any() for name in beside)
