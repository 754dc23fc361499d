"""What every connection must do, for each entry and alias of the registry."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from normsmith.connections import Connection, connection_config, connections, create_connection
from tests.conftest import scramble

WIDTH = 12
SPECS = [*connections, *connections.aliases]


def made(spec: str, **options: object) -> Connection:
    connection = create_connection(spec, WIDTH, index=3, total=8, norm="rmsnorm", **options)
    scramble(connection)
    return connection


def stream(connection: Connection, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A stream this connection can stand in: on the sphere where its family has one."""
    x = torch.randn(*shape, WIDTH, dtype=dtype)
    entry = type(connection).entry(WIDTH, connection.config)
    return x if entry is None else entry(x).detach()


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e3])
def test_equals_its_reference(spec: str, scale: float) -> None:
    connection = made(spec).double()
    h = stream(connection, 2, 5)
    out = scale * torch.randn_like(h)
    torch.testing.assert_close(connection.merge(h, out), connection.reference(h, out), rtol=1e-10, atol=1e-10)


def test_gradients(spec: str) -> None:
    connection = made(spec).double()
    h = stream(connection, 2, 3).requires_grad_()
    out = torch.randn_like(h).requires_grad_()
    with torch.no_grad():
        out[0, 0] = 0  # a zero-initialised output projection
        out[0, 1] = 2 * h[0, 1]  # no tangential part at all
    assert torch.autograd.gradcheck(lambda h, out: connection.merge(h, out), (h, out))
    assert torch.autograd.gradcheck(connection.prepare, (h,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keeps_shape_and_dtype_and_modifies_no_argument(spec: str, dtype: torch.dtype) -> None:
    connection = made(spec).to(dtype)
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


def test_state_and_config_round_trip(spec: str) -> None:
    connection = made(spec)
    config = connection.config
    assert connection_config(json.loads(json.dumps(config.to_dict()))) == config
    assert connection_config(yaml.safe_load(config.to_yaml())) == config
    again = create_connection(config, WIDTH, 3, 8)
    again.load_state_dict(connection.state_dict())
    h = stream(connection, 2, 3, dtype=torch.float32)
    assert torch.equal(again.merge(h, h.flip(0)), connection.merge(h, h.flip(0)))


def test_compiles_without_a_break(spec: str) -> None:
    connection = made(spec)
    h = stream(connection, 2, 3, dtype=torch.float32)
    out = torch.randn_like(h)
    compiled = torch.compile(connection.merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(h, out), connection.merge(h, out))
