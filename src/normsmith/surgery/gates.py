"""Watch the gates of a model's AutoNorms, and freeze them by a schedule."""

from __future__ import annotations

from typing import Any

from torch import nn

from normsmith.errors import InputError
from normsmith.norms.autonorm import AutoNorm
from normsmith.norms.padding import watch_padding
from normsmith.schedules.controller import close_controllers
from normsmith.schedules.gate_freeze import GateFreezeConfig
from normsmith.schedules.gates import GateController


def gated_norms(model: nn.Module) -> dict[str, AutoNorm]:
    """The AutoNorms of a model that have a selector, by name, each once."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, AutoNorm)}
    return {name: norm for name, norm in found.items() if norm.config.gate == "selector"}


def freeze_gates_(
    model: nn.Module, config: GateFreezeConfig | dict[str, Any] | None = None, *, steps: int | None = None
) -> GateController:
    """Return the controller that monitors the gates of `model` and freezes them as AutoNorm-S does (arXiv 2607.10593).

    Nothing changes before the controller's `step()` reaches T_freeze. A frozen selector has no gradient from then on.
    Where DistributedDataParallel wraps the model, it must be made with `find_unused_parameters=True`, as transformers'
    Trainer does.

    Args:
        model: any model with `autonorm` norms; the whole one, whose `attention_mask` says what is padding.
        config: the schedule; default `GateFreezeConfig()`.
        steps: optimiser steps of the run; a Trainer fills it in.

    Raises:
        InputError: no AutoNorm, ε_H outside (0, ln K), or T_freeze beyond the run.
    """
    if isinstance(config, dict):
        config = GateFreezeConfig(**config)
    if not isinstance(config, GateFreezeConfig | None):
        raise InputError(
            f"freeze_gates_ takes a GateFreezeConfig as its second argument, got {config!r}; write steps={config!r}?"
        )
    model = getattr(model, "_orig_mod", model)
    sites = gated_norms(model)
    if not sites:
        raise InputError(
            "no autonorm with a selector in this model, so there is no gate to freeze; make it with norm='autonorm', "
            "or call swap_norms_(model, 'autonorm') first"
        )
    controller = GateController(config or GateFreezeConfig(), sites, steps)
    close_controllers(model)
    watch_padding(model)
    return controller
