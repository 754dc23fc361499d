"""Keel: post-norm with a strong skip and an inner pre-norm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, ConnectionConfig, StreamConfig, connections
from normsmith.norms.base import Norm, NormConfig, norm_config


class KeelConfig(StreamConfig):
    """Options of `keel`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["keel"] = "keel"


@connections.register("keel")
class Keel(Connection):
    """norm_out(α·h + F(norm_in(h))) with the constant α = 2N, no final norm (Keel, arXiv 2601.19895).

    α is the number of sublayers. Secondary notes that give other values of it contradict each other; with 2N the
    skip path of a deep stream keeps almost all of a gradient, (α/√(α² + 1))^2N ≈ 1.
    """

    Config = KeelConfig
    sites = {"norm_in": "pre", "norm_out": "post"}  # noqa: RUF012 (declared a ClassVar in the base)
    norm_in: Norm | None
    norm_out: Norm | None

    def prepare(self, h: Tensor) -> Tensor:
        """Return norm_in(h)."""
        return self.narrow(h if self.norm_in is None else self.norm_in(h))

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return norm_out(2N·h + out)."""
        h = self.total * h + out
        return h if self.norm_out is None else self.norm_out(h)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        total = self.total * h.double() + out.double()
        return total if self.norm_out is None else self.norm_out.reference(total)

    def prepare_reference(self, h: Tensor) -> Tensor:
        """norm_in(h) in float64."""
        return h.double() if self.norm_in is None else self.norm_in.reference(h)

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """None: the last connection has just normalised."""
        return norm_config("identity")
