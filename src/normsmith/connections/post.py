"""Post-norm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, ConnectionConfig, StreamConfig, connections
from normsmith.norms.base import Norm, NormConfig, norm_config


class PostConfig(StreamConfig):
    """Options of `post`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["post"] = "post"


@connections.register("post")
class Post(Connection):
    """norm(h + F(h)), no final norm (Vaswani et al., arXiv 1706.03762)."""

    Config = PostConfig
    sites = {"norm": "post"}  # noqa: RUF012 (declared a ClassVar in the base)
    norm: Norm | None

    def prepare(self, h: Tensor) -> Tensor:
        """Return h itself."""
        return self.narrow(h)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return norm(h + out)."""
        h = h + out
        return h if self.norm is None else self.norm(h)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        total = h.double() + out.double()
        return total if self.norm is None else self.norm.reference(total)

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """None: the last connection has just normalised."""
        return norm_config("identity")
