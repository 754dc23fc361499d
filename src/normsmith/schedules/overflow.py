"""Which norm's input stopped being finite first, and when: told without waiting for the device at each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed


class Overflow:
    """Remembers for each site the first optimiser step at which its statistics were not finite.

    Args:
        names: the sites in the order of the model.
        device: where the statistics are.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.steps = torch.full((len(self.names),), -1, device=device)

    def see(self, step: int, statistics: Iterable[Tensor]) -> None:
        """Look at one number of each site, collected in the forward passes of `step`."""
        found = list(statistics)
        device = found[0].device  # the model may have moved
        bad = torch.stack([s.to(device) for s in found]).isfinite().logical_not()
        self.steps = self.steps.to(device)
        self.steps = torch.where(bad & (self.steps < 0), step, self.steps)

    def share(self) -> None:
        """Let every rank know the first step of all; all of them call it."""
        if distributed.is_available() and distributed.is_initialized():
            never = torch.iinfo(self.steps.dtype).max
            steps = torch.where(self.steps < 0, never, self.steps)
            distributed.all_reduce(steps, distributed.ReduceOp.MIN)
            self.steps = torch.where(steps == never, -1, steps)

    def __str__(self) -> str:
        """The site and the step in a clause, or nothing if all was finite."""
        broken = [(step, place) for place, step in enumerate(self.steps.tolist()) if step >= 0]
        if not broken:
            return ""
        step, place = min(broken)
        return f"the input of {self.names[place]} was the first that is not finite, at step {step}"


def remedy(dtype: torch.dtype) -> str:
    """What to do about a forward pass in `dtype` that is not finite."""
    if dtype == torch.float16:
        return (
            "float16 ends at 65504, and a stream whose norms are removed grows: train in bfloat16 or float32, anchor "
            "it (scale_loss), or remove the norms more slowly"
        )
    return "lower the learning rate, lengthen its warm-up, or remove the norms more slowly"
