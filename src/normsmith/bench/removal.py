"""What removing all removable norms would save: one-token forwards with and without them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from normsmith.bench.timing import Timing, interleave, seconds_of
from normsmith.diagnostics.blocks import evaluating
from normsmith.surgery.find import Sites
from normsmith.surgery.replace import replace_modules


def bench_removal(
    model: nn.Module, sites: Sites, rounds: int = 30, tick: Callable[[int], None] | None = None
) -> dict[str, Timing]:
    """Forward passes of one token, as in decoding, of the model and of a copy without its foldable internal norms.

    The copy computes something else; only its time is meant. Keys: `with norms`, `without`.
    """
    bare = copy.deepcopy(model).eval()
    names = [name for site in sites if not site.blocked and site.role != "final" for name in site.names]
    replace_modules(bare, dict.fromkeys(names))
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)

    def case(one: nn.Module) -> Callable[[], float]:
        @torch.no_grad()
        def run() -> None:
            one(input_ids=token)

        return lambda: seconds_of(run)

    with evaluating(model):
        return interleave({"with norms": case(model), "without": case(bare)}, rounds, warmup=3, tick=tick)
