"""The contract of a connection: how a sublayer reads the residual stream and how its output joins it."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.norms.base import Norm, NormConfig, create_norm, norm_config
from normsmith.registry import Registry


class ConnectionConfig(Config):
    """Base of connection configurations; `kind` is the registry name."""

    kind: str


class StreamConfig(ConnectionConfig):
    """Base for families whose stream has the dtype of the model; `float32` keeps it in float32 whatever that is."""

    float32: bool = False


class Connection(nn.Module):
    """Connects one sublayer F to the stream: `h = c.merge(h, F(c.prepare(h)))`, h is (…, d).

    Args:
        width: d.
        index: position l of the sublayer in the stream, from 1 (attention of the first block) to `total`.
        total: number of sublayers, 2 per block.
        norm: the norm of this connection; an `identity` norm is not created at all.
        config: the connection's options, also accepted as keywords.

    What a family changes elsewhere in a model it answers as a class: `entry` and `final_norm` (ends of the stream),
    `deviation` (initial weights), `attention_norms`, `attention_scale`, `hidden_scale`, `logit_scale` (inside the
    sublayers and behind the head) and `unit_weights`. A model that ignores one of these builds another method.
    Name no subclass "…Norm": without a norm of its own it would be taken for one.
    """

    kind: ClassVar[str]  # the registry name, set by registration
    Config: ClassVar[type[ConnectionConfig]] = ConnectionConfig
    # attribute → role of the norm sites that connections of this family can own, in the words of `find_norms`
    sites: ClassVar[dict[str, str]] = {}
    # site in the attention (q_norm, k_norm, v_norm: on the whole projected width) → the norm that stands there
    attention_norms: ClassVar[dict[str, str]] = {}
    # weights have unit length along the stream's axis: no weight decay, no tied head, normalised after every step
    unit_weights: ClassVar[bool] = False

    _like: Tensor | None

    def __init__(
        self,
        width: int,
        index: int = 1,
        total: int = 1,
        norm: str | dict[str, Any] | NormConfig = "rmsnorm",
        config: ConnectionConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if width < 1:
            raise InputError(f"{type(self).__name__}: width must be at least 1, got {width}")
        if not 1 <= index <= total:
            raise InputError(f"{type(self).__name__}: index must be between 1 and total={total}, got {index}")
        self.width, self.index, self.total = width, index, total
        self.config = type(self).Config(**{"kind": self.kind, **options}) if config is None else config
        own, spec = self.roles(), norm_config(norm)
        for site in type(self).sites:
            self.register_module(site, make_norm(self.site_norm(site, spec), width) if site in own else None)
        # Empty: it only follows the parameters' dtype, in which the sublayer reads a stream that is wider.
        self.register_buffer("_like", torch.empty(0) if self.wide(self.config) else None, persistent=False)

    @property
    def block(self) -> int:
        """Number k of the block, from 1; it holds the sublayers 2k − 1 (attention) and 2k (MLP)."""
        return (self.index + 1) // 2

    def roles(self) -> dict[str, str]:
        """The norm sites of this very connection, attribute → role: all of the family's unless its place decides."""
        return dict(type(self).sites)

    def site_norm(self, site: str, norm: NormConfig) -> NormConfig:
        """The norm at one of `roles()`, in a model that asks for `norm`."""
        before_attention = self.roles()[site] == "pre" and self.index % 2 == 1
        return _placed(self.inner_norm(norm), "attention" if before_attention else "other")

    def narrow(self, x: Tensor) -> Tensor:
        """The sublayer's input in the dtype of the model's parameters, where the stream is kept wider."""
        return x if self._like is None else x.to(self._like.dtype)

    def prepare(self, h: Tensor) -> Tensor:
        """What the sublayer reads, in the dtype of the model's parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(h)")

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """The stream after the sublayer output `out` joined it."""
        raise NotImplementedError(f"{type(self).__name__} must define merge(h, out)")

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """`merge` in float64, written literally."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(h, out)")

    def prepare_reference(self, h: Tensor) -> Tensor:
        """`prepare` in float64, written literally; by default the stream itself."""
        return h.double()

    def bind(self, entry: nn.Module | None) -> None:
        """Receive the stream's entry, for families whose connections depend on what it learns."""

    def fresh(self) -> Connection:
        """A new connection like this one, with initial values and without norms."""
        return type(self)(self.width, self.index, self.total, "identity", self.config)

    @classmethod
    def wide(cls, config: ConnectionConfig) -> bool:
        """Whether the model must widen the stream to float32 before the first sublayer."""
        return isinstance(config, StreamConfig) and config.float32

    @classmethod
    def inner_norm(cls, norm: NormConfig) -> NormConfig:
        """The norm at the connections' sites, for a model that asks for `norm`."""
        return norm

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig, norm: NormConfig) -> nn.Module | None:
        """The family's first step, embeddings → stream, as a module; None where it is the identity."""
        return None

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """The configuration of the family's last step, stream → head, for a model whose connections use `norm`."""
        return norm

    @classmethod
    def deviation(cls, role: str, total: int, scaled: bool) -> float:
        """Factor of the initial deviation of a projection: `role` is q, k, v, o, gate, up or down.

        By default 1/√total for the output projections o and down of a model that asks for `scaled` ones (GPT-2), and 1.
        """
        return total**-0.5 if scaled and role in ("o", "down") else 1.0

    @classmethod
    def attention_scale(cls, heads: int, head_width: int) -> nn.Module | None:
        """A module (q, k) → (q, k) behind the rotation, for `heads` key heads; it has the `softmax_scale` to use."""
        return None

    @classmethod
    def hidden_scale(cls, hidden: int, width: int, activated: bool) -> nn.Module | None:
        """A module behind an input projection of the MLP; `activated` says that the nonlinearity reads it."""
        return None

    @classmethod
    def logit_scale(cls, outputs: int, width: int) -> nn.Module | None:
        """A module behind the output head, (…, outputs) → (…, outputs)."""
        return None

    def extra_repr(self) -> str:
        """Position and options, for `print(model)`."""
        options = {key: value for key, value in self.config.to_dict().items() if key != "kind"}
        return ", ".join([f"{self.index}/{self.total}", *(f"{key}={value}" for key, value in options.items())])


