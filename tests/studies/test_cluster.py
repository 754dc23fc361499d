"""Runs on a Ray cluster of two workers on this machine: the same table as without, also when a worker dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from normsmith.errors import InputError
from normsmith.studies.cluster import RayExecutor
from normsmith.studies.executors import make_executor
from normsmith.studies.processes import cores
from tests.cli.conftest import fill

pytest.importorskip("ray")

# Ray starts processes and sockets of its own, so everything runs as its user runs it: by the console script.
SCRIPT = Path(sys.executable).with_name("normsmith")
STUDY = (
    *("compare", "tiny.yaml", "--arms", "rmsnorm,dyt", "--seeds", "2", "--set", "training.max_steps=30"),
    *("--set", "training.save_every=5", "--set", "training.log_every=5", "--set", "evaluation.windows=20"),
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    fill(folder)
    done = run(folder, *STUDY, "-o", "plain")
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NORMSMITH_CACHE": str(folder / "cache"), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    command = [SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def table(folder: Path) -> Any:
    found = json.loads((folder / "results.json").read_text())
    for entry in (*found["arms"], *found["runs"]):
        entry.pop("seconds")
    return {key: found[key] for key in ("arms", "runs", "metric")}


def same_bits(one: Path, other: Path) -> bool:
    names = [f"{arm}/{seed}/{file}" for arm in ("rmsnorm", "dyt") for seed in (0, 1)
             for file in ("metrics.jsonl", "model.safetensors")]  # fmt: skip
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.slow
def test_a_study_on_two_workers_one_of_which_dies(work: Path) -> None:
    lock = work / "ray/dyt/.0.lock"
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (work / "ray/dyt/0/checkpoints/checkpoint-10").exists():
            time.sleep(0.005)
        killed.append(json.loads(lock.read_text())["pid"])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = run(work, *STUDY, "-o", "ray", "--executor", "ray", "--jobs", "2")
    thread.join()
    assert done.returncode == 0, done.stderr
    assert len(killed) == 1
    assert table(work / "ray") == table(work / "plain")
    assert same_bits(work / "ray", work / "plain")
    assert json.loads((work / "ray/dyt/0/result.json").read_text())["resumed"] is True
    assert not list((work / "ray").rglob("*.lock"))
    assert "4 of 4 runs" in done.stderr


@pytest.mark.slow
def test_a_worker_that_always_dies_is_a_failed_run(work: Path) -> None:
    study = work / "dying"
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set():
            for lock in study.glob("dyt/.0.lock"):
                try:
                    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
                except (OSError, ValueError):
                    continue
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        done = run(work, *STUDY, "-o", "dying", "--executor", "ray", "--jobs", "2")
    finally:
        stop.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    found = {(r["arm"], r["seed"]): r for r in table(study)["runs"]}
    assert found["dyt", 0]["state"] == "failed"
    assert "its worker died 3 times" in found["dyt", 0]["note"]
    assert sum(r["state"] == "finished" for r in found.values()) == 3


# Ray counts accelerators without looking at them, so a cluster that says it has one is enough here.
ONE_ACCELERATOR = """
import sys
import ray
from normsmith.cli import main
ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("share", "at_once"), [("0.5", 2), ("1", 1)])
def test_runs_share_an_accelerator_by_fractions(share: str, at_once: int, work: Path) -> None:
    name = f"share{share}"
    environment = {**os.environ, "NORMSMITH_CACHE": str(work / "cache"), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", ONE_ACCELERATOR, *STUDY, "-o", name]
    options = ["--executor", "ray", "--jobs", "2", "--gpus", share]
    process = subprocess.Popen([*command, *options], cwd=work, env=environment, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, len(list((work / name).glob("*/.*.lock"))))
        time.sleep(0.01)
    assert process.returncode == 0
    assert table(work / name) == table(work / "plain")
    assert most == at_once


@pytest.mark.slow
def test_no_cluster_at_that_address_and_a_run_that_never_fits(work: Path) -> None:
    done = run(work, *STUDY, "-o", "none", "--executor", "ray", "--address", "127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster could be reached" in done.stderr
    done = run(work, *STUDY, "-o", "none2", "--executor", "ray", "--gpus", "0.5")
    assert done.returncode == 2, done.stderr
    assert "a run asks for 0.5 GPU and the whole cluster has 0: it would wait for ever" in done.stderr


def test_executors_by_name() -> None:
    executor = make_executor("ray", jobs=2, gpus=0.25)
    assert isinstance(executor, RayExecutor)
    assert (executor.cpus, executor.gpus, executor.address) == (max(1, cores() // 2), 0.25, None)
    with pytest.raises(InputError, match="gpus -1"):
        RayExecutor(gpus=-1)
