"""The scale of the residual stream, sublayer by sublayer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normsmith.connections import Connection
from normsmith.diagnostics import stream_scale
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.tapered import TaperedNorm
from tests.conftest import scramble

IDS = torch.randint(90, (3, 12), generator=torch.Generator().manual_seed(1))
LAYERS = 3


def small(**changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
    model = NormsmithForCausalLM(preset_config("gpt", **sizes, **changes))
    scramble(model)
    return model


def rms(h: Tensor) -> float:
    return math.sqrt(float(h.detach().double().square().mean()))


@pytest.mark.parametrize("connection", ["pre", "post", "sphere", "geo"])
def test_equals_what_hooks_see_by_hand(connection: str) -> None:
    model = small(connection=connection).eval()
    # The stream between blocks goes in and out of them; inside a block, attention's input and output give the middle.
    around: list[Tensor] = []
    middle: list[Tensor] = []
    handles: list[Any] = []
    for block in model.model.layers:
        handles += [
            block.register_forward_pre_hook(lambda m, a: around.append(a[0])),
            block.self_attn.register_forward_hook(
                lambda m, a, out, block=block: middle.append(block.attention_connection.merge(around[-1], out[0]))
            ),
        ]
    handles.append(model.model.layers[-1].register_forward_hook(lambda m, a, out: around.append(out)))
    model(IDS)
    for handle in handles:
        handle.remove()
    expected = [rms(around[0])]
    for inside, after in zip(middle, around[1:], strict=True):
        expected += [rms(inside), rms(after)]
    scales = stream_scale(model, input_ids=IDS)
    assert len(scales) == 1 + 2 * LAYERS
    assert scales == pytest.approx(expected, rel=1e-5)
    if connection == "pre":
        assert max(scales) / min(scales) > 1.5, "a stream that does not grow could hide a mixed-up order"


@pytest.mark.parametrize("connection", ["proj", "cay", "geo"])
@pytest.mark.parametrize("radius", [1.0, 0.5])
def test_the_sphere_keeps_its_radius(connection: str, radius: float) -> None:
    model = small(connection=connection)
    entry = model.model.entry
    assert entry is not None
    r = radius * math.sqrt(32)
    with torch.no_grad():
        entry.rho.fill_(r + math.log(-math.expm1(-r)))
    # r/√d, up to the float32 roundings of 6 updates
    assert stream_scale(model, input_ids=IDS) == pytest.approx([radius] * (1 + 2 * LAYERS), rel=1e-5)


def test_the_model_is_as_it_was() -> None:
    model = small(norm="tapered_layernorm").train()
    model.model.layers[1].eval()
    modes = {name: m.training for name, m in model.named_modules()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    stream_scale(model, input_ids=IDS)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(n.batches == 0 for n in model.modules() if isinstance(n, TaperedNorm))
    connections = [m for m in model.modules() if isinstance(m, Connection)]
    assert len(connections) == 2 * LAYERS
    for c in connections:
        assert "merge" not in vars(c)
        assert c.merge.__func__ is type(c).merge  # pyright: ignore[reportFunctionMemberAccess]


def test_a_merge_of_the_callers_own_comes_back() -> None:
    model = small().eval()
    connection = model.model.layers[0].mlp_connection
    merge = connection.merge

    def doubled(h: Tensor, out: Tensor) -> Tensor:
        return merge(h, 2 * out)

    connection.merge = doubled
    plain = stream_scale(small().eval(), input_ids=IDS)
    assert len(stream_scale(model, input_ids=IDS)) == len(plain)
    assert connection.merge is doubled


def test_a_failing_forward_pass_leaves_nothing_behind() -> None:
    model = small().train()
    handle = model.model.layers[2].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream_scale(model, input_ids=IDS)
    handle.remove()
    assert all(m.training for m in model.modules())
    assert not any("merge" in vars(m) for m in model.modules())


def test_it_is_that_of_the_tokens_and_not_of_their_padding() -> None:
    model, mask = small().eval(), torch.tensor([[1] * 5 + [0] * 7] * 3)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 100.0  # a loud token to pad with
    ids = IDS.clamp_min(1)
    padded, expected = torch.where(mask != 0, ids, 0), stream_scale(model, input_ids=ids[:, :5])
    assert stream_scale(model, input_ids=padded, attention_mask=mask) == pytest.approx(expected, rel=1e-4)
    assert stream_scale(model, input_ids=padded)[0] > 10 * expected[0]
