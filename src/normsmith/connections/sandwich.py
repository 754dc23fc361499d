"""Sandwich norm: the sublayer between two norms."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, StreamConfig, connections
from normsmith.norms.base import Norm


class SandwichConfig(StreamConfig):
    """Options of `sandwich`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["sandwich"] = "sandwich"


@connections.register("sandwich")
class Sandwich(Connection):
    """h + norm_out(F(norm_in(h))), and a final norm before the head (CogView, arXiv 2105.13290)."""

    Config = SandwichConfig
    sites = {"norm_in": "pre", "norm_out": "sandwich"}  # noqa: RUF012 (declared a ClassVar in the base)
    norm_in: Norm | None
    norm_out: Norm | None

    def prepare(self, h: Tensor) -> Tensor:
        """Return norm_in(h)."""
        return self.narrow(h if self.norm_in is None else self.norm_in(h))

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return h + norm_out(out)."""
        return h + (out if self.norm_out is None else self.norm_out(out))

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        return h.double() + (out.double() if self.norm_out is None else self.norm_out.reference(out))

    def prepare_reference(self, h: Tensor) -> Tensor:
        """norm_in(h) in float64."""
        return h.double() if self.norm_in is None else self.norm_in.reference(h)
