"""What every connection must do, for each entry and alias of the registry, and for options that change the graph."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml

from normsmith.connections import connection_config, connections, create_connection
from tests.connections.specs import SPECS, made, stream

WIDTH = 12
PLACES = (1, 2, 3, 8)  # of 8: both sublayers of the first block, and others


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SPECS[request.param]


def test_every_connection_of_the_registry_is_here() -> None:
    assert {*connections, *connections.aliases} <= SPECS.keys()


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e3])
def test_equals_its_reference(spec: dict[str, Any], scale: float) -> None:
    for index in PLACES:
        connection = made(spec, WIDTH, index).double()
        h = stream(connection, 2, 5)
        out = scale * torch.randn_like(h)
        torch.testing.assert_close(connection.merge(h, out), connection.reference(h, out), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(connection.prepare(h), connection.prepare_reference(h), rtol=1e-12, atol=1e-12)


def test_gradients(spec: dict[str, Any]) -> None:
    for index in PLACES[:2]:
        connection = made(spec, WIDTH, index).double()
        h = stream(connection, 2, 3).requires_grad_()
        out = torch.randn_like(h).requires_grad_()
        with torch.no_grad():
            out[0, 0] = 0  # a zero-initialised output projection
            out[0, 1] = 2 * h[0, 1]  # no tangential part at all
        own = [p for p in connection.parameters() if p.ndim == 0]
        merge = connection.merge
        assert torch.autograd.gradcheck(lambda h, out, *_, merge=merge: merge(h, out), (h, out, *own))
        assert torch.autograd.gradcheck(connection.prepare, (h,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keeps_shape_and_dtype_and_modifies_no_argument(spec: dict[str, Any], dtype: torch.dtype) -> None:
    connection = made(spec, WIDTH).to(dtype)
    h = stream(connection, 2, 3, dtype=dtype).requires_grad_()
    out = torch.randn(2, 3, WIDTH).to(dtype).requires_grad_()
    kept = h.detach().clone(), out.detach().clone()
    new = connection.merge(h, out)
    upstream = torch.randn_like(new)
    kept_upstream = upstream.clone()
    new.backward(upstream)
    assert (new.shape, new.dtype) == (h.shape, h.dtype)
    assert connection.prepare(h).dtype == dtype
    assert torch.equal(h, kept[0])
    assert torch.equal(out, kept[1])
    assert torch.equal(upstream, kept_upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hard_inputs_stay_finite(spec: dict[str, Any], dtype: torch.dtype) -> None:
    connection = made(spec, WIDTH).to(dtype)
    h = stream(connection, 6, dtype=dtype)
    out = torch.randn(6, WIDTH).to(dtype)
    out[0], out[1], out[2], out[3] = 0, 2 * h[1].to(dtype), 1e4 * out[2], 1e-20 * out[3]
    h[4] = 0  # the zero embedding of a padding token
    h[5], out[5] = 0, 0
    tensors = [h.requires_grad_(), out.requires_grad_(), *connection.parameters()]
    new = connection.merge(h, out) + connection.prepare(h)
    grads = torch.autograd.grad(new, tensors, torch.randn_like(new), allow_unused=True)
    assert new.isfinite().all()
    assert all(g.isfinite().all() for g in grads if g is not None)


def test_width_one(spec: dict[str, Any]) -> None:
    connection = made(spec, 1)
    h = stream(connection, 2, 3, dtype=torch.float32)
    assert connection.merge(h, connection.prepare(h)).isfinite().all()


def test_state_and_config_round_trip(spec: dict[str, Any]) -> None:
    connection = made(spec, WIDTH)
    config = connection.config
    assert connection_config(json.loads(json.dumps(config.to_dict()))) == config
    assert connection_config(yaml.safe_load(config.to_yaml())) == config
    again = create_connection(config, WIDTH, 3, 8)
    again.load_state_dict(connection.state_dict())
    h = stream(connection, 2, 3, dtype=torch.float32)
    assert torch.equal(again.merge(h, h.flip(0)), connection.merge(h, h.flip(0)))


def test_compiles_without_a_break(spec: dict[str, Any]) -> None:
    connection = made(spec, WIDTH)
    h = stream(connection, 2, 3, dtype=torch.float32)
    out = torch.randn_like(h)
    compiled = torch.compile(connection.merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(h, out), connection.merge(h, out))
