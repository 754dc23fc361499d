"""HybridNorm and HybridNorm*."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, StreamConfig, connections
from normsmith.norms.base import Norm


class HybridNormConfig(StreamConfig):
    """Options of `hybridnorm`: `star` makes the first block pre-norm; `float32` keeps the stream in float32."""

    kind: Literal["hybridnorm"] = "hybridnorm"
    star: bool = False


@connections.register("hybridnorm")
class Hybrid(Connection):
    """n = norm(h + Attn(h)), then n + FFN(n), with RMSNorm on q, k and v; a final norm (arXiv 2503.04598).

    In the words of connections: attention is joined by a post-norm, the MLP by a plain sum. The RMSNorms on q, k and v
    act on the whole projected width and have gains. With `star` the first block norms what attention reads and adds
    the MLP's output to h + Attn instead of n, which is a pre-norm block.
    """

    Config = HybridNormConfig
    sites = {"norm": "post"}  # noqa: RUF012 (declared a ClassVar in the base)
    attention_norms = dict.fromkeys(("q_norm", "k_norm", "v_norm"), "rmsnorm")
    config: HybridNormConfig
    norm: Norm | None

    @property
    def role(self) -> str:
        """`post` (attention), `pre` (first block of `star`) or `none`."""
        if self.config.star and self.block == 1:
            return "pre"
        return "post" if self.index % 2 else "none"

    def roles(self) -> dict[str, str]:
        """Decided by the sublayer: the MLP owns a norm in the first block of `star` only."""
        return {} if self.role == "none" else {"norm": self.role}

    def prepare(self, h: Tensor) -> Tensor:
        """Return h, or norm(h) in the first block of `star`."""
        return self.narrow(self.norm(h) if self.role == "pre" and self.norm is not None else h)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return norm(h + out) for attention, h + out for the MLP and in the first block of `star`."""
        h = h + out
        return self.norm(h) if self.role == "post" and self.norm is not None else h

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        total = h.double() + out.double()
        return self.norm.reference(total) if self.role == "post" and self.norm is not None else total

    def prepare_reference(self, h: Tensor) -> Tensor:
        """h or norm(h) in float64."""
        return self.norm.reference(h) if self.role == "pre" and self.norm is not None else h.double()
