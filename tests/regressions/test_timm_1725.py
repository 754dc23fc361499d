"""timm 1725 (pytorch 97084), pytorch 128319 and 120958: a graph break per norm, recompilations, or a stale graph.

Kind of fault: Python state in a forward pass. State is in tensors: one graph for a whole taper, which follows the gate.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from normsmith.connections import connections, create_connection
from normsmith.norms import create_norm, norm_config, norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import swap_norms_, taper_
from tests.conftest import scramble
from tests.tiny import apart, output, tiny

TAPERED = [kind for kind in norms if issubclass(norms.get(kind), TaperedNorm)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([create_norm(kind, 8) for _ in range(3)])
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x)).tanh()
        return x


@pytest.mark.parametrize("kind", TAPERED)
def test_one_graph_for_a_whole_taper_and_it_follows_the_gate(kind: str) -> None:
    model, counter, x = scramble(Model(kind)), CompileCounter(), torch.randn(4, 5, 8)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    controller = taper_(model, TaperConfig(warmup=0.2, scale_loss=0), steps=20, example=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    gates = []
    for _ in range(20):
        loss = compiled(x).square().mean()
        torch.testing.assert_close(loss, model(x).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        gates.append(float(next(iter(controller.sites.values())).gate))
    assert gates[0] == 1
    assert gates[-1] == 0
    assert len(set(gates)) > 10
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", list(norms))
def test_no_break_no_second_graph_and_no_stale_one(kind: str) -> None:
    model, counter, x = scramble(Model(kind)).eval(), CompileCounter(), torch.randn(4, 5, 8)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        scramble(model)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", list(connections))
def test_connections_do_not_break_the_graph(spec: str) -> None:
    connection, counter = scramble(create_connection(spec, 8, index=2, total=4, norm="rmsnorm")), CompileCounter()
    entry = type(connection).entry(8, connection.config, norm_config("rmsnorm"))
    h = torch.randn(2, 3, 8) if entry is None else entry(torch.randn(2, 3, 8)).detach()

    def step(h: Tensor) -> Tensor:
        return connection.merge(h, connection.prepare(h).tanh())

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(3):
        scramble(connection)
        torch.testing.assert_close(compiled(h), step(h))
    assert counter.frame_count == 1


def test_a_graph_made_before_a_swap_is_not_used_after_it() -> None:
    model: Any = tiny("llama")
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(3, 60, (2, 12))
    with torch.no_grad():
        compiled(input_ids=ids)
        swap_norms_(model, "scalenorm", init="fresh")
        assert apart(compiled(input_ids=ids).logits, model(input_ids=ids).logits) <= 1e-5
    assert apart(output(model), output(tiny("llama"))) > 1e-3
