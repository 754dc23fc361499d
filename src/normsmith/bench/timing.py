"""Timings that can be compared: interleaved rounds in one process, medians with quartiles, ratios round by round."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one case, one number per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the seconds."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def relative_to(self, other: Timing) -> float:
        """Median over the rounds of this case's time divided by the other's in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def synchronize() -> None:
    """Wait until an accelerator has done what was asked of it, so that the clock sees the work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that one call takes, the accelerator's work included."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


@contextmanager
def compiling(cases: int) -> Generator[None]:
    """While `cases` models are compiled and measured: none of them may fall back to eager code unseen.

    Models of one class share their code, and torch by itself stops compiling it after eight versions.
    """
    torch.compiler.reset()  # what was compiled before counts too
    limits: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] (documented under this name only)
    with limits.patch(recompile_limit=max(8, 4 * cases), fail_on_recompile_limit_hit=True):
        yield


def _keep_freed_memory() -> None:
    # glibc returns large blocks to the system and pays page faults for them at the next call. Which case pays depends
    # on what ran before it: a kernel of 0.4 ms was seen to take 3.7. Kept blocks make it alike for all cases.
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def interleave(
    cases: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 2,
    tick: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Run every case once per round, in an order that rotates, so that drift of the machine hits all alike.

    Args:
        cases: name → function that does the work once and returns its seconds (see `seconds_of`).
        rounds: measured rounds.
        warmup: rounds before them that are not measured (compilation, caches, clocks).
        tick: called after each measured round with the number of rounds done.
    """
    _keep_freed_memory()
    names = list(cases)
    for _ in range(warmup):
        for name in names:
            cases[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds):
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(cases[name]())
        if tick is not None:
            tick(done + 1)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
