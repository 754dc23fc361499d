"""Dynamic Tanh."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import Norm, NormConfig, norms
from normsmith.ops.statistics import widen

# Initial α of language models by width: (before attention, elsewhere). arXiv 2503.10622, the table for Llama.
LANGUAGE_ALPHA: dict[int, tuple[float, float]] = {
    1024: (1.0, 1.0),
    2048: (1.0, 0.5),
    4096: (0.8, 0.2),
    8192: (0.2, 0.05),
}


def language_alpha(width: int, place: str = "other") -> float:
    """The initial α of `LANGUAGE_ALPHA` for any width, linear in log(width) between its rows, constant beyond them.

    Args:
        width: d.
        place: `attention` for the norms before attention, `other` for all others, the final one included.
    """
    column = ("attention", "other").index(place)
    rows = sorted(LANGUAGE_ALPHA)
    for low, high in pairwise(rows):
        if low <= width <= high:
            part = math.log(width / low) / math.log(high / low)
            return (1 - part) * LANGUAGE_ALPHA[low][column] + part * LANGUAGE_ALPHA[high][column]
    return LANGUAGE_ALPHA[rows[0] if width < rows[0] else rows[-1]][column]


class DyTConfig(NormConfig):
    """Options of `dyt`: `alpha` is the initial slope α, a number or `width` for the value that language models of this
    width start from (`language_alpha`, at the `place` `attention` or `other`); `bias` adds the shift β (language models
    go without).
    """

    kind: Literal["dyt"] = "dyt"
    alpha: float | Literal["width"] = Field(default=0.5)
    place: Literal["attention", "other"] = "other"
    bias: bool = True

    def check(self) -> None:
        """A slope is above 0."""
        if self.alpha != "width" and not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha = {self.alpha}: input should be a finite number greater than 0")


@norms.register("dyt")
class DyT(Norm):
    """γ ⊙ tanh(α·x) + β with one scalar α (Zhu et al., arXiv 2503.10622); tanh in float32."""

    Config = DyTConfig
    gain_last = True
    config: DyTConfig
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        alpha = self.config.alpha
        self.alpha = nn.Parameter(torch.tensor(language_alpha(width, self.config.place) if alpha == "width" else alpha))
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
        slope, factor = fit_slope(torch.tanh, x, y, self.gamma, self.beta)
        self.alpha.fill_(slope)
        self.gamma.mul_(factor)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        y = self.gamma.double() * torch.tanh(self.alpha.double() * x.double())
        return y if self.beta is None else y + self.beta.double()


def fit_slope(
    squash: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, gamma: Tensor, beta: Tensor | None
) -> tuple[float, float]:
    """α and factor for which factor·γ ⊙ squash(α·x) + β comes closest to y; x and y are (…, d).

    α is searched on a grid of eighths of octaves around the slope of RMSNorm at an average token.
    """
    wide, gain = x.double(), gamma.double()
    target = y.double() if beta is None else y.double() - beta.double()
    inverse = float(wide.square().mean().clamp_min(1e-30).rsqrt())

    def fit(slope: float) -> tuple[float, float, float]:
        t = gain * squash(slope * wide)
        factor = float((t * target).sum() / t.square().sum().clamp_min(1e-30))
        return float((factor * t - target).square().sum()), slope, factor

    _, slope, factor = min(fit(inverse * 2 ** (k / 8)) for k in range(-40, 33))
    return slope, factor
