"""The contract of a connection: how a sublayer reads the residual stream and how its output joins it."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.norms.base import Norm, NormConfig, create_norm, norm_config
from normsmith.registry import Registry


class ConnectionConfig(Config):
    """Base of connection configurations; `kind` is the registry name."""

    kind: str


class Connection(nn.Module):
    """Connects one sublayer F to the stream: `h = c.merge(h, F(c.prepare(h)))`, h is (…, d).

    Args:
        width: d.
        index: position l of the sublayer in the stream, from 1 (attention of the first block) to `total`.
        total: number of sublayers, 2 per block.
        norm: the norm of this connection; an `identity` norm is not created at all.
        config: the connection's options, also accepted as keywords.
    """

    kind: ClassVar[str]  # the registry name, set by registration
    Config: ClassVar[type[ConnectionConfig]] = ConnectionConfig
    # attribute → role of the norm sites a connection owns, in the words of `find_norms`
    sites: ClassVar[dict[str, str]] = {}

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
        if not 1 <= index <= total:
            raise InputError(f"{type(self).__name__}: index must be between 1 and total={total}, got {index}")
        self.width, self.index, self.total = width, index, total
        self.config = type(self).Config(**{"kind": self.kind, **options}) if config is None else config
        for site in type(self).sites:
            self.register_module(site, make_norm(norm, width))

    def prepare(self, h: Tensor) -> Tensor:
        """What the sublayer reads, in the dtype of the model's parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(h)")

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """The stream after the sublayer output `out` joined it."""
        raise NotImplementedError(f"{type(self).__name__} must define merge(h, out)")

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """`merge` in float64, written literally."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(h, out)")

    def bind(self, entry: nn.Module | None) -> None:
        """Receive the stream's entry, for families whose connections depend on what it learns."""

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig) -> nn.Module | None:
        """The family's first step, embeddings → stream, as a module; None where it is the identity."""
        return None

    @classmethod
    def final_norm(cls, norm: NormConfig) -> NormConfig:
        """The configuration of the family's last step, stream → head, for a model whose connections use `norm`."""
        return norm

    def extra_repr(self) -> str:
        """Position and options, for `print(model)`."""
        options = {key: value for key, value in self.config.to_dict().items() if key != "kind"}
        return ", ".join([f"{self.index}/{self.total}", *(f"{key}={value}" for key, value in options.items())])


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
