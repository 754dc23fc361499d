"""pytorch 189581 and 155527, lit-llama PR 339, transformers 38025: outputs off on small inputs, perplexity drifted.

Kind of fault: eps is left to a default that depends on the dtype, or is not passed on. Every norm has its own number,
and every change of a model keeps the eps that the module really uses, whatever the configuration says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normsmith.norms import create_norm, norms
from normsmith.norms.base import norm_config
from normsmith.surgery import find_norms, fold_, restore_, swap_norms_, taper_
from tests.conftest import scramble
from tests.tiny import FAMILIES, VARIED, apart, output, tiny

WITH_EPS = [kind for kind in norms if "eps" in norms.get(kind).Config.model_fields]
EPS = 3e-3  # in no configuration, and large enough to show


def changed(family: str) -> Any:
    """A model whose modules were given another eps after they were built."""
    model = tiny(family)
    for site in find_norms(model):
        name = next(n for n in ("eps", "variance_epsilon") if hasattr(site.module, n))
        setattr(site.module, name, EPS)
    return model


@pytest.mark.parametrize("kind", WITH_EPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_eps_is_a_number_that_no_dtype_changes(kind: str, dtype: torch.dtype) -> None:
    assert isinstance(norm_config(kind).eps, float)
    norm = scramble(create_norm(kind, 16))
    x = (1e-3 * torch.randn(8, 16)).to(dtype)
    torch.testing.assert_close(norm.to(dtype)(x).double(), norm.reference(x), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_eps_of_the_module_is_found(family: str) -> None:
    assert {site.facts.eps for site in find_norms(changed(family))} == {EPS}


@pytest.mark.parametrize("kind", WITH_EPS)
@pytest.mark.parametrize("family", VARIED)
def test_every_swap_keeps_it(family: str, kind: str) -> None:
    model = changed(family)
    swap_norms_(model, kind)
    assert {site.module.config.eps for site in find_norms(model)} == {EPS}
    assert {site.facts.eps for site in find_norms(model)} == {EPS}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_function_after_swap_fold_and_restore(family: str) -> None:
    model = changed(family)
    before, kind = output(model), find_norms(model)[0].kind
    assert apart(before, output(tiny(family))) > 1e-4, "eps must matter here"
    fold_(model, "affine")
    assert apart(output(model), before) <= 1e-5
    swap_norms_(model, kind)
    assert apart(output(model), before) <= 1e-5
    restore_(model)
    assert {site.facts.eps for site in find_norms(model)} == {EPS}
    assert apart(output(model), before) <= 1e-5


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3"])
def test_a_taper_keeps_it(family: str) -> None:
    model = changed(family)
    before = output(model)
    controller = taper_(model, steps=10)
    assert {norm.config.eps for norm in controller.sites.values()} == {EPS}
    assert apart(output(model), before) <= 1e-5


def test_the_default_of_torch_becomes_a_number() -> None:
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 4))
    assert model[0].eps is None
    x = 1e-3 * torch.randn(6, 16)
    before = model[0](x)
    assert find_norms(model, x)[0].facts.eps == torch.finfo(torch.float32).eps
    swap_norms_(model, "rmsnorm", example=x)
    torch.testing.assert_close(model[0](x), before, rtol=1e-5, atol=1e-6)


def test_the_position_of_eps_is_told() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)

    model, x = nn.Sequential(Outside(), nn.Linear(16, 4)), torch.randn(6, 16)
    before = model[0](x)
    assert "(outside)" in str(find_norms(model, x))
    report = swap_norms_(model, "rmsnorm", example=x)
    assert model[0].config.eps == pytest.approx(1e-6), "the nearest eps inside the root"
    assert 1e-5 < report.swapped[0][3] < 5e-3, "and the report does not call it the same function"
    torch.testing.assert_close(model[0](x), before, rtol=5e-3, atol=1e-3)


def test_no_eps_at_all() -> None:
    model, x = nn.Sequential(nn.LayerNorm(16, eps=0.0), nn.Linear(16, 4)), 1e-4 * torch.randn(6, 16)
    nn.init.normal_(model[0].weight)
    before = model[0](x)
    assert swap_norms_(model, "layernorm", example=x).swapped[0][3] < 1e-6
    torch.testing.assert_close(model[0](x), before)
