"""The blocks of a model: where the stream passes, found by watching the model run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.surgery.example import placed

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Blocks:
    """The blocks in the order of the stream, and the name of the list that holds them."""

    name: str
    modules: tuple[nn.Module, ...]


def stream_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a block reads from the stream: its first argument, or `hidden_states`."""
    h = args[0] if args else kwargs.get("hidden_states")
    return h if isinstance(h, Tensor) else None


def stream_out(output: Any) -> Tensor | None:
    """What a block writes to the stream: its output, or the first of several."""
    h = output[0] if isinstance(output, tuple | list) and output else output
    return h if isinstance(h, Tensor) else None


def with_stream(call: Call, h: Tensor) -> Call:
    """A block's arguments with another stream."""
    args, kwargs = call
    return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})


def run(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    """One forward pass on token ids without a cache, which would keep what one pass said for the next."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None) is not None:
        options = {"use_cache": False, **options}
    return model(**placed(model, {"input_ids": ids, **options}))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode; each module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def find_blocks(model: nn.Module, ids: Tensor) -> Blocks:
    """The longest `nn.ModuleList` whose modules pass the stream on, each once in a forward pass.

    Args:
        model: any model that takes `input_ids`.
        ids: token ids (batch, time) to run it on.

    Raises:
        InputError: there is none.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    passed: dict[nn.Module, list[tuple[torch.Size, torch.Size]]] = defaultdict(list)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before, after = stream_in(args, kwargs), stream_out(output)
        if before is not None and after is not None and before.is_floating_point():
            passed[module].append((before.shape, after.shape))

    members = {module for held in lists.values() for module in held}
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in members]
    try:
        with evaluating(model):
            run(model, ids)
    finally:
        for handle in handles:
            handle.remove()

    def streams(module: nn.Module) -> bool:
        calls = passed[module]
        return len(calls) == 1 and calls[0][0] == calls[0][1] and calls[0][0][:-1] == ids.shape

    found = {name: held for name, held in lists.items() if all(streams(module) for module in held)}
    if not found:
        raise InputError(
            f"{type(model).__name__} has no nn.ModuleList of blocks that each read and write the stream once, so there "
            "is nothing to look at layer by layer"
        )
    sizes = {name: len(held) for name, held in found.items()}
    name = max(sizes, key=sizes.__getitem__)
    return Blocks(name, tuple(found[name]))


@contextlib.contextmanager
def watching(blocks: Blocks) -> Generator[list[Tensor]]:
    """Collect the stream of the last forward pass: before the first block, and after each."""
    stream: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream.clear()
        h = stream_in(args, kwargs)
        assert h is not None
        stream.append(h.detach())

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        h = stream_out(output)
        assert h is not None
        stream.append(h.detach())

    handles = [blocks.modules[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [module.register_forward_hook(after) for module in blocks.modules]
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def eager_attention(model: Any) -> Generator[str]:
    """Let attention compute its weights where one can see them; yields "", or why that is not possible."""
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        yield "" if before == "eager" else "the model's attention cannot be switched to eager, which keeps weights"
        return
    try:
        model.set_attn_implementation("eager")
    except (ValueError, ImportError, AttributeError) as error:
        yield f"no eager attention ({' '.join(str(error).split())[:120]})"
        return
    try:
        yield ""
    finally:
        model.set_attn_implementation(before)
