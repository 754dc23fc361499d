"""Liger PR 392 (383, 390) and PR 1470: patching a live model left objects without an attribute, or missed q/k norms.

Kind of fault: instances are patched incompletely. A swap replaces all sites of the role with complete objects.
"""

from __future__ import annotations

import copy
import re

import pytest

from normsmith.norms import norms
from normsmith.surgery import find_norms, swap_norms_
from tests.tiny import FAMILIES, is_norm, output, tiny


def names_of_norms(model: object) -> set[str]:
    return {name for name, module in model.named_modules() if is_norm(module)}  # pyright: ignore


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_is_swapped_and_whole(family: str) -> None:
    model = tiny(family)
    modules, before = names_of_norms(model), output(model)
    old = {type(model.get_submodule(name)).__name__ for name in modules} - {"RMSNorm"}
    report = swap_norms_(model, "rmsnorm")
    assert {name for name, *_ in report.swapped} == modules
    assert report.kept == ()
    for name in modules:
        new = model.get_submodule(name)
        assert type(new) is norms.get("rmsnorm")
        for attribute in ("width", "config", "gamma", "training"):
            assert hasattr(new, attribute)
    assert "RMSNorm(" in repr(model)
    assert not old & set(re.findall(r"\w+(?=\()", repr(model)))
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    assert output(model).shape == before.shape
    again = swap_norms_(model, "rmsnorm")
    assert again.swapped == ()
    assert dict(again.kept) == dict.fromkeys(modules, "already rmsnorm")
    assert "already rmsnorm" in str(again)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_q_and_k_norms_when_their_role_is_asked_for(family: str) -> None:
    model = tiny(family)
    wanted = {name for name in names_of_norms(model) if name.endswith(("q_norm", "k_norm"))}
    assert len(wanted) == 4
    assert {name for name, *_ in swap_norms_(model, "scalenorm", where="qk").swapped} == wanted
    assert {site.name for site in find_norms(model) if site.kind == "scalenorm"} == wanted
