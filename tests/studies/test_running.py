"""Running studies: a folder per run, finished ones skipped, one process per run, interruptions."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from normsmith.data import TextData
from normsmith.errors import InputError
from normsmith.studies import Recipe
from normsmith.studies.cells import FAILURE, read_cell
from normsmith.studies.comparison import read_comparison
from normsmith.studies.execute import Here, StudyProgress, carry_out, forget_failures
from normsmith.studies.locks import Lock
from normsmith.studies.processes import one_gpu
from normsmith.studies.runner import run_recipe
from normsmith.studies.study import Plan, load_study, make_study
from normsmith.studies.tables import markdown
from normsmith.training import Reporter
from tests.studies.small import ARMS, plan_of, run, states

# Runs


def test_a_study_is_a_folder_per_run_and_a_table(finished: Path) -> None:
    remembered = {".recipes.json"}  # by whichever test read the table first
    assert {path.name for path in finished.iterdir()} - remembered == {
        ".guard", ".normsmith", "study.json", "layernorm", "rmsnorm", "sphere_p=2_decay=none"
    }  # fmt: skip
    run_folder = finished / "sphere_p=2_decay=none/2"
    assert {"recipe.yaml", "metrics.jsonl", "environment.json", "result.json", "model.safetensors"} <= {
        path.name for path in run_folder.iterdir()
    }
    assert not list(finished.rglob("*.lock"))
    found = read_comparison(finished)
    assert [row.arm for row in found.arms] == list(ARMS)
    assert [row.counts for row in found.arms] == [{"finished": 3}] * 3
    losses = {
        arm: [json.loads((finished / folder / str(s) / "result.json").read_text())["validation_loss"] for s in range(3)]
        for arm, folder in zip(ARMS, ("rmsnorm", "layernorm", "sphere_p=2_decay=none"), strict=True)
    }
    for row in found.arms:
        assert row.mean == pytest.approx(sum(losses[row.arm]) / 3)
    paired = found.arms[2].paired
    assert paired is not None
    assert paired.mean == pytest.approx(sum(a - b for a, b in zip(losses[ARMS[2]], losses[ARMS[0]], strict=True)) / 3)
    assert found.arms[1].p_holm is not None
    assert found.arms[1].paired is not None
    assert found.arms[1].p_holm >= (found.arms[1].paired.p_t or 0)


def test_a_run_of_a_study_is_what_train_does(finished: Path, base: Recipe, data: TextData, tmp_path: Path) -> None:
    alone = run_recipe(base.changed(seed=1), tmp_path / "alone", Reporter(quiet=True), data=data)
    stored = json.loads((finished / "rmsnorm/1/result.json").read_text())
    assert stored["validation_loss"] == alone.validation_loss
    assert (finished / "rmsnorm/1/metrics.jsonl").read_text() == (tmp_path / "alone/metrics.jsonl").read_text()


def test_finished_runs_are_skipped_and_seeds_and_arms_can_be_added(copied: Path, base: Recipe, data: TextData) -> None:
    kept = {path: path.stat().st_mtime_ns for path in copied.rglob("result.json")}
    shutil.rmtree(copied / "layernorm/1")
    study = make_study(copied, plan_of(base, data, arms=(*ARMS, "dyt"), seeds=(0, 1, 2, 7)))
    run(study, data)
    assert states(copied) == ["finished"] * 16
    changed = {path for path, time in kept.items() if not path.exists() or path.stat().st_mtime_ns != time}
    assert changed == {copied / "layernorm/1/result.json"}
    assert [row.counts for row in read_comparison(copied).arms] == [{"finished": 4}] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("layernorm", "rmsnorm")}, "holds a study with the arms rmsnorm, layernorm, .*; name these too"),
        ({"seeds": (0, 1)}, "holds a study with the seeds 0, 1, 2; name these too"),
        ({"sweep": {"training.clip": ("1",)}}, "the sweep none; sweep the same"),
        ({"data_sha256": "0"}, "other data of .*corpus.txt; bring the old data back"),
        ({"normsmith": "9.9"}, "runs of normsmith .*, this is 9.9"),
        ({"steps": 7}, r"another recipe \(training.max_steps was 6\); give the same recipe"),
    ],
)
def test_another_study_does_not_get_into_the_folder(
    changes: dict[str, Any], message: str, copied: Path, base: Recipe, data: TextData
) -> None:
    steps = changes.pop("steps", None)
    recipe = base if steps is None else base.changed(training={**base.training.to_dict(), "max_steps": steps})
    plan = Plan(**{**plan_of(recipe, data).to_dict(), **changes})
    before = (copied / "study.json").read_bytes()
    with pytest.raises(InputError, match=message):
        make_study(copied, plan)
    assert (copied / "study.json").read_bytes() == before


def test_a_folder_that_holds_something_else_is_refused(base: Recipe, data: TextData, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(InputError, match="was not written by normsmith"):
        make_study(tmp_path / "mine", plan_of(base, data))
    (tmp_path / "mine/.normsmith").touch()  # a trained model, say
    with pytest.raises(InputError, match="mine: holds thesis.tex and no study"):
        make_study(tmp_path / "mine", plan_of(base, data))
    with pytest.raises(InputError, match="mine: holds no study .study.json is missing"):
        read_comparison(tmp_path / "mine")
    with pytest.raises(InputError, match="no such folder"):
        read_comparison(tmp_path / "absent")


# Divergence and failure


def test_a_run_that_diverges_is_kept_counted_and_readable(base: Recipe, data: TextData, tmp_path: Path) -> None:
    arms = ("rmsnorm", "set:training.learning_rate=1e30,training.log_every=1")
    study = make_study(tmp_path / "study", plan_of(base, data, arms=arms, seeds=(0, 1)))
    run(study, data)
    assert states(study.folder) == ["finished", "diverged"] * 2
    folder = study.cells[1].folder
    assert "not finite since step" in json.loads((folder / FAILURE).read_text())["error"]

    def strict(name: str) -> Any:
        raise ValueError(name)

    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)
    found = read_comparison(study.folder)
    assert found.arms[1].counts == {"diverged": 2}
    assert found.arms[1].mean is None
    assert found.arms[1].verdict is not None
    assert found.arms[1].verdict.outcome == "unknown"
    text = markdown(found)
    assert "0 of 2 (2 diverged)" in text
    assert "seed 1: diverged (the loss or the weights are not finite" in text
    assert '"state": "diverged"' in json.dumps(found.plain())
    before = (folder / FAILURE).stat().st_mtime_ns
    forget_failures(study)
    run(study, data)  # it would diverge again
    assert (folder / FAILURE).stat().st_mtime_ns == before


def test_metrics_that_are_not_finite_are_written_as_null(base: Recipe, data: TextData, tmp_path: Path) -> None:
    from normsmith.studies.runner import _strict  # pyright: ignore[reportPrivateUsage]

    assert _strict({"step": 3, "loss": math.nan, "grad_norm": math.inf}) == {"step": 3, "loss": None, "grad_norm": None}


def test_other_data_than_the_study_s_begin_nothing(copied: Path, data: TextData) -> None:
    study = load_study(copied)
    cell = study.cells[3]
    shutil.rmtree(cell.folder)
    with pytest.raises(InputError, match=r"reads other data than .* bring the data of the study there"):
        carry_out(study, cell, dataclasses.replace(data, data_hash="0" * 64), lambda *_: None)
    assert not cell.folder.exists()
    assert study.lock(cell).owner() is None


def test_a_run_that_fails_is_kept_and_tried_again_when_asked(copied: Path, data: TextData) -> None:
    study = load_study(copied)
    cell = study.cells[3]
    shutil.rmtree(cell.folder)
    short = dataclasses.replace(data, train=data.train[:5])
    assert carry_out(study, cell, short, lambda *_: None)
    outcome = read_cell(study, cell)
    assert outcome.state == "failed"
    assert outcome.note.startswith("InputError: the text has 5 tokens, one window needs 16")
    assert not carry_out(study, cell, data, lambda *_: None)
    assert read_comparison(copied).arms[0].counts == {"failed": 1, "finished": 2}
    forget_failures(study)
    assert carry_out(study, cell, data, lambda *_: None)
    assert states(copied) == ["finished"] * 9


# Locks


def test_a_lock_is_one_process_at_a_time_and_a_dead_one_loses_it(tmp_path: Path) -> None:
    path = tmp_path / ".0.lock"
    lock = Lock(tmp_path, path)
    assert lock.take()
    assert not Lock(tmp_path, path).take()
    lock.give()
    assert not path.exists()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = socket.gethostname()
    for holder, free in [
        ({"pid": int(dead.stdout), "host": host, "started": "1"}, True),
        ({"pid": os.getpid(), "host": host, "started": "1"}, True),  # the number was given to another process
        ({"pid": os.getppid(), "host": "elsewhere", "started": "1"}, False),
        ({"pid": int(dead.stdout), "host": "elsewhere", "started": "1"}, False),
        ({"pid": "x", "host": host}, True),
    ]:
        path.write_text(json.dumps(holder))
        assert lock.take() is free, holder
        lock.give()
        assert path.exists() is not free  # what is not ours is not let go
    path.write_text('{"pid": ')
    assert lock.take()


def test_a_dead_lock_goes_to_exactly_one_of_many(tmp_path: Path) -> None:
    path = tmp_path / ".0.lock"
    start = threading.Barrier(6)

    def take() -> bool:
        start.wait()
        return Lock(tmp_path, path).take()

    with ThreadPoolExecutor(6) as pool:
        for _ in range(30):
            path.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "started": "1"}))
            assert sum(pool.map(lambda _: take(), range(6))) == 1


def test_a_run_that_another_process_has_is_waited_for(
    copied: Path, data: TextData, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(copied)
    shutil.rmtree(study.cells[0].folder)
    lock = study.lock(study.cells[0])
    lock.path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:  # the other process is gone
            lock.path.unlink()

    monkeypatch.setattr("normsmith.studies.execute.time.sleep", sleep)
    Here().run(study, data, StudyProgress(Reporter(), study))
    assert len(waits) == 3
    assert states(copied) == ["finished"] * 9
    assert capsys.readouterr().err.count("waiting for rmsnorm, seed 0, which process 1 on elsewhere has") == 1


def test_an_interruption_leaves_a_run_open_and_lets_go(copied: Path, data: TextData) -> None:
    study = load_study(copied)
    cell = study.cells[4]
    shutil.rmtree(cell.folder)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(study, cell, data, interrupt)
    assert read_cell(study, cell).state == "open"
    assert study.lock(cell).owner() is None
    assert carry_out(study, cell, data, lambda *_: None)
    assert states(copied) == ["finished"] * 9


@pytest.mark.parametrize(
    ("count", "named", "expected"),
    [(0, None, [None] * 3), (1, "7", [None] * 3), (2, None, ["0", "1", "0"]), (2, "3, GPU-5", ["3", "GPU-5", "3"])],
)
def test_workers_take_gpus_in_turn(
    count: int, named: str | None, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [one_gpu(number).get("CUDA_VISIBLE_DEVICES") for number in range(3)] == expected
