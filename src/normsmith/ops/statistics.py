"""Token statistics and the plain norms built on them: the float64 reference and the version models run.

Both work along the last axis: x is (…, d), statistics are (…, 1). The fast versions compute in float32 (float64 for
float64 input) whatever the dtype of x or of the parameters, and round once, to the dtype of x.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F


def widen(x: Tensor) -> Tensor:
    """Return x in the dtype statistics are computed in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which products of matrices keep their dtype where x is; the meta device knows no autocast."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1/√(mean(x²) + eps), (…, d) → (…, 1)."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def centre(x: Tensor) -> Tensor:
    """x − mean(x) along the last axis."""
    return x - x.mean(-1, keepdim=True)


def rms_norm(x: Tensor, gamma: Tensor | None, eps: float, cast_first: bool = False) -> Tensor:
    """x / √(mean(x²) + eps) ⊙ γ.

    Args:
        x: (…, d), any floating dtype; the result has its dtype and shape.
        gamma: (d,) gain, or None for 1.
        eps: inside the root, added to the mean square.
        cast_first: round the normalised x to its dtype before the gain multiplies it, the order of transformers' Llama.
    """
    wide = widen(x)
    normal = wide * inverse_rms(wide, eps)
    if cast_first:
        normal = normal.to(x.dtype)
    return (normal if gamma is None else normal * gamma.to(normal.dtype)).to(x.dtype)


def layer_norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / √(var + eps) ⊙ γ + β with the biased variance. Arguments as `rms_norm`; beta is (d,) or None."""
    wide = widen(x)
    gamma = None if gamma is None else gamma.to(wide.dtype)
    beta = None if beta is None else beta.to(wide.dtype)
    return F.layer_norm(wide, x.shape[-1:], gamma, beta, eps).to(x.dtype)


def rms_norm_reference(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) in float64 as it is written."""
    x = x.double()
    normal = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
    return normal if gamma is None else normal * gamma.double()


def layer_norm_reference(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """LayerNorm (arXiv 1607.06450) in float64 as it is written."""
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    normal = (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    normal = normal if gamma is None else normal * gamma.double()
    return normal if beta is None else normal + beta.double()
