"""Peri-LN: sandwich norm with normalised embeddings."""

from __future__ import annotations

from typing import Literal, cast

from torch import nn

from normsmith.connections.base import ConnectionConfig, StreamConfig, connections, make_norm
from normsmith.connections.sandwich import Sandwich
from normsmith.norms.base import NormConfig


class PeriConfig(StreamConfig):
    """Options of `peri`: `embedding_norm` normalises the embeddings; `float32` keeps the stream in float32.

    Without the embedding norm it is the same model as `sandwich`.
    """

    kind: Literal["peri"] = "peri"
    embedding_norm: bool = True


@connections.register("peri")
class Peri(Sandwich):
    """h + norm_out(F(norm_in(h))) on normalised embeddings, and a final norm (Peri-LN, arXiv 2502.02732)."""

    Config = PeriConfig

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig, norm: NormConfig) -> nn.Module | None:
        """The norm of the embeddings, where the options ask for one."""
        return make_norm(norm, width) if cast("PeriConfig", config).embedding_norm else None
