"""Which parameters weight decay applies to, decided by the role of the module that owns them."""

from __future__ import annotations

from torch import nn

from normsmith.connections import Connection
from normsmith.norms import Norm


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters to decay: matrices of linear, convolution and embedding layers.

    Never decayed: biases, gains and every other vector or scalar, and whatever a norm or a connection owns, of any
    shape (the selector of an adaptive norm has matrices too, and decaying them would push the gate to one half).
    """
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Norm | Connection | nn.LayerNorm | nn.RMSNorm)
        for parameter in module.parameters()
    }
    # A connection holds no sublayer, so everything below it is its own.
    return [name for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in kept]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups for any PyTorch optimiser: with and without weight decay.

    >>> torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-4)
    """
    decayed = set(decayed_names(model))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name in decayed].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
