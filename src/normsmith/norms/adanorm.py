"""AdaNorm."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import centre, widen


class AdaNormConfig(NormConfig):
    """Options of `adanorm`: `k` and `scale` (C); `deviation` is `biased` with `eps` inside the root, or `unbiased` with
    `eps` added to the deviation, as the authors' code has it.
    """

    kind: Literal["adanorm"] = "adanorm"
    k: float = Field(default=0.1, ge=0)
    scale: float = Field(default=1.0, gt=0)
    eps: float = Field(default=1e-5, gt=0)
    deviation: Literal["biased", "unbiased"] = "biased"


@norms.register("adanorm")
class AdaNorm(Norm):
    """C·(1 − k·y) ⊙ y with y = (x − mean)/σ (Xu et al., arXiv 1911.07013); nothing to train.

    The factor C·(1 − k·y) is a constant for back-propagation, so the gradient is not that of the function of x.
    """

    Config = AdaNormConfig
    config: AdaNormConfig

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        wide = widen(x)
        if self.config.deviation == "biased":
            y = F.layer_norm(wide, x.shape[-1:], eps=self.config.eps)
        else:
            y = centre(wide) / (wide.std(-1, keepdim=True) + self.config.eps)
        return ((self.config.scale * (1 - self.config.k * y)).detach() * y).to(x.dtype)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        x = x.double()
        centred = x - x.mean(-1, keepdim=True)
        if self.config.deviation == "biased":
            y = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.config.eps)
        else:
            sigma = torch.sqrt((centred**2).sum(-1, keepdim=True) / (x.shape[-1] - 1))
            y = centred / (sigma + self.config.eps)
        factor = self.config.scale * (1 - self.config.k * y)
        return factor.detach() * y
