"""TransformerLens 372 and PR 489: folding ignored RMSNorms and the gate matrix of gated MLPs.

Kind of fault: a forgotten reader, and the recipe of LayerNorm (centring) used for RMSNorm. Every reader gets the scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normsmith.errors import VerificationError
from normsmith.surgery import find_norms, fold, fold_
from tests.tiny import output, same_state, state, tiny

READERS = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"},
    "gemma": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"},
    "qwen3": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"},
    "gemma2": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"},
    "gpt2": {"c_attn", "c_fc", "lm_head"},
    "gpt_neox": {"query_key_value", "dense_h_to_4h", "lm_head"},
    "opt": {"q_proj", "k_proj", "v_proj", "fc1", "lm_head"},
}


@pytest.mark.usefixtures("wide_statistics")
@pytest.mark.parametrize("family", READERS)
def test_every_reader_is_scaled_and_nothing_else(family: str) -> None:
    model = tiny(family).double()
    before, expected = state(model), output(model)
    scales = {s.name: (s.facts.scale(s.module), s.consumers) for s in find_norms(model) if not s.blocked}
    fold_(model, "affine", verify=False)
    after = state(model)
    changed = {n.rpartition(".")[0].rpartition(".")[2] for n, t in before.items() if not torch.equal(t, after[n])}
    assert changed - {name.rpartition(".")[2] for name in scales} == READERS[family]
    for scale, consumers in scales.values():
        for reader in consumers:  # W·diag(scale), and nothing centred
            name = reader.weight if reader.module != "lm_head" else "lm_head.weight"
            shape = (-1, 1) if reader.axis == 0 else (1, -1)
            torch.testing.assert_close(after[name], before[name] * scale.view(shape), rtol=1e-12, atol=0)
    torch.testing.assert_close(output(model), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("forgotten", range(4))
def test_a_forgotten_reader_is_noticed(family: str, forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    before, absorb, calls = state(model), fold.into_reader, []

    def forgetful(*args: Any) -> None:
        calls.append(args)
        if len(calls) != forgotten + 1:
            absorb(*args)

    monkeypatch.setattr(fold, "into_reader", forgetful)
    with pytest.raises(VerificationError, match="the model is as it was"):
        fold_(model, "affine")
    assert len(calls) > forgotten
    assert same_state(model, before)
