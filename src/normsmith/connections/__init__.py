"""The connections: one file each, one line here."""

from normsmith.connections import post, pre, sphere
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
    "make_norm",
    "post",
    "pre",
    "sphere",
]
