"""What each block contributes: the loss without it (the "curse of depth" curve)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.diagnostics.blocks import Blocks, evaluating, run, stream_in
from normsmith.errors import InputError


@torch.no_grad()
def token_loss(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """The loss that the model itself returns for `labels` = its input, mean over tokens, in nats.

    Args:
        model: with a head that takes `labels` (batch, time).
        windows: token ids (batch, time), all of one length.

    Raises:
        InputError: the model gives no such loss.
    """
    total, rows = torch.zeros((), dtype=torch.float64), 0
    with evaluating(model):
        for ids in windows:
            try:
                loss: Any = run(model, ids, labels=ids).loss
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                loss = error
            if not isinstance(loss, Tensor):
                raise InputError(f"{type(model).__name__} gives no loss for labels that are its input ids")
            total += loss.double().cpu() * len(ids)
            rows += len(ids)
    return float(total) / rows


def skipped(block: nn.Module) -> Any:
    """Turn a block into the identity, h ↦ h, until `.remove()` of what is returned."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        h = stream_in(args, kwargs)
        if isinstance(output, tuple | list):
            return type(output)([h, *output[1:]])
        return h

    return block.register_forward_hook(hook, with_kwargs=True)


def depth_contribution(
    model: nn.Module, windows: Sequence[Tensor], blocks: Blocks, tick: Callable[[int], None] | None = None
) -> list[float]:
    """For each block the loss with this block as the identity, minus the loss of the whole model.

    In a model that suffers from the curse of depth (arXiv 2502.05795) deep blocks hardly raise it.

    Args:
        model: see `token_loss`.
        windows: see `token_loss`.
        blocks: from `find_blocks`.
        tick: called with the number of losses computed, of 1 + the number of blocks.

    Raises:
        InputError: the model gives no loss.
    """
    whole = token_loss(model, windows)
    increases: list[float] = []
    for done, block in enumerate(blocks.modules, 1):
        if tick is not None:
            tick(done)
        handle = skipped(block)
        try:
            increases.append(token_loss(model, windows) - whole)
        finally:
            handle.remove()
    if tick is not None:
        tick(len(blocks.modules) + 1)
    return increases
