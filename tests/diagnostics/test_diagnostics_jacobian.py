"""Lanczos against a dense singular value decomposition, on matrices that are hard for it and on real blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normsmith.diagnostics import block_jacobians, extreme_singular_values, find_blocks
from normsmith.models import NormsmithForCausalLM, preset_config
from tests.conftest import scramble
from tests.tiny import tiny

D = 24
IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(5))


def matrices() -> Tensor:
    """Random; rank 5; a multiple of the identity; ten orders of magnitude; zero; orthogonal."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(D, D, dtype=torch.float64, generator=generator)
    q, _ = torch.linalg.qr(random)
    wide = q @ torch.diag(torch.logspace(0, -10, D, dtype=torch.float64)) @ q.T.roll(1, 0)
    low = random[:, :5] @ random[:5]
    return torch.stack([random, low, 3 * torch.eye(D, dtype=torch.float64), wide, torch.zeros_like(random), q])


def extremes(J: Tensor, steps: int) -> Any:
    start = torch.randn(J.shape[:2], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return extreme_singular_values(
        lambda v: torch.einsum("rij,rj->ri", J, v), lambda u: torch.einsum("rji,rj->ri", J, u), start, steps
    )


def test_with_as_many_steps_as_dimensions_it_is_exact() -> None:
    J = matrices()
    found, dense = extremes(J, 100), torch.linalg.svdvals(J)
    scale = dense[:, 0].clamp_min(1e-300)
    assert float(((found.largest - dense[:, 0]) / scale).abs().max()) < 1e-12
    assert float(((found.smallest - dense[:, -1]) / scale).abs().max()) < 1e-12
    assert not found.largest_residual.any()


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_fewer_steps_bound_from_inside_and_the_residual_says_how_far(steps: int) -> None:
    J = matrices()
    found, dense = extremes(J, steps), torch.linalg.svdvals(J)
    tiny_ = 1e-12 * dense[:, 0]
    assert (found.largest <= dense[:, 0] + tiny_).all()
    assert (found.smallest >= dense[:, -1] - tiny_).all()
    # Some singular value lies within the residual of each estimate.
    for value, residual in ((found.largest, found.largest_residual), (found.smallest, found.smallest_residual)):
        distance = (dense - value[:, None]).abs().min(1).values
        assert (distance <= residual + 1e-12 * (1 + dense[:, 0])).all()
    assert float(found.largest[0]) < float(dense[0, 0]), "one that is exact so early shows no bound"


def models() -> dict[str, Any]:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}

    def own(connection: str) -> NormsmithForCausalLM:
        model = NormsmithForCausalLM(preset_config("llama", **sizes, connection=connection))
        scramble(model)
        return model.eval()

    return {c: lambda c=c: own(c) for c in ("pre", "proj", "cay", "geo")} | {
        f: lambda f=f: tiny(f) for f in ("gpt2", "gemma2", "bert")
    }


@pytest.mark.parametrize("name", models())
def test_blocks_of_real_models_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Norms and attention say `.float()` and `dtype=torch.float32`; kept in float64 the comparison is exact.
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    model = models()[name]().double()
    blocks, positions = find_blocks(model, IDS), [0, 4, 8]
    found = block_jacobians(model, IDS, blocks, positions)
    calls: dict[Any, Any] = {}
    handles = [
        b.register_forward_pre_hook(lambda m, a, k: calls.update({m: (a, k)}), with_kwargs=True) for b in blocks.modules
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    for block, extreme in zip(blocks.modules, found, strict=True):
        args, kwargs = calls[block]
        kwargs = {k: v for k, v in kwargs.items() if k not in ("cache", "past_key_values")}
        for row, t in enumerate(positions):
            J = dense_jacobian(block, args, kwargs, t)
            values = torch.linalg.svdvals(J)
            # float32 inside attention's softmax and rotary embedding leaves about 1e-7
            assert float(extreme.largest[row]) == pytest.approx(float(values[0]), rel=1e-5)
            assert float(extreme.smallest[row]) == pytest.approx(float(values[-1]), rel=1e-3, abs=1e-6)
            assert float(values[0]) > 1.05 * float(values[1]) or float(values[0]) > 1.0


def dense_jacobian(block: Any, args: Any, kwargs: Any, t: int) -> Tensor:
    """∂h_out[t]/∂h_in[t], a row at a time."""
    h = args[0] if args else kwargs["hidden_states"]
    x = h[0, t].clone().requires_grad_()
    stream = h.clone()
    stream[0, t] = x
    out = block(stream, *args[1:], **kwargs) if args else block(**{**kwargs, "hidden_states": stream})
    y = (out[0] if isinstance(out, tuple) else out)[0, t]
    return torch.stack([torch.autograd.grad(y[i], x, retain_graph=True)[0] for i in range(len(y))])


def test_fewer_tokens_than_probes() -> None:
    model = tiny("gpt2")
    found = block_jacobians(model, IDS[:, :2], find_blocks(model, IDS), [0, 1, 5])
    assert all(e.largest.shape == (2,) for e in found)