def _placed(spec: NormConfig, place: str) -> NormConfig:
    """DyT and Derf with `alpha: width` start steeper before attention than elsewhere, candidates of a mixture too."""
    changes: dict[str, Any] = {"place": place} if getattr(spec, "alpha", None) == "width" else {}
    if candidates := getattr(spec, "candidates", ()):
        changes["candidates"] = tuple(_placed(candidate, place) for candidate in candidates)
    return type(spec)(**{**spec.to_dict(), **changes}) if changes else spec


def make_norm(spec: str | dict[str, Any] | NormConfig, width: int) -> Norm | None:
    """The norm described by `spec`, or None for `identity`: a norm that is not there costs not even a call."""
    config = norm_config(spec)
    return None if config.kind == "identity" else create_norm(config, width)


connections: Registry[type[Connection]] = Registry("connection")


def connection_config(spec: str | dict[str, Any] | Config, **options: Any) -> ConnectionConfig:
    """The validated configuration for a name, an alias, a mapping with `kind`, or a configuration."""
    return cast("ConnectionConfig", connections.config(spec, **options))


def create_connection(
    spec: str | dict[str, Any] | Config,
    width: int,
    index: int = 1,
    total: int = 1,
    norm: str | dict[str, Any] | NormConfig = "rmsnorm",
    **options: Any,
) -> Connection:
    """Make the connection of sublayer `index` of `total`.

    >>> c = create_connection("sphere", 64, index=1, total=12, p=2)
    >>> h = c.merge(h, sublayer(c.prepare(h)))
    """
    config = connection_config(spec, **options)
    return connections.get(config.kind)(width, index, total, norm, config)
