"""The gate that mixes candidate norms: pooling, selector, Gumbel-Softmax, entropy, and the mixture itself.

    y = Σ_k w_k ⊙ candidate_k(x),   w = softmax(W₂·relu(W₁·c + b₁) + b₂),   c = x of the token or its mean

In training w may be a Gumbel-Softmax sample of the logits ℓ: softmax((ℓ + g)/τ) with g = −ln(−ln u), u uniform, or its
one-hot maximum with the gradient of the soft sample (straight-through). Sources: AutoNorm (arXiv 2607.10593), Jang et
al. (arXiv 1611.01144). The functions ending in `_reference` are the same in float64, as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from normsmith.ops.statistics import widen, without_autocast

_SMALLEST = 1e-30  # uniform numbers below count as this, so that the noise is finite: torch.rand can return 0


class Selector(NamedTuple):
    """A two-layer MLP, d → h → K: maps (h, d) and (K, h), shifts (h,) and (K,)."""

    map_in: Tensor
    shift_in: Tensor
    map_out: Tensor
    shift_out: Tensor


def pool_tokens(x: Tensor, pool: str, mask: Tensor | None = None) -> Tensor:
    """What the gate sees: x itself for `token`, the mean over the valid tokens of each sample for `sequence`.

    Args:
        x: (batch, …, d); axis 0 counts the samples, so rows of (n, d) are samples of one token, and (d,) is one.
        pool: `token` or `sequence`.
        mask: (batch, …), 0 for padding; one of another shape belongs to other tokens and is ignored.

    Returns:
        (batch, …, d) for `token`; for `sequence` the same with 1 in place of the token axes, 0 for a sample that is all
        padding. The dtype is that of x for `token`, else float32 or float64.
    """
    axes = tuple(range(1, x.ndim - 1))
    if pool == "token" or not axes:
        return x
    wide = widen(x)
    if mask is None or mask.shape != x.shape[:-1]:
        return wide.mean(axes, keepdim=True)
    real = (mask != 0)[..., None]
    # Not a product with the mask: what stands at padding may be anything.
    total = torch.where(real, wide, 0).sum(axes, keepdim=True)
    return total / real.sum(axes, keepdim=True).clamp_min(1)


def gate_logits(pooled: Tensor, selector: Selector) -> Tensor:
    """W₂·relu(W₁·c + b₁) + b₂, (…, d) → (…, K), in float32 (float64 for float64) also under autocast."""
    with without_autocast(pooled):
        c = widen(pooled)
        map_in, shift_in, map_out, shift_out = (t.to(c.dtype) for t in selector)
        return F.linear(F.relu(F.linear(c, map_in, shift_in)), map_out, shift_out)


def gate_weights(logits: Tensor, tau: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """The noise-free weights softmax(ℓ/τ), (…, K), and their entropy −Σ w ln w in nats, (…)."""
    logs = F.log_softmax(logits / tau, dim=-1)
    weights = logs.exp()
    return weights, -(weights * logs).sum(-1)


def gumbel_weights(logits: Tensor, uniform: Tensor, tau: Tensor | float, hard: bool) -> Tensor:
    """A Gumbel-Softmax sample, (…, K).

    Args:
        logits: (…, K).
        uniform: (…, K) numbers from [0, 1).
        tau: temperature above 0.
        hard: the one-hot maximum, with the gradient of the soft sample.
    """
    noise = -torch.log(-torch.log(uniform.clamp_min(_SMALLEST)))
    soft = F.softmax((logits + noise) / tau, dim=-1)
    # In this order the value is exactly one-hot: soft − soft is 0.
    return one_hot_maximum(soft) + (soft - soft.detach()) if hard else soft


def one_hot_maximum(weights: Tensor) -> Tensor:
    """1 at the largest of the last axis, the first of equal ones, else 0."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    return (places == weights.argmax(-1, keepdim=True)).to(weights.dtype)


def mix(weights: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Σ_k w_k·y_k: weights (…, K) with 1 where they are shared, outputs K times (…, d) of one dtype."""
    total = weights[..., 0:1].to(outputs[0].dtype) * outputs[0]
    for k, output in enumerate(outputs[1:], start=1):
        total = total + weights[..., k : k + 1].to(output.dtype) * output
    return total


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of values (…, K) over all axes but the last, without the tokens that the mask (…) calls padding.

    Values of samples, (batch, 1, …, K), count where any token of the sample is real.
    """
    samples = (*values.shape[:1], *[1] * (values.ndim - 2))
    if mask is not None and mask.ndim == len(samples) and mask.shape != values.shape[:-1] == samples:
        mask = (mask != 0).flatten(1).any(1).reshape(-1, *samples[1:])
    if mask is None or mask.shape != values.shape[:-1]:
        return values.reshape(-1, values.shape[-1]).mean(0)
    real = (mask != 0).reshape(-1, 1)
    rows = torch.where(real, values.reshape(-1, values.shape[-1]), 0)
    return rows.sum(0) / real.sum().clamp_min(1)


def pool_reference(x: Tensor, pool: str, mask: Tensor | None = None) -> Tensor:
    """`pool_tokens` in float64, sample by sample."""
    x = x.double()
    if pool == "token" or x.ndim < 3:
        return x
    mask = mask if mask is not None and mask.shape == x.shape[:-1] else torch.ones(x.shape[:-1])
    samples: list[Tensor] = []
    for row, real in zip(x, mask != 0, strict=True):
        tokens = row[real]
        samples.append(tokens.mean(0) if len(tokens) else torch.zeros_like(row[..., 0, :]).reshape(-1, x.shape[-1])[0])
    return torch.stack(samples).reshape(x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])


def gate_reference(pooled: Tensor, selector: Selector, tau: float = 1.0) -> Tensor:
    """The noise-free weights in float64 as they are written."""
    map_in, shift_in, map_out, shift_out = (t.double() for t in selector)
    hidden = pooled.double() @ map_in.T + shift_in
    logits = (hidden * (hidden > 0)) @ map_out.T + shift_out
    exponentials = torch.exp((logits - logits.amax(-1, keepdim=True)) / tau)
    return exponentials / exponentials.sum(-1, keepdim=True)


def mix_reference(weights: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """The mixture in float64 as it is written."""
    return (weights.double()[..., None, :] @ torch.stack([y.double() for y in outputs], -2)).squeeze(-2)
