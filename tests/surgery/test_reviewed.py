"""What a reading of the code found: each gave another function, or an error of Python's own, unseen by other tests."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

import normsmith as ns
from normsmith.errors import InputError, NotFoldableError
from normsmith.norms.fakeln import FakeNorm
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules.controller import watching_controllers
from normsmith.surgery.export import export_model
from normsmith.surgery.load import load_model
from normsmith.surgery.verify import difference, outputs
from tests.tiny import same_state, scramble_all, state, tiny

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
SIDES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 4))}
SCHEDULES: dict[str, tuple[Any, type[nn.Module]]] = {
    "taper": (lambda m: ns.taper_(m, {"scale_loss": 0.0}, example=X, steps=20), TaperedNorm),
    "one by one": (lambda m: ns.remove_one_by_one_(m, {"scale_loss": 0.0}, example=X), FakeNorm),
}


class ShiftedRMS(nn.Module):
    """An RMSNorm that adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias


class Net(nn.Module):
    """Two pre-norm layers and a head."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.n1, self.n2, self.last = first, second, nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.n1(x)).relu()
        x = x + self.b(self.n2(x)).relu()
        return self.head(self.last(x))


def seq2seq() -> Any:
    config = transformers.M2M100Config(
        vocab_size=64, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **SIDES
    )
    config.decoder_start_token_id = 2
    return scramble_all(transformers.M2M100ForConditionalGeneration(config).eval())


def test_a_head_whose_class_ties_more_than_it_keeps_its_norm(tmp_path: Path) -> None:
    model, example = seq2seq(), {"input_ids": IDS, "decoder_input_ids": IDS}
    before = outputs(model, example)
    report = ns.fold_(model, "affine")
    assert "would also untie model." in dict(report.kept)["model.decoder.layer_norm"]
    assert len(report.absorbed) == 5
    model.save_pretrained(tmp_path)
    assert difference(before, outputs(load_model(tmp_path, trust_remote_code=True), example)) <= 1e-5


class Wrapper(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).logits


def test_a_head_that_is_untied_inside_a_wrapper_stays_so() -> None:
    model = Wrapper(tiny("gemma"))
    before = outputs(model, IDS)
    assert ns.fold_(model, "affine", example=IDS).untied
    assert model.inner.config.tie_word_embeddings is False
    model.inner.tie_weights()
    assert difference(before, outputs(model, IDS)) <= 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # what peft asks for
def test_a_shift_is_not_put_where_merging_adapters_loses_it() -> None:
    options: dict[str, Any] = {"target_modules": ["c_attn", "c_fc"], "init_lora_weights": False, "fan_in_fan_out": True}
    model: Any = peft.get_peft_model(tiny("gpt2"), peft.LoraConfig(r=4, **options)).requires_grad_(False).eval()
    before = outputs(model, {"input_ids": IDS})
    report = ns.fold_(model, "affine")
    assert "is part of an adapter" in dict(report.kept)["base_model.model.transformer.h.0.ln_1"]
    assert difference(before, outputs(model.merge_and_unload(), {"input_ids": IDS})) <= 1e-5


def test_an_rmsnorm_with_a_shift_is_not_taken_for_one_without() -> None:
    model = Net(ShiftedRMS(), ShiftedRMS())
    before = state(model)
    for make, _ in SCHEDULES.values():
        with pytest.raises(InputError, match="n1: ShiftedRMS is an RMSNorm that also adds bias"):
            make(model)
    assert same_state(model, before)
    # A swap keeps the shift where the new norm has one, and says how far off it is where it has none.
    for kind, least, most in (("layernorm", 0.0, 0.3), ("rmsnorm", 0.3, 2.0)):
        report = ns.swap_norms_(Net(ShiftedRMS(), ShiftedRMS()), kind, where="n1", example=X)
        assert least < (report.swapped[0][3] or 0.0) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_eps_that_torch_takes_where_none_is_said(dtype: torch.dtype) -> None:
    model = Net(nn.RMSNorm(16), nn.RMSNorm(16)).to(dtype)
    small = (3e-2 * X).to(dtype)
    report = ns.swap_norms_(model, "rmsnorm", where="n*", example=small)
    assert [row[3] for row in report.swapped] == pytest.approx([0, 0], abs=1e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("how", list(SCHEDULES))
def test_a_norm_that_stands_in_two_places_is_removed_in_both(how: str) -> None:
    make, kind = SCHEDULES[how]
    shared = nn.LayerNorm(16)
    model = Net(shared, shared)
    make(model)
    assert model.n1 is model.n2
    assert isinstance(model.n1, kind)


@pytest.mark.parametrize(
    "fails",
    [
        lambda m: ns.taper_(m, {"order": ("n1",)}, example=X, steps=20),
        lambda m: ns.remove_one_by_one_(m, {"start_step": 10, "gaps": (1, 1, 1)}, example=X, steps=5),
    ],
)
def test_a_schedule_that_cannot_be_made_leaves_the_earlier_one(fails: Callable[[nn.Module], Any]) -> None:
    model = Net(nn.LayerNorm(16), nn.LayerNorm(16))
    earlier = ns.taper_(model, {"scale_loss": 0.1}, example=X, steps=20)
    with pytest.raises(InputError):
        fails(model)
    assert watching_controllers(model) == [earlier]
    later = ns.taper_(model, example=X, steps=20)
    assert watching_controllers(model) == [later]


@pytest.mark.parametrize("how", list(SCHEDULES))
def test_a_swap_before_a_schedule_cannot_be_taken_back(how: str) -> None:
    model = Net(nn.LayerNorm(16), nn.LayerNorm(16))
    ns.swap_norms_(model, "rmsnorm", where="n*", example=X)
    SCHEDULES[how][0](model)
    with pytest.raises(InputError, match="or tapered or folded since"):
        ns.restore_(model)


def test_a_norm_alone_cannot_be_replaced() -> None:
    alone = nn.LayerNorm(16)
    with pytest.raises(InputError, match=r"the model is itself a norm \(LayerNorm\).*give the module that holds it"):
        ns.swap_norms_(alone, "dyt", example=X)
    assert not list(alone.children())


def t5() -> Any:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    config.decoder_start_token_id = 0
    return scramble_all(transformers.T5ForConditionalGeneration(config).eval())


def test_removal_one_by_one_of_models_that_take_more_than_ids() -> None:
    model = t5()
    controller = ns.remove_one_by_one_(model, {"scale_loss": 0.0})
    assert all(isinstance(model.get_submodule(name), FakeNorm) for name in controller.sites)


def test_generation_settings_survive_every_format(tmp_path: Path) -> None:
    model = tiny("llama")
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 7], temperature=0.6, do_sample=True)
    ns.taper_(model, {"placement": "all", "scale_loss": 0.0}, steps=10)
    for norm in model.modules():
        if isinstance(norm, TaperedNorm):
            norm.gate.zero_()
            norm.gate_eval.zero_()
    for name in ("native", "stock", "onnx"):
        export_model(model, tmp_path / name, name)  # pyright: ignore[reportArgumentType]
        kept = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (kept["eos_token_id"], kept["temperature"]) == ([2, 7], 0.6)
        assert (tmp_path / name / "config.json").is_file()


def test_heads_that_the_class_does_not_have_are_left_out_with_a_word(tmp_path: Path) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertForPreTraining(transformers.BertConfig(num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BertForMaskedLM"]}  # as bert-base-uncased has it
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"no place for bert.pooler.dense, cls.seq_relationship"):
        assert type(load_model(tmp_path)) is transformers.BertForMaskedLM
    path.write_text(json.dumps(config | {"num_hidden_layers": 1}))  # a shorter model is another one
    with pytest.raises(InputError, match=r"do not match \(\d+ tensors\); first difference: bert.encoder.layer.1"):
        load_model(tmp_path)


def test_a_read_only_checkpoint_can_be_folded(tmp_path: Path) -> None:
    tiny("gemma").save_pretrained(tmp_path / "in")
    for path in (tmp_path / "in").iterdir():
        path.chmod(0o444)
    ns.fold_checkpoint(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").stat().st_mode & stat.S_IWUSR


def test_what_did_not_run_in_a_checkpoint_is_said(tmp_path: Path) -> None:
    tiny("gpt2", add_cross_attention=True).save_pretrained(tmp_path / "in")
    report = ns.fold_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "transformer.h.0.crossattention.c_attn" in report.unseen
    assert "did not run on the example" in str(report)
    with pytest.raises(NotFoldableError, match="did not run on the example"):
        ns.fold_checkpoint(tmp_path / "in", tmp_path / "strict", where="*.ln_2", strict=True)
    assert not (tmp_path / "strict").exists()


def test_a_model_that_is_sharded_is_refused() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Net(nn.LayerNorm(16), nn.LayerNorm(16))
        fully_shard(model.a)
        for change in (lambda: ns.swap_norms_(model, "dyt", example=X), lambda: SCHEDULES["taper"][0](model)):
            with pytest.raises(InputError, match="inside a fully_shard"):
                change()
    finally:
        distributed.destroy_process_group()
