"""LayerNorm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import layer_norm, layer_norm_reference


class LayerNormConfig(NormConfig):
    """Options of `layernorm`: `eps` inside the root; `affine` adds the gain γ, `bias` the shift β."""

    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(default=1e-5, gt=0)
    affine: bool = True
    bias: bool = True


@norms.register("layernorm")
class LayerNorm(Norm):
    """(x − mean) / √(var + eps) ⊙ γ + β, biased variance (Ba et al., arXiv 1607.06450)."""

    Config = LayerNormConfig
    gain_last = True
    centred = True
    config: LayerNormConfig
    gamma: nn.Parameter | None
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.register_parameter("gamma", nn.Parameter(torch.ones(width)) if self.config.affine else None)
        self.register_parameter(
            "beta", nn.Parameter(torch.zeros(width)) if self.config.affine and self.config.bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        return layer_norm(x, self.gamma, self.beta, self.config.eps)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        return layer_norm_reference(x, self.gamma, self.beta, self.config.eps)
