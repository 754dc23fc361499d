"""`compare`: from the command to the table, in one process and in several, killed and continued."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import contents, normsmith
from tests.cli.test_cli_basics import SCRIPT

SMALL = ("--set", "model.hidden_size=16", "--set", "training.max_steps=6", "--set", "evaluation.windows=20")
# What is the same however often a study was interrupted, and whoever carried it out.
_TIME = "seconds"


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(v) for key, v in value.items() if key not in (_TIME, "command", "study")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_a_small_study_from_the_command_to_the_table(work: Path) -> None:
    command = ("compare", "tiny.yaml", "--arms", "rmsnorm,sphere:p=2,decay=none", "--seeds", "2", *SMALL, "-o", "st")
    result = normsmith(*command)
    assert result.code == 0, result
    assert "sphere:p=2,decay=none, seed 1: finished  validation loss " in result.err
    assert "st: 24/24" in result.err
    assert "4 of 4 runs" in result.err
    assert result.out.strip().splitlines()[0].split()[:2] == ["Arm", "Seeds"]
    assert result.out.strip().splitlines()[-2:] == [
        "Table: st/results.md",
        "Report: normsmith report st -o st/report.html",
    ]
    table = (work / "st/results.md").read_text()
    assert "| Arm | Seeds | Validation loss [95 %] | Difference [95 %] |" in table
    assert "with 2 pairs its p cannot fall below 0.5 and can never reach 0.05" in table
    assert "normsmith compare tiny.yaml --arms rmsnorm,sphere:p=2,decay=none --seeds 2" in table
    rows = list(csv.DictReader((work / "st/results.csv").read_text().splitlines()))
    assert [(row["arm"], row["finished"]) for row in rows] == [("rmsnorm", "2"), ("sphere:p=2,decay=none", "2")]
    # The same command again: nothing is trained, the table is the same, times included.
    before = contents(work / "st")
    again = normsmith(*command, "--json")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out) == {**results(work / "st"), "command": json.loads(again.out)["command"]}
    changed = {name for name, data in contents(work / "st").items() if before.get(name) != data}
    assert changed == {"study.json", "results.json", "results.md"}  # all three name the command
    assert timeless(results(work / "st")) == timeless(json.loads(before["results.json"]))


def test_a_sweep_reports_the_test_split(work: Path) -> None:
    result = normsmith(
        "compare", "tiny.yaml", "--arms", "rmsnorm,layernorm", "--seeds", "3,5", "--json", *SMALL, "-o", "st",
        "--sweep", "training.learning_rate=1e-9,1e-2",
    )  # fmt: skip
    assert result.code == 0, result
    found = json.loads(result.out)
    assert found["metric"] == "test loss"
    assert [row["point"] for row in found["arms"]] == ["training.learning_rate=1e-2"] * 2
    assert len(found["runs"]) == 8
    shown = [run for run in found["runs"] if run["arm"] == "layernorm" and run["point"].endswith("1e-2")]
    assert [run["seed"] for run in shown] == [3, 5]
    assert found["arms"][1]["mean"] == pytest.approx(sum(run["test_loss"] for run in shown) / 2)
    assert all(run["test_loss"] != run["validation_loss"] for run in found["runs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "rmsnorm,layernrom"], "arm 'layernrom': unknown name 'layernrom'; did you mean 'layernorm'"),
        (["--arms", "rmsnorm"], "at least two arms"),
        (["--arms", "rmsnorm,base"], "are the same model and training"),
        (["--arms", "rmsnorm,dyt", "--seeds", "1,1"], "seed 1 is there twice"),
        (["--arms", "rmsnorm,dyt", "--sweep", "training.lr=1"], "unknown key 'lr'"),
        (["--arms", "rmsnorm,dyt", "--sweep", "seed=1"], "seed is shared by all arms"),
        (["--arms", "rmsnorm,dyt", "--jobs", "0"], "Invalid value for '--jobs'"),
        (["--arms", "rmsnorm,dyt", "--difference", "0"], "Invalid value for '--difference'"),
        (["--arms", "rmsnorm,dyt", "--set", "data.source=absent.txt"], "absent.txt: no such file"),
        (["--arms", "rmsnorm,dyt", "-o", "/proc/normsmith/st"], "cannot be written"),
        (["--arms", "rmsnorm,dyt", "-o", "tiny.yaml"], "is a file, expected a folder"),
        (["--arms", "rmsnorm,dyt", "-o", "."], "was not written by normsmith"),
        ([], "Missing option '--arms'"),
    ],
)
def test_wrong_input_leaves_no_trace(arguments: list[str], message: str, unchanged: Callable[[], None]) -> None:
    normsmith("compare", "tiny.yaml", *arguments).refused(message)


LONG = ("--set", "training.max_steps=60", "--set", "training.save_every=6", "--set", "training.log_every=6")
STUDY = ("compare", "tiny.yaml", "--arms", "rmsnorm,dyt", "--seeds", "2", *LONG)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert path.exists(), process.communicate()


def test_a_study_killed_and_started_again_ends_with_the_same_table(work: Path) -> None:
    process = subprocess.Popen([SCRIPT, *STUDY, "-o", "cut"], stderr=subprocess.PIPE, text=True)
    # In the third run: two are finished, one is interrupted after its second checkpoint, one has not begun.
    wait_for(work / "cut/rmsnorm/1/checkpoints/checkpoint-12/trainer_state.json", process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert (work / "cut/dyt/0/result.json").exists()
    assert not (work / "cut/rmsnorm/1/result.json").exists()
    assert (work / "cut/rmsnorm/.1.lock").exists()  # of a dead process
    finished = (work / "cut/rmsnorm/0/result.json").stat().st_mtime_ns
    assert normsmith(*STUDY, "-o", "cut").code == 0
    assert normsmith(*STUDY, "-o", "whole").code == 0
    assert (work / "cut/rmsnorm/0/result.json").stat().st_mtime_ns == finished
    assert json.loads((work / "cut/rmsnorm/1/result.json").read_text())["resumed"] is True
    assert timeless(results(work / "cut")) == timeless(results(work / "whole"))
    for name in ("rmsnorm/0", "rmsnorm/1", "dyt/0", "dyt/1"):
        for file in ("metrics.jsonl", "model.safetensors"):
            assert (work / "cut" / name / file).read_bytes() == (work / "whole" / name / file).read_bytes()
    assert not list((work / "cut").rglob("*.lock"))


def when(path: Path, action: Callable[[], object]) -> threading.Thread:
    """Do something as soon as a file exists."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def owner(lock: Path) -> int:
    return json.loads(lock.read_text())["pid"]


