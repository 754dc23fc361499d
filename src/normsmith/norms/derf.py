"""Derf: the error function in place of a norm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.norms.dyt import fit_slope
from normsmith.ops.statistics import widen


class DerfConfig(NormConfig):
    """Options of `derf`: `alpha` and `shift` are the initial α and s; `bias` adds β. The authors' language models start
    from alpha 1.0.
    """

    kind: Literal["derf"] = "derf"
    alpha: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    shift: float = Field(default=0.0, allow_inf_nan=False)
    bias: bool = True


@norms.register("derf")
class Derf(Norm):
    """γ ⊙ erf(α·x + s) + β with scalars α and s (arXiv 2512.10938); erf in float32."""

    Config = DerfConfig
    gain_last = True
    config: DerfConfig
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.alpha = nn.Parameter(torch.tensor(self.config.alpha))
        self.shift = nn.Parameter(torch.tensor(self.config.shift))
        self.gamma = nn.Parameter(torch.ones(width))
        self.register_parameter("beta", nn.Parameter(torch.zeros(width)) if self.config.bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        wide = widen(x)
        y = torch.erf(self.alpha.to(wide.dtype) * wide + self.shift.to(wide.dtype)) * self.gamma.to(wide.dtype)
        return (y if self.beta is None else y + self.beta.to(wide.dtype)).to(x.dtype)

    @torch.no_grad()
    def match(self, x: Tensor, y: Tensor) -> None:
        """α and a common factor of γ for the least squared error; s stays."""
        shift = self.shift.double()
        slope, factor = fit_slope(lambda z: torch.erf(z + shift), x, y, self.gamma, self.beta)
        self.alpha.fill_(slope)
        self.gamma.mul_(factor)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        y = self.gamma.double() * torch.erf(self.alpha.double() * x.double() + self.shift.double())
        return y if self.beta is None else y + self.beta.double()
