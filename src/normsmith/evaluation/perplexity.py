"""Loss of a language model on packed windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@torch.no_grad()
def language_loss(model: nn.Module, windows: Dataset[Any], batch_size: int = 16) -> float:
    """Mean cross-entropy in nats per predicted token over all windows, in evaluation mode and float32.

    Every window has the same length, so the mean over windows is the mean over tokens.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    try:
        for batch in DataLoader(windows, batch_size=batch_size):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            rows = batch["input_ids"].shape[0]
            total += model(**batch).loss.double() * rows
            count += rows
    finally:
        for module, mode in modes.items():
            module.training = mode
    return float(total) / count
