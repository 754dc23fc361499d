"""The audit's numbers are those of the definition, and its order is the one they ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normsmith.bench import bench_removal
from normsmith.diagnostics import audit_removal
from normsmith.errors import InputError
from normsmith.surgery import find_norms
from tests.tiny import tiny

WINDOWS = [torch.randint(3, 60, (3, 10), generator=torch.Generator().manual_seed(i)) for i in range(4)]


def inputs_of(model: Any, name: str) -> Tensor:
    """Everything that one norm saw, (12, 10, d)."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for window in WINDOWS:
            model(input_ids=window)
    handle.remove()
    return torch.cat(seen).double()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_numbers_are_those_of_the_definition(family: str) -> None:
    model = tiny(family)
    sites = find_norms(model)
    found = {r.name: r for r in audit_removal(model, WINDOWS, sites)}
    for site in sites:
        if site.role == "qk":
            continue
        x, r = inputs_of(model, site.name), found[site.name]
        x = x - x.mean(-1, keepdim=True) if site.facts.centred else x
        s = (x.square().mean(-1) + (site.facts.eps or 0)).sqrt()
        scaled = x * site.facts.scale(site.module)
        y = scaled / s[..., None]
        solution = torch.linalg.lstsq(scaled.flatten()[:, None], y.flatten()[:, None]).solution
        assert r.scale == pytest.approx(float(solution), rel=1e-6)
        assert r.residual == pytest.approx(float((y - solution * scaled).norm() / y.norm()), rel=1e-5)
        assert r.variation == pytest.approx(float(s.std(correction=0) / s.mean()), rel=1e-6)
        assert r.first == pytest.approx(float(s[:, 0].mean() / s[:, 1:].mean()), rel=1e-6)
        assert r.outliers == pytest.approx(float((s > 3 * s.median()).double().mean()))


def test_the_order_is_the_easiest_first_and_the_final_norm_last() -> None:
    model = tiny("gemma2")
    found = audit_removal(model, WINDOWS, find_norms(model))
    removable = sorted((r for r in found if r.order is not None), key=lambda r: r.order or 0)
    assert [r.order for r in removable] == list(range(1, len(removable) + 1))
    assert removable[-1].role == "final"
    residuals = [r.residual for r in removable[:-1]]
    assert residuals == sorted(residuals)
    assert {r.role for r in found if r.order is None} == {"sandwich"}
    assert all(r.blocked for r in found if r.order is None)


def test_a_norm_whose_tokens_all_have_one_scale_is_explained_whole_and_an_outlier_is_seen() -> None:
    model = tiny("llama")
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.div_(table.norm(dim=-1, keepdim=True))
    site = find_norms(model)[0]
    assert site.name == "model.layers.0.input_layernorm"
    before = {r.name: r for r in audit_removal(model, WINDOWS, find_norms(model))}[site.name]
    assert before.residual < 1e-6
    assert before.outliers == 0
    with torch.no_grad():
        table[5] *= 20
    after = {r.name: r for r in audit_removal(model, WINDOWS, find_norms(model))}[site.name]
    share = sum(int((w == 5).sum()) for w in WINDOWS) / sum(w.numel() for w in WINDOWS)
    assert after.outliers == pytest.approx(share)
    assert after.residual > 0.1


def test_the_model_is_left_as_it_was() -> None:
    model = tiny("llama").train()
    model.model.layers[0].eval()
    audit_removal(model, WINDOWS[:1], find_norms(model))
    assert model.training
    assert not model.model.layers[0].training
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(InputError, match="no LayerNorm or RMSNorm of the model ran"):
        audit_removal(model, [], find_norms(model))


def test_what_removal_saves_is_timed_on_a_copy() -> None:
    model = tiny("llama")
    before = [type(m) for m in model.modules()]
    times = bench_removal(model, find_norms(model), rounds=3)
    assert set(times) == {"with norms", "without"}
    assert [type(m) for m in model.modules()] == before
