"""Replace modules of a model in place, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def replace_modules(model: nn.Module, new: Mapping[str, nn.Module | None]) -> None:
    """Put `new[name]` where `name` stands; None removes it (an `nn.Identity` where the parent needs something to call).

    The names are resolved before anything changes, so a wrong one leaves the model as it was.
    """
    places = [(*_locate(model, name), module) for name, module in new.items()]
    for parent, leaf, module in places:
        # A parent that lists the attribute among its `sites` does without; any other calls what it finds there.
        gone = None if leaf in getattr(type(parent), "sites", {}) else nn.Identity()
        setattr(parent, leaf, gone if module is None else module)


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    module.get_submodule(leaf)
    return module, leaf
