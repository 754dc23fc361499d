"""Two real processes: every rank tapers alike, from the statistics of all, and stops alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import STEPS, TAPER, windows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ddp")
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        *("--standalone", "--nproc-per-node", "2"),
        str(Path(__file__).with_name("ddp_taper.py")),
        str(folder),
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.terminate()  # on this signal torchrun ends its ranks, which else wait for each other for minutes
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"the ranks wait for each other:\n{output[-4000:]}")
    assert process.returncode == 0, output[-4000:]
    return folder, [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def moving(values: list[float]) -> float:
    average = 0.0
    for value in values:
        average += TAPER.momentum * (value - average)
    return average / (1 - (1 - TAPER.momentum) ** len(values))


def per_step(values: list[float]) -> list[float]:
    """Means of the two micro-batches of each step of the warm-up."""
    return [(values[2 * i] + values[2 * i + 1]) / 2 for i in range(TAPER.span(STEPS)[0])]


def test_both_ranks_calibrate_to_the_average_of_both(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = ranks[1]
    for key in ("scales", "target", "gates", "gate_history", "weights"):
        assert first[key] == second[key], key
    assert set(first["gates"]) == {0.0}
    for name, scale in first["scales"].items():
        own = [
            [[moving(per_step([m[i] for m in rank["moments"][name]])) for i in range(2)] for rank in (first, second)]
        ][0]
        (a, b), (c, d) = own
        assert scale == pytest.approx((a + c) / (b + d), rel=1e-5), name
        assert a / b != pytest.approx(c / d, rel=1e-4), "the ranks must see different data for this to say anything"
    targets = [moving(per_step(rank["anchor"])) for rank in (first, second)]
    assert first["target"] == pytest.approx(sum(targets) / 2, rel=1e-5)
    assert targets[0] != pytest.approx(targets[1], rel=1e-4)


def test_the_ranks_share_the_windows_in_their_order(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = ranks[1]
    data = windows(128)
    expected = [data[i]["input_ids"].tolist() for i in range(128)]
    batches = [rows[i : i + 4] for i in range(0, 64, 4) for rows in (first["read"], second["read"])]
    assert [row for batch in batches for row in batch] == expected


def test_each_rank_keeps_its_own_statistics(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["broadcast_buffers"] for rank in ranks[1]] == [False, False]


def test_a_loss_that_breaks_on_one_rank_stops_both(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    for result in results:
        assert "not finite since step 3: the last good checkpoint is" in result["diverged"]
        assert "checkpoint-2;" in result["diverged"]
    assert (folder / "taper" / "checkpoint-8").is_dir()
    assert [p.name for p in (folder / "diverged").iterdir()] == ["checkpoint-2"]


def test_checkpoints_of_two_ranks_hold_the_schedule(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, _) = ranks
    state = json.loads((folder / "taper" / "checkpoint-4" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["NormsmithCallback"]["attributes"]["controller_state"]
    assert saved["completed"] == 4
    assert saved["target"] == pytest.approx(first["target"], rel=1e-6)
    assert torch.tensor(saved["moments"]).shape == (4, 2)
