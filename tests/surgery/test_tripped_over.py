"""What a first user tripped over: each was silent, and must not be again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

import normsmith as ns
from normsmith.errors import InputError, NotFoldableError, VerificationError
from normsmith.surgery.load import load_model
from tests.tiny import apart, output, scramble_all, tiny

SIZES = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def masked(name: str) -> Any:
    model: Any = {"bert": BertForMaskedLM, "roberta": RobertaForMaskedLM}[name](
        {"bert": BertConfig, "roberta": RobertaConfig}[name](**SIZES)
    )
    return scramble_all(model.eval())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tied_head_whose_bias_is_tied_as_well_reloads(name: str, tmp_path: Path) -> None:
    model = masked(name)
    before = output(model)
    ns.fold_(model, "affine")
    model.save_pretrained(tmp_path / "memory")
    assert apart(output(load_model(tmp_path / "memory", trust_remote_code=True)), before) <= 1e-5
    masked(name).save_pretrained(tmp_path / "stock")
    report = ns.fold_checkpoint(tmp_path / "stock", tmp_path / "disk")
    assert any("untying it would need" in why for _, why in report.kept)
    assert apart(output(load_model(tmp_path / "disk")), before) <= 1e-5


def test_a_swap_before_a_fold_cannot_be_taken_back() -> None:
    model = tiny("llama")
    ns.swap_norms_(model, "rmsnorm", where="pre")
    ns.fold_(model, "affine")
    with pytest.raises(InputError, match="folded since"):
        ns.restore_(model)
    outer = tiny("llama")
    ns.swap_norms_(outer.model, "rmsnorm", where="pre")
    ns.fold_(outer, "affine")
    with pytest.raises(InputError, match="folded since"):
        ns.restore_(outer.model)


class Sometimes(nn.Module):
    """A head that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.main, self.aux = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return (self.main(h), self.aux(h)) if self.training else self.main(h)


def test_modules_that_did_not_run_are_named() -> None:
    model, x = Sometimes(), torch.randn(2, 5, 16)
    assert ns.find_norms(model, x).unseen == ("aux",)
    with pytest.raises(NotFoldableError, match="aux did not run on the example"):
        ns.fold_(model, "affine", example=x, strict=True)
    report = ns.fold_(model, "affine", example=x)
    assert report.unseen == ("aux",)
    assert "not adapted if they read a folded norm: aux" in str(report)
    for family in ("gpt2", "llama", "bert", "vit"):
        assert ns.find_norms(tiny(family)).unseen == ()


def test_changed_hidden_states_are_said() -> None:
    assert "hidden states after model.norm are now without what was folded" in str(ns.fold_(tiny("llama"), "affine"))
    assert "hidden states" not in str(ns.fold_(tiny("llama"), "affine", where="pre"))


def test_outputs_that_are_not_finite_verify_nothing() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(VerificationError, match="not finite before any change"):
        ns.fold_(model, "affine")


def test_a_half_loaded_model_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj.to("meta")
    with pytest.raises(InputError, match=r"q_proj.weight has no values .*load the whole model first"):
        ns.fold_(model, "affine")


def test_other_weights_beside_a_checkpoint_are_left_out_and_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny("llama").save_pretrained(source)
    (source / "onnx").mkdir()
    (source / "onnx/config.txt").touch()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "notes.txt"):
        (source / name).write_bytes(b"old")
    report = ns.fold_checkpoint(source, tmp_path / "out")
    assert report.left_out == ("consolidated.safetensors", "onnx/model.onnx", "pytorch_model.bin")
    assert "pytorch_model.bin holds the model as it was and is left out" in str(report)
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"notes.txt", "onnx/config.txt", "model.safetensors"} <= files
    assert not files & set(report.left_out)


class Wrapper(nn.Module):
    """As adapters wrap a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base, self.config = model, model.config

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.base(input_ids=input_ids).logits


def test_wrappers_fold_and_what_is_inside_saves_itself(tmp_path: Path) -> None:
    assert len(ns.fold_(Wrapper(tiny("llama")), "affine").absorbed) == 5
    model = tiny("llama")
    ns.swap_norms_(Wrapper(model), "dyt")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert apart(output(load_model(tmp_path, trust_remote_code=True)), output(model)) <= 1e-6


def test_an_example_that_does_not_run_is_an_input_error() -> None:
    for example in (torch.randn(2, 3), {"foo": torch.zeros(1)}):
        with pytest.raises(InputError, match="LlamaForCausalLM does not run on the example"):
            ns.find_norms(tiny("llama"), example)


def test_a_part_of_a_checkpoint_can_be_folded(tmp_path: Path) -> None:
    model = tiny("gpt2")  # whose final norm's shift would need a bias that the class does not have
    model.save_pretrained(tmp_path / "in")
    report = ns.fold_checkpoint(tmp_path / "in", tmp_path / "out", where="pre")
    assert len(report.absorbed) == 4
    assert report.kept == ()
    assert apart(output(load_model(tmp_path / "out")), output(model)) <= 1e-5
    with pytest.raises(InputError, match="no site matches where='post'"):
        ns.fold_checkpoint(tmp_path / "in", tmp_path / "out2", where="post")
    assert not (tmp_path / "out2").exists()
