"""RMSNorm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import rms_norm, rms_norm_reference


class RMSNormConfig(NormConfig):
    """Options of `rmsnorm`: `eps` inside the root; `affine` adds the gain γ.

    `cast_first` rounds to the input's dtype before the gain multiplies, as transformers' Llama does; the default rounds
    once, at the end. The two differ only in half precision.
    """

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(default=1e-6, gt=0)
    affine: bool = True
    cast_first: bool = False


@norms.register("rmsnorm")
class RMSNorm(Norm):
    """x / √(mean(x²) + eps) ⊙ γ (Zhang and Sennrich, arXiv 1910.07467)."""

    Config = RMSNormConfig
    gain_last = True
    config: RMSNormConfig
    gamma: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.register_parameter("gamma", nn.Parameter(torch.ones(width)) if self.config.affine else None)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        return rms_norm(x, self.gamma, self.config.eps, self.config.cast_first)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        return rms_norm_reference(x, self.gamma, self.config.eps)
