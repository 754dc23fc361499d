"""GPTQModel PR 1550, QuaRot PR 17, AngelSlim PR 319: after fusing the final norm, models with tied embeddings went bad.

Kind of fault: storage that two modules share is rescaled for one of them. The head is untied first, and says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normsmith.errors import VerificationError
from normsmith.norms import norms
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, fold, fold_, taper_
from tests.tiny import output, same_state, state, tiny

TIED = ["gpt2", "opt", "bloom", "gemma", "gemma2", "bert"]


def model_of(family: str, **changes: Any) -> Any:
    model = tiny(family, **changes)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model


@pytest.mark.usefixtures("wide_statistics")
@pytest.mark.parametrize("family", TIED)
def test_embeddings_keep_their_bits(family: str) -> None:
    model = model_of(family).double()
    embeddings, before = model.get_input_embeddings().weight.clone(), output(model)
    assert fold_(model, "affine").untied
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert not model.config.tie_word_embeddings
    torch.testing.assert_close(output(model), before, rtol=1e-10, atol=1e-10)
    model.tie_weights()  # what from_pretrained does: must not tie again
    torch.testing.assert_close(output(model), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_full_folding_unties_too(family: str) -> None:
    model = model_of(family).double()
    taper_(model, TaperConfig(placement="all", scale_loss=0), steps=100).close()
    for module in model.modules():
        if isinstance(module, norms.get("tapered_rmsnorm").__mro__[1]):
            module.gate.zero_()
            module.gate_eval.zero_()
    embeddings, before = model.get_input_embeddings().weight.clone(), output(model)
    assert fold_(model).untied
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    torch.testing.assert_close(output(model), before, rtol=1e-10, atol=1e-10)


def test_nothing_is_untied_where_the_final_norm_stays() -> None:
    model = model_of("gpt2")
    assert not fold_(model, "affine", where="pre").untied
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.tie_word_embeddings


def test_rescaling_the_shared_weight_is_far_off_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2")
    before = state(model)
    assert {s.name: s.untie for s in find_norms(model)}["transformer.ln_f"] == ("lm_head",)
    monkeypatch.setattr(fold, "_untie", lambda *args: {})
    with pytest.raises(VerificationError, match="changed the outputs"):
        fold_(model, "affine", where="final")
    assert same_state(model, before)
