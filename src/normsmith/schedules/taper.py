"""The taper schedule: how far a norm has gone from normalising to a fixed scaling at each optimiser step."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.registry import Registry

schedules: Registry[type[Config]] = Registry("schedule")


@schedules.register("taper")
class TaperConfig(Config):
    """How norms are tapered (TaperNorm, arXiv 2602.10408).

    Args:
        warmup: fraction of the run at g = 1, in which c is calibrated; usually the learning-rate warm-up.
        end: fraction of the run at which g reaches 0.
        shape: `cosine` (half a cosine, the paper's) or `linear`.
        placement: `internal` tapers the norms inside the blocks and keeps the final one as the scale anchor, `final`
            tapers that one alone, `all` every norm.
        scale_loss: λ of the scale loss λ·mean((s(h) − target)²) at the final norm's input, 0 for none.
        momentum: weight μ of the new sample in the moving averages of the calibration.
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

    def check(self) -> None:
        """The taper must end after it begins."""
        if self.end <= self.warmup:
            raise ValueError(f"end={self.end:g} must lie after warmup={self.warmup:g}")

    def span(self, steps: int) -> tuple[int, int]:
        """(k_s, k_e): the optimiser steps after which the taper begins and is complete, for a run of `steps`."""
        start, end = max(1, round(self.warmup * steps)), round(self.end * steps)
        if end <= start:
            raise InputError(
                f"a run of {steps} steps is too short to taper: warm-up ends at step {start}, the taper at step {end}; "
                "train longer, or lower warmup or raise end"
            )
        return start, end

    def gate(self, step: int, steps: int) -> float:
        """Return g after `step` completed optimiser steps of `steps`: 1 up to k_s, then down to exactly 0 at k_e."""
        start, end = self.span(steps)
        if step <= start:
            return 1.0
        if step >= end:
            return 0.0
        progress = (step - start) / (end - start)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.shape == "cosine" else 1 - progress
