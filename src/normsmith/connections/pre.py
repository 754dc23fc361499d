"""Pre-norm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, StreamConfig, connections
from normsmith.norms.base import Norm


class PreConfig(StreamConfig):
    """Options of `pre`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["pre"] = "pre"


@connections.register("pre")
class Pre(Connection):
    """h + F(norm(h)), and a final norm before the head (GPT-2, Llama)."""

    Config = PreConfig
    sites = {"norm": "pre"}  # noqa: RUF012 (declared a ClassVar in the base)
    norm: Norm | None

    def prepare(self, h: Tensor) -> Tensor:
        """Return norm(h)."""
        return self.narrow(h if self.norm is None else self.norm(h))

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return h + out."""
        return h + out

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        return h.double() + out.double()

    def prepare_reference(self, h: Tensor) -> Tensor:
        """norm(h) in float64."""
        return h.double() if self.norm is None else self.norm.reference(h)
