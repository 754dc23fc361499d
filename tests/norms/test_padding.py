"""What norms that pool over a sequence know of padding, and that no causal model takes one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.models import NormsmithModel, preset_config
from normsmith.norms.autonorm import AutoNorm
from normsmith.norms.padding import watch_padding
from normsmith.surgery.load import load_model
from normsmith.surgery.native import save_native
from tests.conftest import scramble
from tests.tiny import apart, example, tiny


class Attends(nn.Module):
    """Token ids under another name than transformers', or features; a model of nobody's library."""

    def __init__(self, causal: bool, sees: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.last = nn.Embedding(40, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.project, self.causal, self.sees = nn.Linear(16, 16), causal, sees

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        h = idx if idx.is_floating_point() else self.embed(idx)
        q = self.project(self.norm(h))
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=self.causal) if self.sees else q
        return self.last(h + mixed)


@pytest.mark.parametrize("as_example", [lambda x: x, lambda x: (x,), lambda x: {"idx": x}])
@pytest.mark.parametrize("features", [False, True])
def test_a_causal_model_of_ones_own_refuses_it_by_its_example(
    features: bool, as_example: Callable[[torch.Tensor], Any]
) -> None:
    pooled = {"kind": "autonorm", "pool": "sequence"}
    example = as_example(torch.randn(2, 9, 16) if features else torch.randint(40, (2, 9)))
    with pytest.raises(InputError, match=r"Attends is causal.*pool='token'"):
        ns.swap_norms_(Attends(causal=True), pooled, example=example)
    for model in (Attends(causal=False), Attends(causal=False, sees=False)):
        assert len(ns.swap_norms_(model, pooled, example=example).swapped) == 2


def trunk(norm: Any) -> NormsmithModel:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = NormsmithModel(preset_config("gpt", **sizes, causal=False, norm=norm))
    scramble(model, 0.7)
    return model.eval()


@pytest.mark.parametrize("kind", ["autonorm", "film", "adaln_self"])
def test_padding_does_not_change_outputs(kind: str) -> None:
    model, ids = trunk({"kind": kind, "pool": "sequence"}), torch.randint(40, (2, 5))
    padded = torch.cat((ids, torch.randint(40, (2, 4))), dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4] * 2)
    with torch.no_grad():
        alone, beside = model(ids).last_hidden_state, model(padded, attention_mask=mask).last_hidden_state
        blind = model(padded).last_hidden_state
    torch.testing.assert_close(beside[:, :5], alone, rtol=1e-4, atol=1e-5)
    assert apart(blind[:, :5], alone) > 1e-2


def test_a_sequence_of_padding_alone_stays_finite() -> None:
    model, ids = trunk({"kind": "autonorm", "pool": "sequence"}).train(), torch.randint(40, (2, 5))
    y = model(ids, attention_mask=torch.tensor([[1] * 5, [0] * 5])).last_hidden_state
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    gate = next(m for m in model.modules() if isinstance(m, AutoNorm))
    both = gate.entropy_sum.clone()
    model.zero_grad()
    for buffer in (gate.weight_sum, gate.entropy_sum, gate.batches):
        buffer.zero_()
    model(ids[:1]).last_hidden_state.sum().backward()
    torch.testing.assert_close(gate.entropy_sum, both)  # the other sample said nothing


def test_a_foreign_encoder_tells_its_norms_what_is_padding() -> None:
    model = tiny("bert")
    ns.swap_norms_(model, {"kind": "autonorm", "pool": "sequence"}, example=example(model))
    scramble(model, 0.7)
    ids, mask = example(model)["input_ids"], torch.ones(2, 12, dtype=torch.long)
    mask[:, 9:] = 0
    with torch.no_grad():
        alone, beside = model(ids[:, :9])[0], model(ids, attention_mask=mask)[0]
        copied = copy.deepcopy(model)(ids, attention_mask=mask)[0]
    torch.testing.assert_close(beside[:, :9], alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(copied, beside)
    watch_padding(model)
    assert len(model._forward_pre_hooks) == 1, "asked twice, watched once"


def test_a_mask_of_an_earlier_pass_does_not_count_for_the_model_inside(tmp_path: Path) -> None:
    model = tiny("bert")
    ns.swap_norms_(model, {"kind": "autonorm", "pool": "sequence"}, example=example(model))
    scramble(model, 0.7)
    save_native(model, tmp_path)
    ids, mask = example(model)["input_ids"], torch.ones(2, 12, dtype=torch.long)
    mask[:, 9:] = 0
    for each in (model, load_model(tmp_path, trust_remote_code=True)):
        with torch.no_grad():
            plain, short = each.bert(ids)[0], each.bert(ids[:, :9])[0]
            each(ids, attention_mask=mask)
            assert torch.equal(each.bert(ids)[0], plain)
            masked = each.bert(ids, attention_mask=mask)[0]
        torch.testing.assert_close(masked[:, :9], short, rtol=1e-4, atol=1e-4)
