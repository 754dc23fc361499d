"""Choosing sites by role, by pattern and by function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normsmith.errors import InputError
from normsmith.surgery import find_norms
from normsmith.surgery.find import Sites
from normsmith.surgery.select import ROLES, select_sites
from tests.tiny import tiny


@pytest.fixture(scope="module")
def sites() -> Sites:
    return find_norms(tiny("qwen3"))


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (None, lambda s: True),
        ("*", lambda s: True),
        ("pre", lambda s: s.role == "pre"),
        (" pre , final ", lambda s: s.role in ("pre", "final")),
        (["qk", "final"], lambda s: s.role in ("qk", "final")),
        (("model.norm",), lambda s: s.name == "model.norm"),
        ("model.layers.1.*", lambda s: s.name.startswith("model.layers.1.")),
        ("*.[qk]_norm", lambda s: s.role == "qk"),
        ("*.q_norm,final", lambda s: s.name.endswith("q_norm") or s.role == "final"),
        (lambda s: s.width == 32, lambda s: s.width == 32),
    ],
)
def test_what_is_chosen_stands_in_the_order_of_the_model(sites: Sites, where: Any, chosen: Any) -> None:
    found = select_sites(sites, where)
    assert found
    assert found == [site for site in sites if chosen(site)]


@pytest.mark.parametrize("where", ["post", "model.layers.7.*", "MODEL.NORM", "pre,post", ["final", "nope"], ""])
def test_a_word_that_matches_nothing_is_an_error_that_says_what_there_is(sites: Sites, where: Any) -> None:
    with pytest.raises(InputError, match="no site matches where=") as error:
        select_sites(sites, where)
    assert "roles here: qk, pre, final" in str(error.value)
    assert "model.layers.0." in str(error.value)


def test_a_function_that_chooses_nothing_and_a_model_without_norms(sites: Sites) -> None:
    with pytest.raises(InputError, match="chose none of the 9 sites"):
        select_sites(sites, lambda site: False)
    with pytest.raises(InputError, match="no norm of a known kind was found"):
        select_sites(Sites(), None)
    with pytest.raises(InputError, match="where is empty"):
        select_sites(sites, [])


def test_every_name_of_a_shared_norm_selects_it() -> None:
    norm = nn.LayerNorm(4)
    model = nn.ModuleDict({"one": norm, "two": norm, "linear": nn.Linear(4, 4)})
    model.forward = lambda x: model["linear"](norm(x))  # pyright: ignore
    sites = find_norms(model, torch.randn(2, 4))
    assert len(sites) == 1
    assert select_sites(sites, "one") == select_sites(sites, "two") == list(sites)


def test_every_role_that_a_site_can_have_is_a_word() -> None:
    for family in ("gpt2", "bert", "gemma2", "qwen3", "bloom", "vit"):
        assert {site.role for site in find_norms(tiny(family))} <= set(ROLES)
