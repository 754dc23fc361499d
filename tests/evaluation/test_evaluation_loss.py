"""The validation loss is the mean over all windows, whatever the batches."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from normsmith.data import PackedWindows
from normsmith.evaluation import language_loss
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.tapered import TaperedNorm
from tests.conftest import scramble

WINDOWS = PackedWindows(np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8), 16, None, 11)


def small(**changes: object) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.1}
    model = NormsmithForCausalLM(preset_config("llama", **sizes, **changes))
    scramble(model)
    return model


@torch.no_grad()
def literal(model: NormsmithForCausalLM) -> float:
    """Mean over windows of the mean cross-entropy in nats of tokens 2 … T given those before them."""
    losses: list[float] = []
    for i in range(len(WINDOWS)):
        ids = WINDOWS[i]["input_ids"]
        logits = model(ids[None]).logits[0].double()
        losses.append(float(F.cross_entropy(logits[:-1], ids[1:])))
    assert max(losses) - min(losses) > 0.01, "windows that are alike could not show a wrong weighting"
    return sum(losses) / len(losses)


@pytest.mark.parametrize("batch_size", [1, 4, 11, 100])  # 4: the last batch has 3 windows
def test_equals_the_mean_by_hand(batch_size: int) -> None:
    model = small().eval()
    # The logits are float32; a few roundings per window.
    assert language_loss(model, WINDOWS, batch_size) == pytest.approx(literal(model), rel=1e-6)


def test_evaluates_the_model_that_will_be_shipped_and_collects_nothing() -> None:
    model = small(norm="tapered_rmsnorm").train()
    norms = [m for m in model.modules() if isinstance(m, TaperedNorm)]
    for norm in norms:
        norm.gate_eval.zero_()  # training still has g = 1
        norm.scale.fill_(0.7)
    loss = language_loss(model, WINDOWS, 4)
    assert all(norm.batches == 0 for norm in norms)
    assert all(p.grad is None for p in model.parameters())
    assert loss == pytest.approx(literal(model.eval()), rel=1e-6)
    for norm in norms:
        norm.gate_eval.fill_(1.0)
    assert loss != pytest.approx(literal(model), rel=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_keeps_the_mode_of_every_module(training: bool) -> None:
    model = small().train(training)
    model.model.layers[0].train(not training)  # a part that its owner froze, or did not
    modes = {name: m.training for name, m in model.named_modules()}
    language_loss(model, WINDOWS, 4)
    assert {name: m.training for name, m in model.named_modules()} == modes


def test_keeps_the_mode_when_the_forward_pass_fails() -> None:
    model = small().train()
    model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        language_loss(model, WINDOWS, 4)
    assert all(m.training for m in model.modules())
