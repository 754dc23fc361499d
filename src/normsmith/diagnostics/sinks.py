"""Attention sinks: how much attention the first position takes without being asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.diagnostics.blocks import eager_attention, evaluating, run
from normsmith.errors import InputError


@torch.no_grad()
def attention_sinks(model: nn.Module, windows: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Per layer the share of attention on the first position: mean over heads, and the largest head's.

    A_{l,h} = mean over windows and over queries i ≥ 1 of softmax weight a_{l,h}[i, 0]; the first query has nothing
    else to look at in a causal model and is left out. (Attention sinks: arXiv 2309.17453.)

    Args:
        model: any model of transformers that returns attention weights.
        windows: token ids (batch, time), time > 1.

    Raises:
        InputError: the weights cannot be had; the message says why.
    """
    sums: list[Tensor] = []
    rows = 0
    with evaluating(model), eager_attention(model) as reason:
        if reason:
            raise InputError(reason)
        for ids in windows:
            weights: Any = getattr(run(model, ids, output_attentions=True), "attentions", None)
            if not weights or not all(isinstance(w, Tensor) and w.ndim == 4 for w in weights):
                raise InputError(f"{type(model).__name__} returns no attention weights")
            shares = [w[:, :, 1:, 0].double().mean(-1).sum(0).cpu() for w in weights]
            sums = [a + b for a, b in zip(sums, shares, strict=True)] if sums else shares
            rows += len(ids)
    return [(float((s / rows).mean()), float((s / rows).max())) for s in sums]
