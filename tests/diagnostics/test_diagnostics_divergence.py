"""A run has diverged when its loss is not finite, or stays above twice its best for 200 steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normsmith.diagnostics import diverged_at
from normsmith.errors import InputError


def literal(losses: list[float], factor: float, patience: int) -> int | None:
    """By the definition, with everything recomputed at every step."""
    for end in range(len(losses)):
        if not math.isfinite(losses[end]):
            return end
        start = end - patience + 1
        if start >= 1 and all(losses[t] > factor * min(losses[:t]) for t in range(start, end + 1)):
            return start
    return None


def test_a_run_that_leaves_for_good() -> None:
    losses = [4 - 0.01 * t for t in range(200)] + [5.0] * 250  # the best is 2.01
    assert diverged_at(losses) == 200
    assert diverged_at(losses[:399]) is None, "199 steps are a spike"
    assert diverged_at([*losses[:399], 4.0, *losses[399:500]]) is None, "it came back in between"
    assert diverged_at([t for t in losses if t < 4.02]) is None


def test_exactly_twice_is_not_above() -> None:
    assert diverged_at([1.0, *[2.0] * 300]) is None
    assert diverged_at([1.0, *[2.0000001] * 300]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(bad: float) -> None:
    assert diverged_at([3.0, 2.0, bad, 1.0]) == 2
    assert diverged_at([bad]) == 0
    assert diverged_at([1.0, 9.0, 9.0, bad], patience=3) == 3, "before the stretch is long enough"
    assert diverged_at([1.0, 9.0, 9.0, 9.0, bad], patience=3) == 1


@given(st.lists(st.floats(0, 8) | st.just(math.nan), max_size=30), st.sampled_from([1.5, 2.0]), st.integers(1, 4))
def test_equals_the_definition(losses: list[float], factor: float, patience: int) -> None:
    assert diverged_at(losses, factor, patience) == literal(losses, factor, patience)


def test_wrong_arguments() -> None:
    assert diverged_at([]) is None
    for factor, patience in ((1.0, 5), (math.nan, 5), (2.0, 0)):
        with pytest.raises(InputError, match="the factor must be above 1, the patience 1 or more"):
            diverged_at([1.0], factor, patience)
    with pytest.raises(InputError, match="step 1: the loss is -1"):
        diverged_at([1.0, -1.0])
