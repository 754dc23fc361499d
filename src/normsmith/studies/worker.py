"""A process that takes runs of a study until none is free: `python -m normsmith.studies.worker STUDY THREADS`.

It writes one JSON line per event to its output, and ends itself when its input closes, because then the process that
started it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

_QUIET_SECONDS = 0.2  # between two messages about steps


def main(folder: Path, threads: int) -> int:
    """Work on the study in `folder` with so many threads; the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_watch, daemon=True).start()
    output, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not look like a message

    import torch
    from transformers.utils import logging

    from normsmith.data import load_data
    from normsmith.errors import NormsmithError
    from normsmith.studies.execute import carry_out, open_runs
    from normsmith.studies.study import Cell, load_study

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    last = 0.0

    def tell(cell: Cell, step: int) -> None:
        nonlocal last
        if time.monotonic() - last > _QUIET_SECONDS:
            last = time.monotonic()
            _write(output, run=cell.label, step=step)

    try:
        study = load_study(folder)
        data = load_data(study.plan.base.data)
        for cell in open_runs(study):
            if carry_out(study, cell, data, tell):
                _write(output, run=cell.label, ended=True)
    except NormsmithError as error:
        print(error, file=sys.stderr)  # noqa: T201 (a program of its own)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _write(output: TextIO, **message: Any) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()


def _watch() -> None:
    # Not through sys.stdin: its lock, held here, would abort the interpreter when it shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
