"""Shared fixtures: small scrambled models, a fixed seed, no hub."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def scramble(module: nn.Module, spread: float = 0.3) -> nn.Module:
    """Move every norm parameter far from the identity, where mistakes in folding and swapping show."""
    from normsmith.norms import Norm

    with torch.no_grad():
        for norm in (m for m in module.modules() if isinstance(m, Norm)):
            for parameter in norm.parameters(recurse=False):
                parameter.add_(torch.randn_like(parameter) * spread)
    return module
