"""Move a linear map from a norm into the weights beside it, with a way back for every change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.norms import LinearForm
from normsmith.surgery.uses import Reader


class Undo:
    """Changes made so far, so that they can be taken back in reverse order."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []

    def copy(self, parameter: Tensor, value: Tensor) -> None:
        """Write `value` into the parameter."""
        saved = parameter.detach().clone()
        self._actions.append(lambda: _write(parameter, saved))
        _write(parameter, value)

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        old = getattr(owner, name)
        self._actions.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    def add(self, action: Callable[[], None]) -> None:
        """Remember how to take back a change that the caller makes."""
        self._actions.append(action)

    def run(self) -> None:
        """Take everything back."""
        while self._actions:
            self._actions.pop()()


@torch.no_grad()
def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.data.copy_(value)


def problem(model: nn.Module, reader: Reader, needs_bias: bool) -> str:
    """Why this product's weight cannot be changed, or an empty string."""
    try:
        weight = model.get_parameter(reader.weight)
    except AttributeError:
        return f"{reader.weight} is gone"
    if weight.is_meta:
        return f"{reader.weight} has no values (on the meta device, or offloaded): load it on a real device first"
    if type(weight.data) is not Tensor or not weight.is_floating_point():
        kind = type(weight.data).__name__
        return f"{reader.weight} is quantised ({kind}, {weight.dtype}): fold before quantising"
    trained = any(p.requires_grad for p in model.parameters())
    if trained and not weight.requires_grad:
        return f"{reader.weight} is frozen while other parameters are trained: unfreeze it, or freeze all to fold"
    if needs_bias and _is_adapter(model, reader.module):
        return f"{reader.module} is part of an adapter, and merging that would lose the norm's shift: merge it first"
    if needs_bias and reader.bias is None:
        return f"{reader.module} has no bias that could carry the norm's shift"
    return ""


def _is_adapter(model: nn.Module, name: str) -> bool:
    """Whether the module is one of PEFT's matrices, which stand by adapter in dictionaries of a layer that says so."""
    layer = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    return "." in name and bool(getattr(layer, "adapter_layer_names", ()))


def into_reader(model: nn.Module, reader: Reader, form: LinearForm, undo: Undo) -> None:
    """For y = scale ⊙ (x − mean) + shift read by W: W′ = W·diag(scale)·(I − 11ᵀ/d), b′ = b + W·shift."""
    weight = model.get_parameter(reader.weight)
    region = tuple(slice(*b) for b in reader.bounds)
    part = weight.detach()[region].double()
    axis = reader.axis
    scaled = scale_axis(part, form.scale, axis)
    if form.centred:
        scaled = scaled - scaled.mean(dim=axis, keepdim=True)
    if form.shift is not None and bool(form.shift.any()):
        shift = reader.factor * (part.movedim(axis, -1) @ form.shift.to(part.device))
        _add_bias(model, reader, shift.flatten(), undo)
    undo.copy(weight.data[region], scaled)


def into_producer(model: nn.Module, producer: Reader, form: LinearForm, undo: Undo) -> None:
    """For y = scale ⊙ (W·x + b − mean) + shift: the rows of W and b are centred and scaled, b′ also gets the shift.

    `scale` is (d,). A norm of d features on a result of k·d treats every d of them alike (heads).
    """
    weight = model.get_parameter(producer.weight)
    axis = 1 - producer.axis
    wide = weight.detach().double()
    undo.copy(weight, _per_head(wide.movedim(axis, 0), form).movedim(0, axis))
    bias = model.get_parameter(producer.bias or "").detach().double() if _has_bias(model, producer) else None
    added = torch.zeros(weight.shape[axis], dtype=torch.float64, device=weight.device)
    if bias is not None:
        added = _per_head(bias.unsqueeze(-1), form).squeeze(-1) - bias
    if form.shift is not None:
        added = added + form.shift.to(added.device).repeat(len(added) // len(form.shift))
    if bool(added.any()):
        _add_bias(model, producer, added, undo)


def _per_head(rows: Tensor, form: LinearForm) -> Tensor:
    """Centre and scale (k·d, n) along d in each of the k groups."""
    heads = rows.reshape(-1, len(form.scale), rows.shape[1])
    heads = heads - heads.mean(dim=1, keepdim=True) if form.centred else heads
    return scale_axis(heads, form.scale, 1).reshape(rows.shape)


def scale_axis(weight: Tensor, scale: Tensor, axis: int) -> Tensor:
    """W·diag(scale) along one axis; a 0-dim scale multiplies everything."""
    scale = scale.to(weight.device)
    return weight * (scale if scale.ndim == 0 else scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]))


def _has_bias(model: nn.Module, reader: Reader) -> bool:
    return reader.bias is not None and reader.bias in dict(model.named_parameters(remove_duplicate=False))


def _add_bias(model: nn.Module, reader: Reader, value: Tensor, undo: Undo) -> None:
    if _has_bias(model, reader):
        bias = model.get_parameter(reader.bias or "")
        region = tuple(slice(*b) for b in reader.bias_bounds or ((0, bias.shape[0]),))
        undo.copy(bias.data[region], bias.detach()[region].double() + value.to(bias.device))
        return
    weight = model.get_parameter(reader.weight)
    new = nn.Parameter(value.to(weight.device, weight.dtype), requires_grad=weight.requires_grad)
    undo.assign(model.get_submodule(reader.module), "bias", new)
