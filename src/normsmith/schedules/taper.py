"""The taper schedule: how far a norm has gone from normalising to a fixed scaling at each optimiser step."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from normsmith.errors import InputError
from normsmith.schedules.base import ScheduleConfig, schedules


@schedules.register("taper")
class TaperConfig(ScheduleConfig):
    """How norms are tapered (TaperNorm, arXiv 2602.10408).

    Args:
        warmup: fraction of the run at g = 1, in which c is calibrated; usually the learning-rate warm-up.
        end: fraction of the run at which g reaches 0.
        shape: `cosine` (half a cosine, the paper's) or `linear`.
        placement: `internal` tapers the norms inside the blocks and keeps the final one as the scale anchor, `final`
            tapers that one alone, `all` every norm.
        scale_loss: λ of the scale loss λ·mean((s(h) − target)²) at the final norm's input, 0 for none.
        momentum: weight μ of the new sample in the moving averages of the calibration.
        calibration: `ema`, moving averages over all of the warm-up (the paper's), or `batch`, plain means over the last
            `calibration_steps` optimiser steps of it: equal in expectation, with less lag behind a moving stream.
        calibration_steps: see `calibration`.
        start_step: optimiser step after which the taper begins, instead of the fraction `warmup`.
        end_step: optimiser step at which g reaches 0, instead of the fraction `end`.
        where: only these sites of the placement, as in `select_sites` (roles or name patterns, with commas).
        order: names of all tapered sites in the order of their removal; each then has its own gate, which takes two
            parts of the n + 1 parts of the taper, one part after the previous site's. Default: all together.
        evaluate: gate in evaluation mode once the taper has begun: `final` (0, the model that will be shipped) or
            `current`.
    """

    kind: Literal["taper"] = "taper"
    warmup: float = pydantic.Field(default=0.05, gt=0, lt=1)
    end: float = pydantic.Field(default=1.0, gt=0, le=1)
    shape: Literal["cosine", "linear"] = "cosine"
    placement: Literal["internal", "final", "all"] = "internal"
    scale_loss: float = pydantic.Field(default=0.1, ge=0)
    momentum: float = pydantic.Field(default=0.01, gt=0, le=1)
    evaluate: Literal["final", "current"] = "final"
    calibration: Literal["ema", "batch"] = "ema"
    calibration_steps: int = pydantic.Field(default=64, ge=1)
    start_step: int | None = pydantic.Field(default=None, ge=1)
    end_step: int | None = pydantic.Field(default=None, ge=2)
    where: str | None = None
    order: tuple[str, ...] | None = None

    def check(self) -> None:
        """The taper must end after it begins."""
        if self.start_step is None and self.end_step is None and self.end <= self.warmup:
            raise ValueError(f"end={self.end:g} must lie after warmup={self.warmup:g}")
        if self.start_step is not None and self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"end_step={self.end_step} must lie after start_step={self.start_step}")
        if self.order is not None and len(set(self.order)) != len(self.order):
            raise ValueError("order names a site twice")

    def span(self, steps: int) -> tuple[int, int]:
        """(k_s, k_e): the optimiser steps after which the taper begins and is complete, for a run of `steps`."""
        start = self.start_step or max(1, round(self.warmup * steps))
        end = self.end_step or round(self.end * steps)
        if end > steps:
            raise InputError(
                f"the taper ends at step {end}, after the run of {steps} steps, and would never be complete; "
                "lower end_step or train longer"
            )
        if end <= start:
            raise InputError(
                f"a run of {steps} steps is too short to taper: warm-up ends at step {start}, the taper at step {end}; "
                "train longer, or lower warmup or raise end"
            )
        return start, end

    def window(self, steps: int, place: int = 0, count: int = 1) -> tuple[float, float]:
        """(k_s, k_e) of the site that is number `place` of `count` in the order of removal; `span` without an order."""
        start, end = self.span(steps)
        if self.order is None:
            return start, end
        part = (end - start) / (count + 1)
        return round(start + place * part), end if place == count - 1 else round(start + (place + 2) * part)

    def gate(self, step: int, steps: int, place: int = 0, count: int = 1) -> float:
        """Return g after `step` completed optimiser steps of `steps`: 1 up to k_s, then down to exactly 0 at k_e."""
        start, end = self.window(steps, place, count)
        if step <= start:
            return 1.0
        if step >= end:
            return 0.0
        progress = (step - start) / (end - start)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.shape == "cosine" else 1 - progress
