"""When did a run diverge?"""

from __future__ import annotations

import math
from collections.abc import Iterable

from normsmith.errors import InputError


def diverged_at(losses: Iterable[float], factor: float = 2.0, patience: int = 200) -> int | None:
    """The step, counted from 0, at which a loss curve left: its first value that is not finite, or the first of
    `patience` consecutive steps with loss_t > factor · min(loss_0 … loss_{t−1}).

    Args:
        losses: one per step, not negative, as a cross-entropy.
        factor: how far above its best.
        patience: for how many steps.

    Returns:
        The step, or None for a run that did not diverge; a shorter excursion is a spike.

    Raises:
        InputError: factor ≤ 1, patience < 1, or a negative loss, for which a multiple of the minimum means nothing.
    """
    if not factor > 1 or patience < 1:
        raise InputError(
            f"factor={factor:g} and patience={patience}: the factor must be above 1, the patience 1 or more"
        )
    best, above = math.inf, 0
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return step
        if loss < 0:
            raise InputError(
                f"step {step}: the loss is {loss:g}; divergence is defined for losses that are not negative"
            )
        above = above + 1 if loss > factor * best else 0
        if above >= patience:
            return step - patience + 1
        best = min(best, loss)
    return None
