"""The tapered norm: a mixture of normalisation and one fixed scaling, with a gate g from 1 to 0.

    T(x; g) = g·(x/s(x)) ⊙ γ + (1 − g)·c·x ⊙ γ̃ + β

s is the token's RMS, or, after centring, its standard deviation (then x is x − mean throughout). At g = 1 the second
term is exactly 0 and the result equals the plain norm to the bit; at g = 0 it is linear in x and can be folded.
Source: TaperNorm (arXiv 2602.10408), equations of sections 3.1 and B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normsmith.ops.statistics import centre, inverse_rms, widen


class TaperState(NamedTuple):
    """What the mixture needs besides x: `gamma`, `gamma_tilde`, `beta` are (d,) or None; `gate` and `scale` 0-dim."""

    gamma: Tensor
    gamma_tilde: Tensor
    beta: Tensor | None
    gate: Tensor
    scale: Tensor
    eps: float
    centred: bool
    cast_first: bool = False


def taper(x: Tensor, state: TaperState) -> tuple[Tensor, Tensor, Tensor]:
    """Return (T(x; g), 1/s(x), x or x − mean); the result has the dtype of x, the statistics are float32 or float64.

    1/s is for statistics only: in the centred case no gradient flows through it.
    """
    wide = widen(x)
    # One vector per branch, made from 0-dim tensors: the gate moves without a new graph and without a host value.
    gate = state.gate.to(wide.dtype)
    norm_gain = gate * state.gamma.to(wide.dtype)
    scale_gain = (1 - gate) * state.scale.to(wide.dtype) * state.gamma_tilde.to(wide.dtype)
    if state.centred:
        # The kernel of F.layer_norm, so that g = 1 gives its bits; it hands out 1/σ as well.
        beta = None if state.beta is None else state.beta.to(wide.dtype)
        normal, _, inverse = torch.native_layer_norm(wide, wide.shape[-1:], norm_gain, beta, state.eps)
        wide = centre(wide)
    else:
        inverse = inverse_rms(wide, state.eps)
        normal = wide * inverse
        if state.cast_first:
            normal, norm_gain = normal.to(x.dtype), norm_gain.to(x.dtype)
        normal = (normal * norm_gain).to(wide.dtype)
    return (normal + wide * scale_gain).to(x.dtype), inverse, wide


def fixed_scaling(x: Tensor, state: TaperState) -> Tensor:
    """T(x; 0) = c·x ⊙ γ̃ + β (x centred where the norm centres) alone, to the bit what `taper` gives at g = 0."""
    wide = centre(widen(x)) if state.centred else widen(x)
    y = wide * (state.scale.to(wide.dtype) * state.gamma_tilde.to(wide.dtype))
    return (y if state.beta is None else y + state.beta.to(wide.dtype)).to(x.dtype)


def taper_moments(wide: Tensor, inverse: Tensor, gamma: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Token means of ‖x ⊙ γ‖²/s and ‖x ⊙ γ‖²; their ratio is the least-squares scale c of c·x ⊙ γ to x/s ⊙ γ.

    Args:
        wide: x (centred where the norm centres), (…, d) float32 or float64.
        inverse: 1/s, (…, 1).
        gamma: (d,) gain.
        mask: (…), 0 for padding, which does not count; one of another shape belongs to other tokens and is ignored.
    """
    power = (wide * gamma.to(wide.dtype)).square().sum(-1)
    return token_mean(power * inverse.squeeze(-1), mask), token_mean(power, mask)


def token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of `values` over the tokens that are no padding; arguments as in `taper_moments`."""
    flattened = mask is not None and values.ndim == 1 and mask.numel() == values.numel()  # as OPT does before its MLPs
    if mask is None or not (flattened or mask.shape == values.shape):
        return values.mean()
    real = (mask != 0).reshape(values.shape)
    # Not a product: what padding holds need not be finite.
    return torch.where(real, values, torch.zeros_like(values)).sum() / real.sum().clamp_min(1)


def taper_reference(x: Tensor, state: TaperState) -> Tensor:
    """The mixture in float64 as it is written."""
    x = x.double()
    if state.centred:
        x = x - x.mean(-1, keepdim=True)
    gate, scale = state.gate.double(), state.scale.double()
    normal = x / torch.sqrt((x**2).mean(-1, keepdim=True) + state.eps)
    mixed = gate * normal * state.gamma.double() + (1 - gate) * scale * x * state.gamma_tilde.double()
    return mixed if state.beta is None else mixed + state.beta.double()
