"""Tell queries, keys and values apart by what they do: no names, no list of families.

On a sequence of one token, attention is a softmax over one score, so queries and keys have no effect and values have.
On two tokens, the first query still has none, while the first key decides what the second token sees. Both are read off
the gradient with respect to the outputs of linear layers, put there at random so that no activation hides one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.surgery.example import make_example, placed

_ROWS = 32  # sequences: with random outputs, a unit behind a ReLU is off in all of them once in 2³² times
_NOTHING = 1e-4  # of the largest gradient: what rounding leaves of a softmax over one score


def query_key_rows(model: nn.Module, linears: Mapping[str, nn.Module], example: Any = None) -> dict[str, Tensor]:
    """For each linear layer by name, (rows,) bool: True for outputs that are queries or keys, False for any other.

    Layers whose output the model does not use differentiably are left out. The token ids are those of `example`.
    """
    return {name: gradient == 0 for name, gradient in _effects(model, linears, 1, example).items()}


def query_rows(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The same for queries alone, in a causal model; in any other nothing is one."""
    return {name: gradient == 0 for name, gradient in _effects(model, linears, 2).items()}


def _token_ids(model: nn.Module, example: Any) -> Tensor | None:
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return None
    if example is None:
        return make_example(model).get("input_ids")
    given = example.get("input_ids") if hasattr(example, "get") else example[0] if type(example) is tuple else example
    return placed(model, given) if isinstance(given, Tensor) and not given.is_floating_point() else None


def _effects(model: nn.Module, linears: Mapping[str, nn.Module], length: int, example: Any = None) -> dict[str, Tensor]:
    """Per output of each layer the largest gradient at the first of `length` tokens; 0 for what rounding leaves.

    Empty for a model that does not take token ids, or not them alone.
    """
    ids = _token_ids(model, example)
    if ids is None:
        return {}
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model = copy.deepcopy(model).float()
        linears = {name: model.get_submodule(name) for name in linears}
    ids = ids.flatten().repeat(_ROWS * length)[: _ROWS * length].view(_ROWS, length)
    generator = torch.Generator().manual_seed(0)
    leaves: dict[str, Tensor] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            noise = torch.randn(output.shape, generator=generator).to(output)
            leaves[name] = noise.requires_grad_()
            return leaves[name] + (output - output.detach())  # so that layers before this one are seen through it

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in linears.items()]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            try:
                outputs = model(input_ids=ids)
            except Exception:  # whatever a model raises that needs more than token ids, or more than one of them
                return {}
            logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
            weights = torch.randn(logits.shape, generator=generator).to(logits)
            total = (logits * weights).sum()
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    effects: dict[str, Tensor] = {}
    for (name, _), gradient in zip(leaves.items(), found, strict=True):
        if gradient is not None:
            effects[name] = gradient.view(_ROWS, length, -1)[:, 0].abs().amax(0)
    largest = max((float(size.max()) for size in effects.values()), default=0.0)
    return {name: torch.where(size <= _NOTHING * largest, 0, size) for name, size in effects.items()}
