"""Several runs at once, each worker a process with its share of the cores."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from normsmith.errors import NormsmithError
from normsmith.studies.cells import record_failure
from normsmith.studies.execute import StudyProgress, open_runs, wait
from normsmith.studies.locks import read_owner
from normsmith.studies.study import Study
from normsmith.studies.tasks import Data

_PATIENCE = 20.0  # seconds that a worker has to end its step and let go of its run


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_gpu(number: int) -> dict[str, str]:
    """The variable with which process `number` sees one of this process's GPUs, in turn; nothing where there is one.

    A run uses the first GPU that it sees, so all of them would else share one.
    """
    import torch

    count = torch.cuda.device_count()  # asks the driver and takes no memory of a GPU
    if count < 2:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = named if len(named) == count else [str(n) for n in range(count)]
    return {"CUDA_VISIBLE_DEVICES": devices[number % count].strip()}


Messages = queue.Queue[tuple["_Worker", dict[str, Any] | None]]


class _Worker:
    """A process that takes runs until none is free; it ends itself when this end of its input closes."""

    def __init__(self, study: Study, threads: int, messages: Messages, number: int = 0) -> None:
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (open as long as the process)
        # OpenMP reads these once, when torch is loaded: later is too late.
        budget = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "normsmith.studies.worker", str(study.folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={
                "OMP_WAIT_POLICY": "passive",
                **os.environ,
                **budget,
                "RAYON_NUM_THREADS": str(threads),
                **one_gpu(number),
            },
            start_new_session=True,  # Ctrl-C reaches us alone, and we decide
        )
        self.worked = False  # whether it has had a run
        self._messages = messages
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self._messages.put((self, json.loads(line)))
        self.process.wait()
        self._messages.put((self, None))

    def last_error(self) -> str:
        """How the process ended, in one line."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        code = self.process.returncode
        how = f"the process ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return f"{how}: {lines[-1]}" if lines else how

    def close(self) -> None:
        """Wait for a process that was told to end, but not for ever."""
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
        self.errors.close()


class Processes:
    """`jobs` worker processes on this machine, with ⌊cores / jobs⌋ threads each, spread over the GPUs if it has any."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.threads = jobs, max(1, cores() // jobs)

    def run(self, study: Study, data: Data, progress: StudyProgress) -> None:
        """Carry out what is open; a worker that dies costs the run it had, which is recorded as failed."""
        while left := open_runs(study):
            if all(study.lock(cell).owner() is not None for cell in left):
                wait(study, left, progress)
            else:
                self._round(study, min(self.jobs, len(left)), progress)

    def _round(self, study: Study, count: int, progress: StudyProgress) -> None:
        messages: Messages = queue.Queue()
        cells = {cell.label: cell for cell in study.cells}
        workers: list[_Worker] = []
        try:
            workers += [_Worker(study, self.threads, messages, number) for number in range(count)]
            living = set(workers)
            while living:
                worker, message = messages.get()
                worker.worked |= message is not None
                if message is None:
                    living.discard(worker)
                    self._ended(study, worker, progress)
                elif message.get("ended"):
                    progress.ended(cells[message["run"]])
                else:
                    progress.tell(cells[message["run"]], message["step"])
        finally:
            for worker in workers:
                worker.process.terminate()  # all at once; then wait for each
            for worker in workers:
                worker.close()

    def _ended(self, study: Study, worker: _Worker, progress: StudyProgress) -> None:
        if worker.process.returncode == 0:
            return
        held = [cell for cell in study.cells if _holds(worker.process.pid, study.lock(cell).path)]
        for cell in held:
            record_failure(cell, "failed", worker.last_error())
            study.lock(cell).path.unlink(missing_ok=True)
            progress.ended(cell)
        # One that was killed between two of its runs is replaced; one that never had a run would die again.
        if not held and not worker.worked:
            raise NormsmithError(f"a worker process could not work: {worker.last_error()}")


def _holds(number: int, lock: Path) -> bool:
    return (read_owner(lock) or {}).get("pid") == number
