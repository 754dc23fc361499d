"""Dynamic Tanh."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import widen


class DyTConfig(NormConfig):
    """Options of `dyt`: `alpha` is the initial slope α; `bias` adds the shift β (language models go without)."""

    kind: Literal["dyt"] = "dyt"
    alpha: float = Field(default=0.5, gt=0)
    bias: bool = True


@norms.register("dyt")
class DyT(Norm):
    """γ ⊙ tanh(α·x) + β with one scalar α (Zhu et al., arXiv 2503.10622); tanh in float32."""

    Config = DyTConfig
    gain_last = True
    config: DyTConfig
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.alpha = nn.Parameter(torch.tensor(self.config.alpha))
        self.gamma = nn.Parameter(torch.ones(width))
        self.register_parameter("beta", nn.Parameter(torch.zeros(width)) if self.config.bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        wide = widen(x)
        y = torch.tanh(self.alpha.to(wide.dtype) * wide) * self.gamma.to(wide.dtype)
        return (y if self.beta is None else y + self.beta.to(wide.dtype)).to(x.dtype)

    @torch.no_grad()
    def match(self, x: Tensor, y: Tensor) -> None:
        """α by a search, and a common factor of γ by least squares for each α, for the least squared error."""
        wide, gain = x.double(), self.gamma.double()
        target = y.double() if self.beta is None else y.double() - self.beta.double()
        inverse = float(wide.square().mean().clamp_min(1e-30).rsqrt())  # the slope of RMSNorm at an average token

        def fit(slope: float) -> tuple[float, float, float]:
            t = gain * torch.tanh(slope * wide)
            factor = float((t * target).sum() / t.square().sum().clamp_min(1e-30))
            return float((factor * t - target).square().sum()), slope, factor

        _, slope, factor = min(fit(inverse * 2 ** (k / 8)) for k in range(-40, 33))
        self.alpha.fill_(slope)
        self.gamma.mul_(factor)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        y = self.gamma.double() * torch.tanh(self.alpha.double() * x.double())
        return y if self.beta is None else y + self.beta.double()
