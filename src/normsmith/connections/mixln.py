"""Mix-LN."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from normsmith.connections.base import Connection, StreamConfig, connections
from normsmith.norms.base import Norm


class MixLNConfig(StreamConfig):
    """Options of `mixln`: `fraction` a of the blocks is post-norm; `float32` keeps the stream in float32."""

    kind: Literal["mixln"] = "mixln"
    fraction: float = Field(default=0.25, ge=0, le=1)


@connections.register("mixln")
class MixLN(Connection):
    """Post-norm in the blocks 1 … ⌊a·N⌋, pre-norm in the others, and a final norm (arXiv 2412.13795)."""

    Config = MixLNConfig
    sites = {"norm": "pre"}  # noqa: RUF012 (declared a ClassVar in the base)
    config: MixLNConfig
    norm: Norm | None

    @property
    def post(self) -> bool:
        """Whether this sublayer is one of the post-norm blocks."""
        # The tiny part undoes the rounding of a product like 0.29·100, which is below 29 in binary.
        return self.block <= math.floor(self.config.fraction * (self.total / 2) + 1e-9)

    def roles(self) -> dict[str, str]:
        """Decided by the block."""
        return {"norm": "post" if self.post else "pre"}

    def prepare(self, h: Tensor) -> Tensor:
        """Return h in a post-norm block, norm(h) in the others."""
        return self.narrow(h if self.post or self.norm is None else self.norm(h))

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return norm(h + out) in a post-norm block, h + out in the others."""
        h = h + out
        return self.norm(h) if self.post and self.norm is not None else h

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        total = h.double() + out.double()
        return self.norm.reference(total) if self.post and self.norm is not None else total

    def prepare_reference(self, h: Tensor) -> Tensor:
        """h or norm(h) in float64."""
        return h.double() if self.post or self.norm is None else self.norm.reference(h)
