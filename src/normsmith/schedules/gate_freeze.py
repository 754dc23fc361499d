"""The gate-freeze schedule: how long gates are trained, and what decides whether they are frozen then."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from normsmith.errors import InputError
from normsmith.schedules.base import ScheduleConfig, schedules


@schedules.register("gate_freeze")
class GateFreezeConfig(ScheduleConfig):
    """When the gates of AutoNorm are frozen (AutoNorm-S, arXiv 2607.10593).

    Gates train while the entropy H of their noise-free weights is monitored; at T_freeze one decision is made.

    Args:
        start: fraction of the run after which monitoring begins (before that entropy and weights do not count).
        freeze: T_freeze as a fraction of the run.
        freeze_step: T_freeze as an optimiser step, instead of `freeze`.
        entropy: ε_H in nats, between 0 and ln K for K candidates; None for half of ln K.
        rule: freeze if H is `not_below` ε_H (the published rule), `below` it, `always`, or `never`.
        scope: one decision for the whole `model`, from the mean of H over its sites, or one for each `site`.
        mode: a frozen gate is the `deterministic` softmax of the frozen selector, or `static`: the running mean of the
            site's weights, whatever the input.
        momentum: weight of the new step in the running means of entropy and weights, which are bias-corrected.
    """

    kind: Literal["gate_freeze"] = "gate_freeze"
    start: float = pydantic.Field(default=0.0, ge=0, lt=1)
    freeze: float = pydantic.Field(default=0.1, gt=0, le=1)
    freeze_step: int | None = pydantic.Field(default=None, ge=1)
    entropy: float | None = pydantic.Field(default=None, gt=0)
    rule: Literal["not_below", "below", "always", "never"] = "not_below"
    scope: Literal["model", "site"] = "model"
    mode: Literal["deterministic", "static"] = "deterministic"
    momentum: float = pydantic.Field(default=0.1, gt=0, le=1)

    def check(self) -> None:
        """Monitoring must begin before the decision, which has one time."""
        if self.freeze_step is not None and self.freeze != type(self).model_fields["freeze"].default:
            raise ValueError(f"freeze={self.freeze:g} and freeze_step={self.freeze_step} both say when; leave one out")
        if self.freeze_step is None and self.start >= self.freeze:
            raise ValueError(f"freeze={self.freeze:g} must lie after start={self.start:g}")

    def span(self, steps: int) -> tuple[int, int]:
        """(first, T_freeze): the optimiser steps between which entropy is monitored, for a run of `steps`."""
        first = round(self.start * steps)
        freeze = self.freeze_step or max(1, round(self.freeze * steps))
        if freeze > steps:
            raise InputError(
                f"freeze_step={freeze} lies beyond the run of {steps} steps, so the gates would never be frozen; "
                "lower it, or train longer"
            )
        if freeze <= first:
            raise InputError(
                f"a run of {steps} steps is too short: the gates freeze after step {freeze}, monitoring begins after "
                f"step {first}; train longer, or lower start"
            )
        return first, freeze

    def threshold(self, candidates: int) -> float:
        """ε_H for a gate with so many candidates."""
        highest = math.log(candidates)
        if self.entropy is not None and not self.entropy < highest:
            raise InputError(
                f"entropy={self.entropy:g} is not below ln {candidates} = {highest:.3g}, which no gate with "
                f"{candidates} candidates exceeds; write a number between 0 and {highest:.3g}"
            )
        return highest / 2 if self.entropy is None else self.entropy

    def freezes(self, entropy: float, threshold: float) -> bool:
        """Whether a gate whose monitored entropy is `entropy` is frozen at T_freeze."""
        return {
            "not_below": not entropy < threshold,
            "below": entropy < threshold,
            "always": True,
            "never": False,
        }[self.rule]
