"""QuaRot 30: the outputs of OPT changed after its LayerNorms were fused.

Kind of fault: the shift β and the subtraction of the mean are lost. Shifts become biases, made where there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import fold_, taper_
from tests.tiny import is_norm, output, tiny

CASES = [
    ("opt", {}),
    ("opt", {"enable_bias": False}),
    ("gpt2", {}),
    ("bloom", {}),
    ("gpt_neox", {"attention_bias": False}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_shifts_become_biases(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, **changes).double()
    before = output(model)
    biases = sum(n.endswith("bias") for n, _ in model.named_parameters())
    report = fold_(model, "affine")
    torch.testing.assert_close(output(model), before, rtol=1e-10, atol=1e-10)
    for name in report.absorbed:
        norm = model.get_submodule(name)
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
    made = sum(n.endswith("bias") for n, _ in model.named_parameters()) - biases
    assert made == {"opt": 9 if changes else 1, "gpt2": 1, "bloom": 1, "gpt_neox": 3 if changes else 1}[family]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_full_folding_carries_the_mean_and_the_shift(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, **changes).double()
    taper_(model, TaperConfig(placement="all", scale_loss=0), steps=100).close()
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.6)
        torch.nn.init.normal_(norm.gamma_tilde)
    before = output(model)
    fold_(model)
    assert sum(is_norm(m) for m in model.modules()) == (1 if family == "bloom" else 0)  # the one on the embeddings
    torch.testing.assert_close(output(model), before, rtol=1e-9, atol=1e-9)
