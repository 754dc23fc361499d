"""Pre-norm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normsmith.connections.base import Connection, ConnectionConfig, connections
from normsmith.norms.base import Norm


class PreConfig(ConnectionConfig):
    """`pre` has no options."""

    kind: Literal["pre"] = "pre"


@connections.register("pre")
class Pre(Connection):
    """h + F(norm(h)), and a final norm before the head (GPT-2, Llama)."""

    Config = PreConfig
    sites = {"norm": "pre"}  # noqa: RUF012 (declared a ClassVar in the base)
    norm: Norm | None

    def prepare(self, h: Tensor) -> Tensor:
        """Return norm(h)."""
        return h if self.norm is None else self.norm(h)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """Return h + out."""
        return h + out

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        return h.double() + out.double()
