"""The connections: one file each, one line here."""

from normsmith.connections import (
    deepnorm,
    hybridnorm,
    keel,
    lns,
    mixln,
    ngpt,
    peri,
    post,
    pre,
    sandwich,
    scalenorm,
    sphere,
)
from normsmith.connections.base import (
    Connection,
    ConnectionConfig,
    connection_config,
    connections,
    create_connection,
    make_norm,
)

__all__ = [
    "Connection",
    "ConnectionConfig",
    "connection_config",
    "connections",
    "create_connection",
    "deepnorm",
    "hybridnorm",
    "keel",
    "lns",
    "make_norm",
    "mixln",
    "ngpt",
    "peri",
    "post",
    "pre",
    "sandwich",
    "scalenorm",
    "sphere",
]
