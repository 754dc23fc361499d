"""DeepNorm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import StreamConfig, connections
from normsmith.connections.post import Post


class DeepNormConfig(StreamConfig):
    """Options of `deepnorm`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["deepnorm"] = "deepnorm"


@connections.register("deepnorm")
class Deep(Post):
    """norm(α·h + F(h)) with α = (2N)^¼, no final norm (Wang et al., arXiv 2203.00555; N blocks, decoder only).

    The initial weights of v, o, up, gate and down are divided by (8N)^¼; q and k are not.
    """

    Config = DeepNormConfig

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return norm((2N)^¼·h + out)."""
        return super().merge(self.total**0.25 * h, out)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        return super().reference(self.total**0.25 * h.double(), out)

    @classmethod
    def deviation(cls, role: str, total: int, scaled: bool) -> float:
        """(8N)^−¼ for v, o, gate, up and down, whatever the preset asks for."""
        return 1.0 if role in ("q", "k") else (4 * total) ** -0.25
