"""What every norm must do, for each entry of the registry: a new norm is tested on arrival."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml

from normsmith.norms import Norm, create_norm, norm_config, norms
from normsmith.norms.tapered import TaperedNorm
from tests.conftest import scramble

WIDTH = 12
HARD = {
    "plain": lambda: torch.randn(3, 5, WIDTH),
    "tiny": lambda: 1e-3 * torch.randn(3, 5, WIDTH),
    "huge": lambda: 1e4 * torch.randn(3, 5, WIDTH),
    "outlier": lambda: torch.randn(3, 5, WIDTH) + 300 * torch.nn.functional.one_hot(torch.tensor(2), WIDTH),
    "offset": lambda: torch.randn(3, 5, WIDTH) + 20,
    "vector": lambda: torch.randn(WIDTH),
}


def made(name: str, **options: Any) -> Norm:
    norm = scramble(create_norm(name, WIDTH, **options))
    assert isinstance(norm, Norm)
    return norm.eval() if norm.stochastic else norm  # the reference draws no random numbers


@pytest.fixture(params=list(norms))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("gate", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("hard", HARD)
def test_equals_its_reference(name: str, hard: str, gate: float) -> None:
    norm, x = made(name).double(), HARD[hard]().double()
    if isinstance(norm, TaperedNorm):
        norm.gate.fill_(gate)
        norm.scale.fill_(0.7)
    torch.testing.assert_close(norm(x), norm.reference(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float64])
def test_keeps_shape_and_dtype_and_rounds_once(name: str, parameters: torch.dtype, inputs: torch.dtype) -> None:
    norm, x = made(name).to(parameters), torch.randn(2, 3, WIDTH).to(inputs)
    y = norm(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    # float32 arithmetic, then one rounding to the dtype of x: half a unit in the last place.
    eps = max(torch.finfo(inputs).eps / 2, 4e-7 if inputs != torch.float64 else 1e-12)
    near_zero = 2e-6 if inputs != torch.float64 else 1e-14
    torch.testing.assert_close(y.double(), norm.reference(x), rtol=1.01 * eps, atol=near_zero)


def test_gradients(name: str) -> None:
    norm = made(name).double().eval()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    if name != "adanorm":  # by definition its gradient is another one: a factor counts as constant
        assert torch.autograd.gradcheck(norm, (x,))
    upstream = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    wrt = (x, *norm.parameters())
    fast = torch.autograd.grad(norm(x), wrt, upstream, allow_unused=True, materialize_grads=True)
    literal = torch.autograd.grad(norm.reference(x), wrt, upstream, allow_unused=True, materialize_grads=True)
    for a, b in zip(fast, literal, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_modifies_neither_input_nor_upstream_gradient(name: str, dtype: torch.dtype) -> None:
    norm, x = made(name).to(dtype), torch.randn(2, 3, WIDTH).to(dtype).requires_grad_()
    upstream = torch.randn(2, 3, WIDTH).to(dtype)
    kept_x, kept_upstream = x.detach().clone(), upstream.clone()
    norm(x).backward(upstream)
    assert torch.equal(x, kept_x)
    assert torch.equal(upstream, kept_upstream)


def test_state_and_config_round_trip(name: str) -> None:
    norm = made(name)
    config = norm.config
    assert norm_config(json.loads(json.dumps(config.to_dict()))) == config
    assert norm_config(yaml.safe_load(config.to_yaml())) == config
    again = create_norm(config, WIDTH).train(norm.training)
    again.load_state_dict(norm.state_dict())
    x = torch.randn(4, WIDTH)
    assert torch.equal(again(x), norm(x))
    assert not {"weight", "bias"} & set(norm.state_dict()), "a stock loader would take these for a LayerNorm's"


def test_linear_form_is_the_forward(name: str) -> None:
    norm = made(name).double().eval()
    for buffer in ("gate", "gate_eval"):
        if hasattr(norm, buffer):
            getattr(norm, buffer).zero_()
    form, x = norm.linear_form(), torch.randn(5, WIDTH, dtype=torch.float64)
    if form is None:
        assert not torch.allclose(norm(2 * x) - norm(0 * x), 2 * (norm(x) - norm(0 * x))), "linear, but not declared so"
    else:
        torch.testing.assert_close(form.apply(x), norm(x), rtol=1e-7, atol=1e-7)


def test_from_site_starts_from_the_trained_norm(name: str) -> None:
    old = made(name).eval()
    new = type(old).from_site(old, WIDTH)
    x = torch.randn(5, WIDTH)
    assert torch.equal(new(x), old(x))
    assert new.config == old.config
    assert not new.training
    assert [id(p) for p in new.parameters()] == [id(p) for p in old.parameters()]


def test_compiles_without_a_break(name: str) -> None:
    norm, x = made(name), torch.randn(2, 3, WIDTH, requires_grad=True)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), norm(x))
