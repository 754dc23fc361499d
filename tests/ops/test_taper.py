"""The tapered norms at the ends of the gate, and the least-squares property of their scale."""

from __future__ import annotations

import math

import pytest
import torch

from normsmith.norms import create_norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.ops.taper import token_mean
from tests.conftest import scramble

D = 24


def pair(plain: str, **options: object) -> tuple[torch.nn.Module, TaperedNorm]:
    norm = scramble(create_norm(plain, D, **options))
    tapered = create_norm(f"tapered_{plain}", D, **options)
    assert isinstance(tapered, TaperedNorm)
    tapered.load_state_dict(norm.state_dict(), strict=False)
    return norm, tapered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("plain", "options"),
    [("rmsnorm", {}), ("rmsnorm", {"cast_first": True}), ("layernorm", {}), ("layernorm", {"bias": False})],
)
def test_open_gate_equals_the_plain_norm_to_the_bit(plain: str, options: dict[str, bool], dtype: torch.dtype) -> None:
    norm, tapered = pair(plain, **options)
    x = 3 * torch.randn(7, 5, D).to(dtype)
    assert torch.equal(tapered.to(dtype)(x), norm.to(dtype)(x))


@pytest.mark.parametrize("plain", ["rmsnorm", "layernorm"])
def test_half_precision_keeps_gate_and_scale(plain: str) -> None:
    _, tapered = pair(plain)
    tapered.scale.fill_(1.2345678)
    tapered.gate.fill_(0.98765432)
    tapered.bfloat16()
    assert tapered.gamma.dtype == torch.bfloat16
    assert (tapered.scale.item(), tapered.gate.item()) == (
        torch.tensor(1.2345678).item(),
        torch.tensor(0.98765432).item(),
    )


@pytest.mark.parametrize("plain", ["rmsnorm", "layernorm"])
def test_collected_scale_is_the_least_squares_fit(plain: str) -> None:
    norm, tapered = pair(plain)
    x = torch.randn(400, D) * (0.5 + torch.rand(400, 1))
    tapered(x)
    with torch.no_grad():
        c = (tapered.sum_scaled / tapered.sum_power).double()
        bias = tapered.beta.double() if tapered.beta is not None else 0
        target = norm.reference(x) - bias
        base = (x - x.mean(-1, keepdim=True) if tapered.centred else x).double() * norm.gamma.double()
        residual = [((c * k * base - target) ** 2).sum() for k in (0.999, 1.0, 1.001)]
    assert residual[1] < residual[0]
    assert residual[1] < residual[2]


def test_statistics_are_collected_only_in_training_with_gradients() -> None:
    _, tapered = pair("rmsnorm")
    x = torch.randn(3, D)
    tapered.eval()(x)
    with torch.no_grad():
        tapered.train()(x)
    assert tapered.batches == 0
    tapered(x)
    tapered(x)
    assert tapered.batches == 2


def test_what_padding_holds_need_not_be_finite() -> None:
    values, mask = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert token_mean(values, mask) == 9 / 4
    assert token_mean(values.flatten(), mask) == 9 / 4
    assert token_mean(values, torch.zeros(2, 3)) == 0
