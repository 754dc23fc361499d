"""The sequential schedule: at which optimiser step each use of each norm becomes a division by a constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import pydantic

from normsmith.errors import InputError
from normsmith.schedules.base import ScheduleConfig, schedules

What = Literal["whole", "qk", "v", "end", "first"]


class Removal(NamedTuple):
    """After optimiser step `step`, `what` of the site `name` turns fake; `end` and `first` switch an exception off."""

    step: int
    what: What
    name: str


class Uses(NamedTuple):
    """The sites in the order of the model, by use: `mlp` and `final` whole, `attention` for queries and keys, then
    values; those of `inseparable` are attention norms too, removed whole in the turn of the values.
    """

    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    inseparable: tuple[str, ...]
    final: tuple[str, ...]


# Steps from one removal to the next; the published ones, which also divide any other span (gaps and both waits).
_GAPS = (2, 2, 3)
_WAITS = (2, 10)


@schedules.register("sequential")
class SequentialConfig(ScheduleConfig):
    """How norms are removed one after the other (FakeLN, Baroni et al. 2025, arXiv 2507.02559).

    First the norms of the MLPs, block by block, then those of the attentions for queries and keys, then for values,
    then the final one; after that end-of-text tokens and last the first position lose their exceptions.

    Args:
        warmup: fraction of the run after which the first norm goes.
        end: fraction of the run at which the last exception goes.
        start_step: optimiser step after which the first norm goes, instead of `warmup`; then `gaps` count, not `end`.
        gaps: optimiser steps from one removal to the next, for MLP norms, queries and keys, and values; needs
            `start_step`. Default: (2, 2, 3), the paper's for its smallest model; without `start_step` stretched so
            that the last removal comes at `end`.
        waits: optimiser steps from the final norm (or its turn) to the end of the end-of-text exception, and from there
            to the end of the first-position exception; used with `gaps`.
        placement: `all` norms, or the `internal` ones, which keeps the final norm.
        scale_loss: λ of the auxiliary loss λ·mean((σ − σ̂)²) over all tokens at the final norm's input, σ̂ the mean over
            the batch's ordinary tokens, without gradient; 0 for none.
        momentum: weight of the new sample in the running mean of σ (the paper's momentum 0.9 is 0.1 here).
        where: only these sites of the placement, as in `select_sites` (roles or name patterns, with commas).
    """

    kind: Literal["sequential"] = "sequential"
    warmup: float = pydantic.Field(default=0.05, gt=0, lt=1)
    end: float = pydantic.Field(default=0.6, gt=0, le=1)
    start_step: int | None = pydantic.Field(default=None, ge=1)
    gaps: tuple[int, int, int] | None = None
    waits: tuple[int, int] = _WAITS
    placement: Literal["internal", "all"] = "all"
    scale_loss: float = pydantic.Field(default=0.1, ge=0)
    momentum: float = pydantic.Field(default=0.1, gt=0, le=1)
    where: str | None = None

    def check(self) -> None:
        """Steps and fractions are not mixed, and nothing goes before its turn."""
        if self.gaps is not None and self.start_step is None:
            raise ValueError("gaps are in steps and need start_step")
        if min(self.gaps or _GAPS) < 0 or min(self.waits) < 0:
            raise ValueError(f"gaps={self.gaps} and waits={self.waits} must not be negative")
        if self.start_step is None and self.end <= self.warmup:
            raise ValueError(f"end={self.end:g} must lie after warmup={self.warmup:g}")

    def plan(self, steps: int, uses: Uses) -> tuple[Removal, ...]:
        """Every removal of a run of `steps`, in order.

        Raises:
            InputError: the last one would come after the run; the message says by how many steps.
        """
        start = self.start_step or max(1, round(self.warmup * steps))
        units = self._units(uses)
        scale = 1.0
        if self.gaps is None and self.start_step is None:
            scale = max(0.0, self.end * steps - start) / max(units[-1].step, 1)
        found = tuple(Removal(start + round(scale * place), what, name) for place, what, name in units)
        if found[-1].step > steps:
            raise InputError(
                f"the last removal comes at step {found[-1].step}, {found[-1].step - steps} steps after the end of the "
                f"run of {steps}: start earlier, shorten gaps or waits, or train longer"
            )
        return found

    def _units(self, uses: Uses) -> list[Removal]:
        """The removals in steps after the first one."""
        gaps, place, found = self.gaps or _GAPS, 0, list[Removal]()
        turns: list[tuple[tuple[str, ...], What, int]] = [(uses.mlp, "whole", gaps[0]), (uses.attention, "qk", gaps[1])]
        for names, what, gap in turns:
            for name in names:
                found.append(Removal(place, what, name))
                place += gap
        for name in (*uses.inseparable, *uses.attention):
            found.append(Removal(place, "whole" if name in uses.inseparable else "v", name))
            place += gaps[2]
        found += [Removal(place, "whole", name) for name in uses.final]
        found.append(Removal(place + self.waits[0], "end", ""))
        found.append(Removal(place + sum(self.waits), "first", ""))
        return found


# GPT-2 by number of layers (arXiv 2507.02559): steps, warm-up of the learning rate, first removal, gaps, peak and last
# learning rate, λ. The longer two were released before the end of their learning-rate schedule.
PRESETS: Mapping[int, tuple[int, int, int, tuple[int, int, int], float, float, float]] = {
    12: (300, 25, 20, (2, 2, 3), 6e-4, 3e-4, 0.1),
    24: (500, 10, 20, (2, 2, 3), 6e-4, 3e-4, 0.1),
    36: (600, 15, 30, (4, 4, 6), 3e-4, 4e-5, 0.03),
    48: (800, 20, 50, (4, 4, 6), 1e-4, 2e-5, 0.01),
}
