"""Runs of a study on a Ray cluster: many machines, fractions of accelerators, retries when a worker or machine dies."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normsmith.errors import InputError, NormsmithError
from normsmith.studies.cells import record_failure
from normsmith.studies.execute import POLL_SECONDS, StudyProgress, carry_out, open_runs, wait
from normsmith.studies.processes import cores
from normsmith.studies.study import Cell, Study, load_study
from normsmith.studies.tasks import Data

if TYPE_CHECKING:
    from types import ModuleType


class RayExecutor:
    """Carries out runs as Ray tasks, under the same locks and the same resume rule as every other executor.

    All machines must see the study's folder and the data under the same path. A run whose worker dies is given to
    another one, which resumes it from its newest checkpoint, up to `retries` times; then it counts as failed.

    Args:
        address: of a running cluster (`auto` finds the one on this machine); without one, a cluster of this machine
            is started and stopped.
        cpus: cores of a run, which are also its threads.
        gpus: accelerators of a run; a fraction shares one among several runs.
        retries: how often a run may lose its worker.
    """

    def __init__(self, address: str | None = None, cpus: int = 1, gpus: float = 0.0, retries: int = 2) -> None:
        if cpus < 1 or gpus < 0 or retries < 0:
            raise InputError(f"cpus {cpus}, gpus {gpus}, retries {retries}: at least 1, 0 and 0")
        self.address, self.cpus, self.gpus, self.retries = address, cpus, gpus, retries

    def run(self, study: Study, data: Data, progress: StudyProgress) -> None:
        """Carry out what is open; wait for what other processes have."""
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            self._connect(ray)
        try:
            while left := open_runs(study):
                free = [cell for cell in left if study.lock(cell).owner() is None]
                if free:
                    _Round(ray, self, study, progress).carry_out(free)
                else:
                    wait(study, left, progress)
        finally:
            if started:
                ray.shutdown()

    def _connect(self, ray: ModuleType) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._knock()
        local: dict[str, Any] = {"num_cpus": max(cores(), self.cpus), "include_dashboard": False}
        options: dict[str, Any] = local if self.address is None else {"address": self.address}
        try:
            ray.init(log_to_driver=False, logging_level="error", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise self._unreachable(error) from None
        total = ray.cluster_resources()
        for name, wanted in (("CPU", self.cpus), ("GPU", self.gpus)):
            if wanted > total.get(name, 0):
                raise InputError(
                    f"a run asks for {wanted:g} {name} and the whole cluster has {total.get(name, 0):g}: it would wait "
                    "for ever"
                )

    def _knock(self) -> None:
        """Find out in seconds whether anybody listens: Ray itself tries for many minutes."""
        host, colon, port = (self.address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
            except OSError as error:
                raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> InputError:
        reason = " ".join(str(error).split())[:200]
        return InputError(
            f"--address {self.address}: no Ray cluster could be reached ({reason}); start one with `ray start --head`, "
            "or leave --address out"
        )


class _Round:
    """One pass over runs that are free."""

    def __init__(self, ray: ModuleType, executor: RayExecutor, study: Study, progress: StudyProgress) -> None:
        self.ray, self.executor, self.study, self.progress = ray, executor, study, progress
        self.board = ray.remote(num_cpus=0)(_Board).remote()
        budget = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), str(executor.cpus)
        )
        self.task = ray.remote(
            num_cpus=executor.cpus,
            num_gpus=executor.gpus,
            max_retries=0,  # the lock of a dead worker must be freed before another one is asked
            max_calls=1,  # a fresh process each: no run inherits what another left behind
            runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive", **budget}},
        )(_work)

    def carry_out(self, cells: list[Cell]) -> None:
        """Ask for all of them and collect what comes back."""
        asked = {self._ask(cell): cell for cell in cells}
        lost = dict.fromkeys((cell.label for cell in cells), 0)
        try:
            while asked:
                ready, _ = self.ray.wait(list(asked), num_returns=1, timeout=POLL_SECONDS)
                for label, step in self.ray.get(self.board.take.remote()).items():
                    self.progress.tell(next(c for c in cells if c.label == label), step)
                for reference in ready:
                    cell = asked.pop(reference)
                    again = self._collect(reference, cell, lost)
                    if again is not None:
                        asked[again] = cell
        finally:
            for reference in asked:
                self.ray.cancel(reference, force=True)

    def _ask(self, cell: Cell) -> Any:
        return self.task.remote(str(self.study.folder.absolute()), cell.label, self.executor.cpus, self.board)

    def _collect(self, reference: Any, cell: Cell, lost: dict[str, int]) -> Any:
        try:
            if self.ray.get(reference):
                self.progress.ended(cell)
        except self.ray.exceptions.RayTaskError as error:
            raise NormsmithError(f"{cell.label}: {' '.join(str(error.cause or error).split())[:300]}") from None
        except self.ray.exceptions.RayError as error:  # the worker or its machine is gone, and its lock says it lives
            self.study.lock(cell).path.unlink(missing_ok=True)
            lost[cell.label] += 1
            if lost[cell.label] <= self.executor.retries:
                return self._ask(cell)
            reason = " ".join(str(error).split())[:200]
            record_failure(cell, "failed", f"its worker died {lost[cell.label]} times; the last time: {reason}")
            self.progress.ended(cell)
        return None


class _Board:
    """Where workers write how far they are."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def put(self, label: str, step: int) -> None:
        """A run has completed so many steps."""
        self.steps[label] = step

    def take(self) -> dict[str, int]:
        """What is new since the last call."""
        steps, self.steps = self.steps, {}
        return steps


def _work(folder: str, label: str, threads: int, board: Any) -> bool:
    """One run in a worker process; whether it was done here."""
    import torch
    from transformers.utils import logging

    from normsmith.data import load_data

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    study = load_study(Path(folder))
    cell = next(c for c in study.cells if c.label == label)
    last = 0.0

    def tell(cell: Cell, step: int) -> None:
        nonlocal last
        if time.monotonic() - last > POLL_SECONDS:
            last = time.monotonic()
            board.put.remote(cell.label, step)

    return carry_out(study, cell, load_data(study.plan.base.data), tell)


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise InputError("--executor ray needs Ray: pip install 'normsmith[ray]'") from None
    return ray
