"""The connections that tests run over: every name and alias of the registry, and options that change the graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from normsmith.connections import Connection, connections, create_connection
from normsmith.norms import norm_config
from tests.conftest import scramble

VARIANTS: dict[str, dict[str, Any]] = {
    "pre, float32": {"kind": "pre", "float32": True},
    "keel, float32": {"kind": "keel", "float32": True},
    "peri, plain embeddings": {"kind": "peri", "embedding_norm": False},
    "mixln, half": {"kind": "mixln", "fraction": 0.5},
    "hybridnorm*": {"kind": "hybridnorm", "star": True},
    "sphere, per channel": {"kind": "sphere", "per_channel": True},
    "sphere, learned p": {"kind": "sphere", "p": 3, "learn_p": True},
    "sphere, p 3, sigmoid, linear": {"kind": "sphere", "p": 3, "step": "sigmoid", "decay": "linear", "count": "block"},
    "sphere, p inf, all": {
        "kind": "sphere",
        "p": math.inf,
        "clamp": 0.5,
        "per_channel": True,
        "step": "raw",
        "rescale": True,
        "learn_radius": False,
        "decay": "harmonic",
        "final_norm": "none",
    },
}
SPECS: dict[str, dict[str, Any]] = {
    **{name: {"kind": name} for name in [*connections, *connections.aliases]},
    **VARIANTS,
}


def move(module: nn.Module, spread: float = 0.3) -> None:
    """Move every parameter far from its initial value: those of norms and those of connections."""
    scramble(module, spread)
    with torch.no_grad():
        for owner in (m for m in module.modules() if isinstance(m, Connection)):
            for parameter in owner.parameters(recurse=False):
                parameter.add_(torch.randn_like(parameter) * spread)


def made(spec: dict[str, Any], width: int, index: int = 3, total: int = 8) -> Connection:
    """A connection with parameters far from their initial values."""
    connection = create_connection(spec, width, index, total, norm="rmsnorm")
    move(connection)
    return connection


def stream(connection: Connection, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A stream this connection can stand in: of its dtype, and on the sphere where its family has one."""
    x = torch.randn(*shape, connection.width, dtype=dtype)
    if connection.wide(connection.config) and dtype != torch.float64:
        x = x.float()
    entry = type(connection).entry(connection.width, connection.config, norm_config("rmsnorm"))
    return x if entry is None else entry(x).detach()
