"""Liger PR 772: after a revert the class stayed patched, and the next model was affected.

Kind of fault: a process-wide patch. Only the given instance may change, and it comes back as the same objects.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normsmith.norms import norms
from normsmith.surgery import fold_, restore_, swap_norms_, taper_
from tests.tiny import FAMILIES, is_norm, output, same_state, state, tiny


def classes(model: nn.Module) -> dict[type, dict[str, object]]:
    return {cls: dict(vars(cls)) for module in model.modules() for cls in type(module).__mro__}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("verb", ["swap", "taper", "fold"])
def test_other_models_of_the_class_are_untouched(family: str, verb: str) -> None:
    first = tiny(family)
    expected, before = output(first), classes(first)
    if verb == "swap":
        swap_norms_(first, "dyt")
    elif verb == "fold":
        fold_(first, "affine")
    elif family not in ("bert", "vit", "olmo2"):  # those have no pre-norms, or no head
        taper_(first, steps=10)
    assert classes(tiny(family)) == before
    second = tiny(family)
    assert torch.equal(output(second), expected)
    assert all(type(m) in before for m in second.modules())


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bert"])
def test_restore_gives_back_the_same_objects_and_bits(family: str, kind: str) -> None:
    model = tiny(family)
    logits, before = output(model), state(model)
    modules = {name: module for name, module in model.named_modules() if is_norm(module)}
    swap_norms_(model, kind)
    assert not any(model.get_submodule(name) is module for name, module in modules.items())
    assert {name for name, _, _ in restore_(model).restored} == set(modules)
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert same_state(model, before)
    assert torch.equal(output(model), logits)
