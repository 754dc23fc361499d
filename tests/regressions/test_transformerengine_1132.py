"""TransformerEngine 1132; transformers 33133, 30236 and PR 25421: small mismatches, or float32 leaks out of a norm.

Kind of fault: the order of casts, and the dtype of the output. The output has the dtype of the input whatever the
parameters have, and both orders of transformers are reproduced to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normsmith.norms import create_norm, norms
from normsmith.surgery import find_norms, swap_norms_
from tests.conftest import scramble
from tests.regressions.test_liger_74 import made, plain_classes
from tests.tiny import VARIED, output, tiny

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("parameters", DTYPES)
@pytest.mark.parametrize("inputs", DTYPES)
@pytest.mark.parametrize("kind", list(norms))
def test_the_next_linear_layer_gets_the_dtype_of_the_stream(
    kind: str, parameters: torch.dtype, inputs: torch.dtype
) -> None:
    norm = scramble(create_norm(kind, 12)).to(parameters)
    y = norm(torch.randn(2, 3, 12).to(inputs))
    assert y.dtype == inputs
    nn.Linear(12, 4).to(inputs)(y)


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", VARIED)
def test_no_float32_leaks_into_a_bfloat16_model(family: str, kind: str) -> None:
    model = tiny(family).bfloat16()
    swap_norms_(model, kind)
    for module in model.modules():
        if type(module).__module__.startswith("normsmith"):
            module.float()  # parameters kept in float32, as Gemma's 1 + w are
    assert output(model).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", plain_classes(), ids=lambda c: f"{c.__module__.rpartition('.')[2]}.{c.__name__}")
def test_both_cast_orders_are_reproduced_to_the_bit(cls: Any, dtype: torch.dtype) -> None:
    norm = made(cls, False).to(dtype)
    x = (torch.randn(64, 24) + 0.3).to(dtype)
    model = nn.Sequential(norm, nn.Linear(24, 2).to(dtype))
    facts, before = find_norms(model, x)[0].facts, norm(x)
    assert before.dtype == dtype
    swap_norms_(model, facts.kind, example=x)
    if facts.kind == "rmsnorm":
        assert torch.equal(model[0](x), before)
    elif facts.offset:  # Nemotron rounds its own 1 + w to the low precision, ours does not
        exact = model[0].reference(x)
        assert (model[0](x) - exact).abs().max() <= (before - exact).abs().max()
    else:  # torch's kernels for parameters in half precision and in float32 sum in another order
        torch.testing.assert_close(model[0](x), before, rtol=torch.finfo(dtype).eps, atol=1e-3)
        assert (model[0](x) == before).double().mean() > 0.99


def test_both_orders_occur() -> None:
    orders = {find_norms(nn.Sequential(made(c, False), nn.Linear(24, 2)), torch.randn(2, 24))[0].facts.cast_first
              for c in plain_classes()}  # fmt: skip
    assert orders == {True, False}
