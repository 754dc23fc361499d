"""A run belongs to one process at a time; what a dead process held can be taken over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from normsmith.errors import InputError
from normsmith.report.results import write_text


@contextlib.contextmanager
def guard(study: Path) -> Generator[None]:
    """One process at a time decides about locks and about what is written to the study as a whole.

    The kernel lets go of it when a process dies, so a killed one leaves nothing behind here.
    """
    from filelock import FileLock

    path = study / ".guard"
    try:
        with FileLock(path):
            yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


class Lock:
    """The claim of one process on one run: a file with the owner's process number and host.

    Args:
        study: the study's folder, whose guard makes looking and taking one act.
        path: the lock file.
    """

    def __init__(self, study: Path, path: Path) -> None:
        self.study, self.path = study, path

    def take(self) -> bool:
        """Whether the run is ours now; False where a living process holds it. A dead owner loses it."""
        with guard(self.study):
            if self.owner() is not None:
                return False
            write_text(self.path, json.dumps(_me()))
            return True

    def give(self) -> None:
        """Let go."""
        with guard(self.study):
            if self.owner() == _me():
                self.path.unlink()

    def owner(self) -> dict[str, Any] | None:
        """Who holds the run, or None if nobody living does; on another host everybody counts as living."""
        holder = read_owner(self.path)
        if holder is None or (holder.get("host") == socket.gethostname() and not _lives(holder)):
            return None
        return holder


def read_owner(path: Path) -> dict[str, Any] | None:
    """What the lock file says, whether its writer lives or not; None where there is no legible one."""
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", held) if isinstance(held, dict) else None


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _start(os.getpid())}


def _lives(holder: dict[str, Any]) -> bool:
    number = holder.get("pid")
    if not isinstance(number, int) or number < 1:
        return False
    import psutil  # os.kill with signal 0 would end the process on Windows

    if not psutil.pid_exists(number):
        return False
    return holder.get("started") == _start(number)


def _start(number: int) -> str | None:
    """When a process began, so that a number which the system has given away again is not taken for its old owner."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