def test_several_processes_each_with_its_threads_and_one_that_dies(work: Path) -> None:
    lock = work / "st/dyt/.0.lock"
    killer = when(
        work / "st/dyt/0/checkpoints/checkpoint-6/trainer_state.json",
        lambda: os.kill(owner(lock), signal.SIGKILL),
    )
    result = normsmith(*STUDY, "-o", "st", "--jobs", "2")
    killer.join()
    assert result.code == 0, result
    assert "dyt, seed 0: failed  the process ended by signal 9 (SIGKILL)" in result.err
    assert [row["counts"] for row in results(work / "st")["arms"]] == [{"finished": 2}, {"failed": 1, "finished": 1}]
    environment = json.loads((work / "st/rmsnorm/1/environment.json").read_text())
    assert environment["torch threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert not list((work / "st").rglob("*.lock"))
    assert normsmith(*STUDY, "-o", "st", "--retry").code == 0
    assert [row["counts"] for row in results(work / "st")["arms"]] == [{"finished": 2}] * 2


@pytest.mark.slow
def test_a_terminated_study_ends_its_processes_and_leaves_its_runs_open(work: Path) -> None:
    workers: list[int] = []

    def terminate() -> None:
        workers.append(owner(work / "st/dyt/.0.lock"))
        os.kill(os.getpid(), signal.SIGTERM)

    killer = when(work / "st/dyt/0/checkpoints/checkpoint-6/trainer_state.json", terminate)
    result = normsmith(*STUDY, "-o", "st", "--jobs", "2", "--set", "training.max_steps=6000")
    killer.join()
    assert result.code == 143, result
    assert result.err.splitlines()[-1] == "normsmith: terminated; the same command continues"
    assert workers[0] != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0], 0)
    for left in ("*.lock", "failure.json", "result.json"):
        assert not list((work / "st").rglob(left))
