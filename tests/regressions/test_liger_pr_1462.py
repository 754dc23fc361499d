"""Liger PR 1462: the norm of Gemma in bfloat16 was off by a rounding.

Kind of fault: 1 + w is added in low precision, where 1 + 2⁻⁸ is 1. The sum must be made in float32.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from normsmith.surgery import swap_norms_
from normsmith.surgery.find import find_norms
from normsmith.surgery.swap import plain_norm
from tests.tiny import output, tiny


def exact(w: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + w.double())


@pytest.mark.parametrize("w", [2**-8, -(2**-8), 3 * 2**-9])
def test_a_swapped_gemma_norm_is_rounded_once(w: float) -> None:
    assert torch.tensor(2**-8, dtype=torch.bfloat16) + 1 == 1, "bfloat16 rounds this away"
    model = torch.nn.Sequential(GemmaRMSNorm(32, eps=1e-6), torch.nn.Linear(32, 3)).bfloat16()
    with torch.no_grad():
        model[0].weight.fill_(w)
    x = torch.randn(40, 32).bfloat16()
    expected = exact(model[0].weight, x, 1e-6)
    swap_norms_(model, "rmsnorm", example=x)
    assert model[0](x).dtype == torch.bfloat16
    assert torch.equal(model[0](x), expected.bfloat16())


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_whole_models_keep_every_bit_of_the_scale(family: str) -> None:
    model = tiny(family).bfloat16()
    with torch.no_grad():
        for site in find_norms(model):
            site.module.weight.copy_(2**-8 * torch.randint(-3, 4, site.module.weight.shape))
    before = output(model)
    for site in find_norms(model):
        gamma = plain_norm(site).gamma
        assert torch.equal(gamma.double(), 1 + site.module.weight.double())
    swap_norms_(model, "rmsnorm")
    torch.testing.assert_close(output(model), before, rtol=0.05, atol=0.05)
