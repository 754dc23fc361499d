"""Which parameters weight decay applies to, and optimisers that were made before the model was changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.connections import Connection
from normsmith.errors import InputError
from normsmith.models.branch import Fresh
from normsmith.norms import Norm


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters to decay: matrices of linear, convolution and embedding layers.

    Never decayed: biases, gains and every other vector or scalar, and whatever a norm or a connection owns, of any
    shape (the selector of an adaptive norm has matrices too, and decaying them would push the gate to one half).
    Nothing is decayed in a model whose weights have unit length (`ngpt`).
    """
    if has_unit_weights(model):
        return []
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Norm | Connection | nn.LayerNorm | nn.RMSNorm)
        for parameter in module.parameters()
    }
    # A connection holds no sublayer, so everything below it is its own.
    kept |= {id(getattr(m, name)) for m in model.modules() if isinstance(m, Fresh) for name in m.biases_by_row}
    return [name for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in kept]


def has_unit_weights(model: nn.Module) -> bool:
    """Whether the model's weights are to have unit length after every step, as its connections say."""
    return any(isinstance(module, Connection) and module.unit_weights for module in model.modules())


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


@dataclass(frozen=True)
class RebindReport:
    """What `rebind_optimizer_` did: how many parameters it dropped, which it added with and without weight decay."""

    dropped: int
    decayed: tuple[str, ...]
    undecayed: tuple[str, ...]

    def __str__(self) -> str:
        if not (self.dropped or self.decayed or self.undecayed):
            return "nothing to rebind: the optimizer trains the model's parameters"
        lines = [f"dropped {self.dropped} parameter(s) that the model no longer has, with their state"]
        for names, how in ((self.decayed, "with"), (self.undecayed, "without")):
            if names:
                lines.append(f"added {how} weight decay: {', '.join(names)}")
        return "\n".join(lines)


def rebind_optimizer_(optimizer: torch.optim.Optimizer, model: nn.Module) -> RebindReport:
    """Let an optimiser that was made before the model was changed train the parameters the model has now. In place.

    Parameters that are no longer in the model are dropped with their state; trainable ones that the optimiser lacks
    are added, by the role that `decayed_names` gives them: to the first group with weight decay, or to the first one
    without, which is made with the options of the first group if there is none. Everything else keeps its state.

    Raises:
        InputError: the optimiser holds no parameter of this model, or a group would have to be made under a
            learning-rate scheduler, which knows only the groups it was made with.
    """
    inner = _innermost(optimizer)
    ours = {id(p) for p in model.parameters()}
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    if not ours & held:
        raise InputError(
            "the optimizer holds no parameter of this model, so it was made for another one: make a new optimizer from "
            "model.parameters()"
        )
    decayed = set(decayed_names(model))
    missing = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in held}
    with_decay = tuple(name for name in missing if name in decayed)
    without = tuple(name for name in missing if name not in decayed)
    plain = next((g for g in inner.param_groups if not g.get("weight_decay")), None)
    make_group = bool(without) and plain is None
    if make_group and hasattr(inner.step, "_wrapped_by_lr_sched"):
        raise InputError(
            "the optimizer has no group without weight decay for the new norm parameters, and its learning-rate "
            "scheduler knows only the groups it was made with: call rebind_optimizer_ before the scheduler is made"
        )
    dropped = _drop(inner, ours)
    heavy = next((g for g in inner.param_groups if g.get("weight_decay")), inner.param_groups[0])
    _extend(heavy, {name: missing[name] for name in with_decay})
    added = {name: missing[name] for name in without}
    if make_group:
        options = {key: value for key, value in inner.param_groups[0].items() if key not in ("params", "param_names")}
        # An optimiser made from named_parameters() takes no group without names, and any other none with.
        named = "param_names" in inner.param_groups[0]
        params = list(added.items()) if named else list(added.values())
        inner.add_param_group({**options, "params": params, "weight_decay": 0.0})
    elif plain is not None:
        _extend(plain, added)
    return RebindReport(dropped, with_decay, without)


def untrained_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of trainable parameters of the model that the optimiser does not hold.

    Empty if it holds none of the model's at all: then something flattened or sharded them (FSDP, DeepSpeed).
    """
    held = {id(p) for group in _innermost(optimizer).param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trained.items() if id(p) not in held]
    return [] if len(missing) == len(trained) else missing


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside accelerate's wrappers."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _extend(group: dict[str, Any], added: dict[str, nn.Parameter]) -> None:
    group["params"] += added.values()
    if "param_names" in group:
        group["param_names"] += added


def _drop(optimizer: torch.optim.Optimizer, ours: set[int]) -> int:
    gone: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        gone |= {id(p): p for p in group["params"] if id(p) not in ours}
        if "param_names" in group:
            pairs = zip(group["param_names"], group["params"], strict=True)
            group["param_names"] = [name for name, p in pairs if id(p) in ours]
        group["params"] = [p for p in group["params"] if id(p) in ours]
    for parameter in gone.values():
        optimizer.state.pop(parameter, None)
    return len(gone)
