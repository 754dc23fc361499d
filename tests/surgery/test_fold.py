"""Folding: exact on scrambled norms, atomic, and honest about what it left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from normsmith.errors import InputError, NotFoldableError, VerificationError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms import Norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, fold, fold_, taper_
from tests.conftest import scramble

IDS = torch.randint(90, (2, 20), generator=torch.Generator().manual_seed(1))


def tapered(preset: str, placement: Any = "internal", gate: float = 0.0, **changes: Any) -> NormsmithForCausalLM:
    """A model whose tapered norms have random gains, shifts and scales and a gate at `gate`."""
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = NormsmithForCausalLM(preset_config(preset, **{**sizes, **changes}))
    taper_(model, TaperConfig(placement=placement, scale_loss=0), steps=100).close()
    scramble(model)
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.scale.fill_(0.5 + torch.rand(()).item())
        norm.gate.fill_(gate)
        norm.gate_eval.fill_(gate)
    return model.eval()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("placement", ["internal", "final", "all"])
@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_fold_is_exact_and_survives_saving(preset: str, placement: str, bias: bool, tmp_path: Path) -> None:
    model = tapered(preset, placement, use_bias=bias)
    embeddings = model.get_input_embeddings().weight.clone()
    exact = copy.deepcopy(model).double()(IDS).logits
    report = fold_(model)
    assert report.error is not None
    assert report.error <= 1e-5
    assert len(report.removed) == {"internal": 4, "final": 1, "all": 5}[placement]
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert report.untied == (placement != "internal")
    assert not any(isinstance(m, TaperedNorm | nn.Identity) for m in model.modules())
    relative = (model.double()(IDS).logits - exact).abs().max() / exact.abs().max()
    assert relative <= 1e-6
    model = model.float()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(IDS, **options)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert torch.equal(again.generate(IDS, **options), tokens)
    assert torch.equal(again.generate(IDS, use_cache=False, **options), tokens)
    assert again.num_parameters() == model.num_parameters()
    assert sum(isinstance(m, Norm) for m in again.modules()) == 5 - len(report.removed)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_float64_models_fold_to_float64(kind: str) -> None:
    model = tapered(kind, "all").double()
    before = model(IDS).logits
    assert fold_(model).error <= 1e-12  # pyright: ignore[reportOptionalOperand]
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-10, atol=1e-10)


def test_every_reader_is_scaled() -> None:
    model = tapered("llama")
    before = tensors(model)
    fold_(model, verify=False)
    after = tensors(model)
    changed = {
        n.rpartition(".")[0].rpartition(".")[2] for n in after if n in before and not torch.equal(before[n], after[n])
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def test_verification_catches_a_forgotten_reader_and_puts_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tapered("llama")
    before, logits = tensors(model), model(IDS).logits
    absorb = fold.into_reader
    skipped: list[bool] = []

    def forgetful(*args: Any) -> None:
        skipped.append(True)
        if len(skipped) != 3:
            absorb(*args)

    monkeypatch.setattr(fold, "into_reader", forgetful)
    with pytest.raises(VerificationError, match="the model is as it was"):
        fold_(model)
    after = tensors(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert torch.equal(model(IDS).logits, logits)


def test_an_interruption_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tapered("gpt", "all", use_bias=False)
    before, config = tensors(model), model.config.to_dict()

    def interrupted(*args: Any) -> float:
        assert len(list(model.named_modules())) < modules
        raise KeyboardInterrupt

    modules = len(list(model.named_modules()))
    monkeypatch.setattr(fold.Probe, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fold_(model)
    after = tensors(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert model.config.to_dict() == config
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_fold_keeps_modes_gradients_and_hooks() -> None:
    model = tapered("llama").train()
    model.model.layers[0].eval()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    calls: list[int] = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *a: calls.append(1))
    identities = {name: id(p) for name, p in model.named_parameters() if "norm" not in name}
    fold_(model)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
    assert not model.model.layers[0].self_attn.q_proj.weight.requires_grad
    assert {name: id(p) for name, p in model.named_parameters() if "norm" not in name} == identities
    calls.clear()
    model(IDS)
    assert calls == [1]


def test_an_unfinished_taper_is_refused_with_its_progress() -> None:
    with pytest.raises(InputError, match=r"the gate is 0.25, 75 % of the way to 0"):
        fold_(tapered("llama", gate=0.25))


def test_models_with_nothing_to_fold() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises(InputError, match="nothing to fold, no norm is linear"):
        fold_(NormsmithForCausalLM(preset_config("llama", **sizes)))
    with pytest.raises(InputError, match="no norm of a known kind"):
        fold_(NormsmithForCausalLM(preset_config("llama", norm="identity", **sizes)))
    with pytest.raises(InputError, match=r"takes a torch.nn.Module, got str"):
        find_norms("gpt2")  # pyright: ignore[reportArgumentType]


class Parallel(nn.Module):
    """One tapered norm read by a linear layer and by the residual sum, one read by a linear that reads x as well."""

    def __init__(self) -> None:
        super().__init__()
        from normsmith.norms import create_norm

        self.first, self.second, self.third = (create_norm("tapered_layernorm", 8) for _ in range(3))
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = y + self.a(y)
        x = x + self.b(self.second(x)) + self.b(x)
        return x + self.c(self.third(x).view(-1, 8)).view_as(x)


def test_sites_that_feed_something_else_are_kept_with_the_reason() -> None:
    model = Parallel().double()
    scramble(model)
    for name in ("first", "second", "third"):
        getattr(model, name).gate.zero_()
        getattr(model, name).gate_eval.zero_()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    before = model(x)
    with pytest.raises(
        NotFoldableError, match=r"first: also feeds the residual stream; second: b reads other tensors too"
    ):
        fold_(model, example=x, strict=True)
    report = fold_(model, example=x)
    assert report.removed == ("third",)
    assert [name for name, _ in report.kept] == ["first", "second"]
    assert model.c.bias is not None
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)


def test_the_report_and_the_sites_print_as_tables() -> None:
    model = tapered("llama", "all")
    text = str(find_norms(model))
    assert "model.norm" in text
    assert "q_proj, k_proj, v_proj" in text
    report = str(fold_(model))
    assert "model.layers.0.mlp_connection.norm  " in report
    assert "own weights now" in report
