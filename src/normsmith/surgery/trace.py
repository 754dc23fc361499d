"""Find out who reads a module's output, by running the model once and watching the operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Operations after which the last axis still holds the same features: the result counts as the same output.
_VIEWS = {"view", "reshape", "flatten", "contiguous", "to", "type_as", "unsqueeze"}
# Questions about a tensor that read none of its values.
_METADATA = {
    "__get__",
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_contiguous",
    "stride",
    "data_ptr",
    "element_size",
}


@dataclass
class Readers:
    """Who reads one module's output: linear layers by name, and every other operation by name."""

    linears: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    runs: int = 0


class _Watch(TorchFunctionMode):
    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.readers: dict[str, Readers] = {}
        self.owner: dict[int, str] = {}  # id of a watched tensor → the module it came from
        self.alive: list[Tensor] = []  # keeps ids from being reused
        self.foreign: set[str] = set()  # linear layers that also read something else
        self.results: dict[int, str] = {}  # id of a linear layer's result → its name

    def watch(self, tensor: Tensor, name: str) -> None:
        self.owner[id(tensor)] = name
        self.alive.append(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        read = {self.owner[id(t)] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) in self.owner}
        if func is F.linear:
            self._linear(args, kwargs, read, result)
        elif name in _METADATA or not read:
            pass
        elif isinstance(result, Tensor) and _keeps_features(name, args, result):
            self.watch(result, next(iter(read)))
        else:
            for owner in read:
                self.readers[owner].others.append(name)
        return result

    def _linear(self, args: tuple[Any, ...], kwargs: dict[str, Any], read: set[str], result: Tensor) -> None:
        source, weight, *_ = (*args, *(kwargs[k] for k in ("input", "weight") if k in kwargs))
        linear = self.weights.get(id(weight))
        self.results[id(result)] = linear or ""
        self.alive.append(result)
        owner = self.owner.get(id(source))
        for other in read - {owner}:
            self.readers[other].others.append("linear (as a weight)")
        if owner is None:
            self.foreign.add(linear or "")
        elif linear is None:
            self.readers[owner].others.append("linear (unnamed weight)")
        elif linear not in self.readers[owner].linears:
            self.readers[owner].linears.append(linear)


def _keeps_features(name: str, args: tuple[Any, ...], result: Tensor) -> bool:
    if name == "__getitem__":  # choosing tokens, not features: the last axis is left out of the index or taken whole
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        whole = index[-1] == slice(None) if isinstance(index[-1], slice) else False
        return (len(index) < args[0].ndim or whole) and not any(i is Ellipsis or i is None for i in index)
    return name in _VIEWS and result.shape[-1:] == args[0].shape[-1:]


def trace_readers(
    model: nn.Module, sites: Mapping[str, nn.Module], run: Callable[[], Any]
) -> tuple[dict[str, Readers], set[str]]:
    """Run the model once by calling `run`; return who reads the output of each of `sites`, and the model's heads.

    A head is a linear layer whose result is an output of the model.

    A linear layer that reads one site's output and also some other tensor is listed among `others`: scaling its weight
    would change that other use. The order of `linears` is the order of execution.
    """
    weights = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    watch = _Watch(weights)
    watch.readers = {name: Readers() for name in sites}

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            watch.readers[name].runs += 1
            if isinstance(output, Tensor):
                watch.watch(output, name)

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in sites.items()]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), watch:
            outputs = run()
        heads = {watch.results[id(t)] for t in tree_leaves(outputs) if id(t) in watch.results}
    finally:
        for module, mode in modes.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    shared = {
        linear
        for linear in weights.values()
        if linear in watch.foreign or sum(linear in r.linears for r in watch.readers.values()) > 1
    }
    for readers in watch.readers.values():
        readers.others += [f"{linear} (reads other tensors too)" for linear in readers.linears if linear in shared]
    return watch.readers, heads
