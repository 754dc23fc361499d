"""What runs logged, as curves: one per quantity, with the spread over seeds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

BUCKETS = 130
"""More than this many places cannot be told apart at the width of a picture."""


@dataclass(frozen=True)
class Curve:
    """One quantity of one run."""

    steps: Steps
    values: Values


@dataclass(frozen=True)
class Band:
    """Mean, lowest and highest over several curves at every step that any of them has; `runs` is how many there are."""

    steps: Steps
    mean: Values
    low: Values
    high: Values
    runs: int


Key = tuple[str, str]
"""Quantity and member: `c/0` is ("c", "0"), the third number of a list ("name", "2"), any other key ("name", "")."""


def split_key(key: str) -> Key:
    """The quantity of a logged key, and whose it is: what follows the first `/`, or the first `.`.

    >>> split_key("gate_entropy/layers.0"), split_key("c.3"), split_key("logit_norm")
    (('gate_entropy', 'layers.0'), ('c', '3'), ('logit_norm', ''))
    """
    name, _, member = key.partition("/") if "/" in key else key.partition(".")
    return (name, member) if name and member else (key, "")


def read_curves(entries: Sequence[dict[str, Any]]) -> tuple[dict[Key, Curve], list[int]]:
    """The curves in a run's log, and the steps at which a number was not finite."""
    found: dict[Key, tuple[list[int], list[float]]] = {}
    keys: dict[str, Key] = {}
    broken: list[int] = []
    for entry in entries:
        step: int = entry["step"]
        for name, value in entry.items():
            if name == "step":
                continue
            key = keys.get(name) or keys.setdefault(name, split_key(name))
            pairs = [((key[0], str(i)), v) for i, v in enumerate(value)] if isinstance(value, list) else [(key, value)]
            for where, number in pairs:
                if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                    if number is None and (not broken or broken[-1] != step):
                        broken.append(step)
                    continue
                steps, values = found.setdefault(where, ([], []))
                steps.append(step)
                values.append(number)
    return {key: Curve(np.array(s, dtype=np.int64), np.array(v, dtype=float)) for key, (s, v) in found.items()}, broken


def band_of(curves: Iterable[Curve]) -> Band:
    """The band of several curves; where one ends early, the others go on."""
    kept = [curve for curve in curves if len(curve.steps)]
    steps = np.unique(np.concatenate([curve.steps for curve in kept]))
    table = np.full((len(kept), len(steps)), np.nan)
    for row, curve in zip(table, kept, strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.values
    low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
    return Band(steps, np.clip(np.nanmean(table, axis=0), low, high), low, high, len(kept))


def thin(steps: Steps, values: Values, buckets: int = BUCKETS) -> tuple[Steps, Values]:
    """At most 2·buckets + 2 of the points: the lowest and highest of every bucket, the first and the last.

    So a single spike stays as high as it was, and the curve ends where it ended.
    """
    if len(steps) <= 2 * buckets + 2:
        return steps, values
    kept = {0, len(steps) - 1}
    for start, stop in _buckets(steps, buckets):
        kept |= {start + int(np.argmin(values[start:stop])), start + int(np.argmax(values[start:stop]))}
    chosen = sorted(kept)
    return steps[chosen], values[chosen]


def thin_band(band: Band, buckets: int = BUCKETS) -> tuple[Steps, Values, Values]:
    """Steps, lower and upper edge: in every bucket the lowest and the highest, so that nothing leaves the band."""
    if len(band.steps) <= buckets:
        return band.steps, band.low, band.high
    spans = list(_buckets(band.steps, buckets))
    steps = np.array([e for start, stop in spans for e in (band.steps[start], band.steps[stop - 1])])
    low = np.array([band.low[start:stop].min() for start, stop in spans]).repeat(2)
    high = np.array([band.high[start:stop].max() for start, stop in spans]).repeat(2)
    return steps, low, high


def _buckets(steps: Steps, buckets: int) -> Iterable[tuple[int, int]]:
    edges = np.searchsorted(steps, np.linspace(steps[0], steps[-1] + 1, buckets + 1))
    return ((int(a), int(b)) for a, b in itertools.pairwise(edges) if b > a)


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
