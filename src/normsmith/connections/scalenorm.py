"""Pre-norm with ScaleNorm."""

from __future__ import annotations

from typing import Literal

from normsmith.connections.base import ConnectionConfig, StreamConfig, connections
from normsmith.connections.pre import Pre
from normsmith.norms.base import NormConfig, norm_config


class ScaledConfig(StreamConfig):
    """Options of `scalenorm`: `float32` keeps the stream in float32, also in a half-precision model."""

    kind: Literal["scalenorm"] = "scalenorm"


@connections.register("scalenorm")
class Scaled(Pre):
    """h + F(norm(h)) where this norm and the final one are ScaleNorm (Nguyen and Salazar, arXiv 1910.05895).

    The model's `norm` gives the options of a `scalenorm`; any other kind but `identity` is replaced by one.
    """

    Config = ScaledConfig

    @classmethod
    def inner_norm(cls, norm: NormConfig) -> NormConfig:
        """ScaleNorm."""
        return norm if norm.kind in ("scalenorm", "identity") else norm_config("scalenorm")

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """ScaleNorm, with a scalar of its own."""
        return cls.inner_norm(norm)
