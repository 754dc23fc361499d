"""The residual stream, sublayer by sublayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normsmith.connections import Connection


@torch.no_grad()
def stream_scale(model: nn.Module, **inputs: Any) -> list[float]:
    """RMS of the stream at its entry and after each sublayer: √(mean of h²) over tokens and channels.

    Args:
        model: a model whose sublayers are joined by `normsmith.connections`.
        inputs: arguments of one forward pass.
    """
    scales: list[Tensor] = []
    connections = [m for m in model.modules() if isinstance(m, Connection)]
    restore: list[tuple[Connection, Any]] = []

    def rms(h: Tensor) -> Tensor:
        return h.float().square().mean().sqrt()

    def watched(connection: Connection) -> Any:
        merge = connection.merge

        def wrapper(h: Tensor, out: Tensor) -> Tensor:
            if not scales:
                scales.append(rms(h))
            new = merge(h, out)
            scales.append(rms(new))
            return new

        return wrapper

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for connection in connections:
            restore.append((connection, vars(connection).get("merge")))  # a merge of the caller's own, or None
            connection.merge = watched(connection)
        model(**inputs)
    finally:
        for connection, own in restore:
            del connection.merge
            if own is not None:
                connection.merge = own
        for module, mode in modes.items():
            module.training = mode
    return [float(scale) for scale in scales]
