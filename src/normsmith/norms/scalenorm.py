"""ScaleNorm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import widen


class ScaleNormConfig(NormConfig):
    """Options of `scalenorm`: `eps` is the smallest length divided by."""

    kind: Literal["scalenorm"] = "scalenorm"
    eps: float = Field(default=1e-5, gt=0)


@norms.register("scalenorm")
class ScaleNorm(Norm):
    """γ·x / max(‖x‖, eps) with one scalar γ, √d at the start (Nguyen and Salazar, arXiv 1910.05895)."""

    Config = ScaleNormConfig
    gain_last = True
    config: ScaleNormConfig

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.gamma = nn.Parameter(torch.tensor(float(width) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        wide = widen(x)
        # The maximum is taken of squares: the root of an all-zero token has no finite gradient.
        inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True).clamp_min(self.config.eps**2))
        return (wide * (self.gamma.to(wide.dtype) * inverse)).to(x.dtype)

    @torch.no_grad()
    def match(self, x: Tensor, y: Tensor) -> None:
        """γ by least squares."""
        unit = x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(self.config.eps)
        self.gamma.fill_(float((unit * y.double()).sum() / unit.square().sum().clamp_min(1e-30)))

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        x = x.double()
        return self.gamma.double() * x / x.norm(dim=-1, keepdim=True).clamp_min(self.config.eps)
