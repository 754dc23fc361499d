"""Put other modules where a model's norms stand: with their hooks, and only if the model runs with them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from normsmith.errors import InputError
from normsmith.surgery.fused import update_fused_forms
from normsmith.surgery.native import wholes
from normsmith.surgery.verify import outputs

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def replace_modules(model: nn.Module, new: Mapping[str, nn.Module | None]) -> None:
    """Put `new[name]` where `name` stands; None removes it (an `nn.Identity` where the parent needs something to call).

    The names are resolved before anything changes, so a wrong one leaves the model as it was.
    """
    places = [(*_locate(model, name), module) for name, module in new.items()]
    for parent, leaf, module in places:
        # A parent that lists the attribute among its `sites` does without; any other calls what it finds there.
        gone = None if leaf in getattr(type(parent), "sites", {}) else nn.Identity()
        setattr(parent, leaf, gone if module is None else module)
    update_fused_forms(model)


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    if not leaf:
        raise InputError(
            f"the model is itself a norm ({type(model).__name__}), which cannot be replaced in place: give the module "
            "that holds it, for instance nn.Sequential(norm)"
        )
    module = model.get_submodule(parent)
    module.get_submodule(leaf)
    return module, leaf


@contextmanager
def attempted(model: nn.Module, new: Mapping[str, nn.Module], example: Any) -> Generator[None]:
    """`new` in the model by name, after one forward pass with it; an error there or in the body puts the old back.

    Some models read a norm's `weight` themselves, or call it with more than a tensor, and would fail only later.

    Raises:
        InputError: the model does not run with the new norms.
    """
    old = {name: model.get_submodule(name) for name in new}
    replace_modules(model, new)
    try:
        try:
            outputs(model, example)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            kinds = ", ".join(sorted({type(module).__name__ for module in new.values()}))
            raise InputError(
                f"{type(model).__name__} does not run with {kinds} in the place of its norms ({type(error).__name__}: "
                f"{reason}); nothing was changed. It uses one of them in a way of its own: leave that out with where="
            ) from error
        yield
    except BaseException:
        replace_modules(model, old)
        raise


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let the hooks of `old` run for `new` as well."""
    for name in _HOOKS:  # the same dictionaries, so that the handle of a hook still removes it
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    if hasattr(old, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, cast("Any", old)._hf_hook)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise for a model inside a wrapper that knows only the parameters which it was made with."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return  # then there is no such wrapper, and looking for one goes through all objects of the process
    for whole in (model, *wholes(model)):
        sharded = any(isinstance(module, FSDPModule) for module in whole.modules())
        if sharded or isinstance(whole, DistributedDataParallel | FullyShardedDataParallel):
            kind = "fully_shard" if sharded else type(whole).__name__
            raise InputError(
                f"the model is inside a {kind}, which would not share the gradients of new parameters between the "
                f"ranks: change the norms first and wrap the model then (a {kind} of an earlier run must be deleted)"
            )
