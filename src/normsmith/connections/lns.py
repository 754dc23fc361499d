"""LayerNorm Scaling."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import StreamConfig, connections
from normsmith.connections.pre import Pre


class LnsConfig(StreamConfig):
    """Options of `lns`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["lns"] = "lns"


@connections.register("lns")
class Lns(Pre):
    """h + F(norm(h)/√k) in block k = 1 … N, and a final norm that is not scaled (arXiv 2502.05795).

    The output projections start like all others, without the factor 1/√(2N): the authors advise against both.
    """

    Config = LnsConfig

    def prepare(self, h: Tensor) -> Tensor:
        """Return norm(h)/√k."""
        return super().prepare(h) * self.block**-0.5

    def prepare_reference(self, h: Tensor) -> Tensor:
        """norm(h)/√k in float64."""
        return super().prepare_reference(h) / self.block**0.5

    @classmethod
    def deviation(cls, role: str, total: int, scaled: bool) -> float:
        """1, whatever the preset asks for."""
        return 1.0
