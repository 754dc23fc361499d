"""The timing harness against work whose duration is known (CASES row 17)."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import pytest
import torch

from normsmith.bench import Timing, bench_import, imports, interleave, seconds_of, timing


def sleeping(seconds: float) -> Callable[[], float]:
    return lambda: seconds_of(lambda: time.sleep(seconds))


def test_known_delays_are_reported_within_five_percent() -> None:
    measured = interleave({"short": sleeping(0.02), "long": sleeping(0.05)}, rounds=7, warmup=1)
    assert measured["short"].median == pytest.approx(0.02, rel=0.05)
    assert measured["long"].median == pytest.approx(0.05, rel=0.05)
    assert measured["long"].relative_to(measured["short"]) == pytest.approx(2.5, rel=0.05)


def test_the_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # A device that returns at once and works on: only synchronising shows its 30 ms.
    queue: list[float] = [0.1]  # left over from before; it must not count

    def finish() -> None:
        while queue:
            time.sleep(queue.pop())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", finish)
    # A busy machine may sleep longer, but never less, and not by all of what was left over.
    assert 0.03 <= seconds_of(lambda: queue.append(0.03)) < 0.1
    assert timing.synchronize() is None


def test_the_order_rotates_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []
    done: list[int] = []
    values = iter(range(100))

    def case(name: str) -> Callable[[], float]:
        return lambda: (order.append(name), float(next(values)))[1]

    measured = interleave({name: case(name) for name in "abc"}, rounds=4, warmup=2, tick=done.append)
    assert "".join(order) == "abcabc" + "abc" + "bca" + "cab" + "abc"
    assert done == [1, 2, 3, 4]
    assert list(measured) == ["a", "b", "c"]
    assert measured["a"].seconds == (6, 11, 13, 15)
    assert measured["b"].seconds == (7, 9, 14, 16)


def test_ratios_are_paired_within_rounds() -> None:
    # The machine slows down tenfold halfway: each round says 2, the ratio of the medians says something else.
    base = Timing((1.0, 1.0, 1.0, 10.0, 10.0))
    other = Timing((2.0, 2.0, 20.0, 20.0, 20.0))
    assert other.relative_to(base) == statistics.median([2, 2, 20, 2, 2]) == 2
    assert other.median / base.median == 20
    assert base.relative_to(other) == 0.5
    with pytest.raises(ValueError, match="zip"):
        base.relative_to(Timing((1.0,)))


def test_median_and_quartiles() -> None:
    measured = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert measured.median == 3
    assert measured.quartiles == (2, 4)
    assert Timing((7.0,)).quartiles == (7, 7)


def test_imports_are_timed_in_fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        assert check, "an import that fails must not be timed"
        commands.append(command)
        time.sleep(0.06 if "normsmith" in command[-1] else 0.03)

    monkeypatch.setattr(imports.subprocess, "run", run)
    measured = bench_import(rounds=3)
    plain, ours = measured["import torch"], measured["import torch, normsmith"]
    assert ours.relative_to(plain) == pytest.approx(2, rel=0.05)
    assert {tuple(c) for c in commands} == {(sys.executable, "-c", name) for name in measured}
