"""Folding on disk: the same bits as in memory, everything else as it was, and nothing half done."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from normsmith.errors import InputError, NotFoldableError
from normsmith.surgery import fold_, fold_checkpoint
from normsmith.surgery.stream import multiply_
from tests.surgery.checkpoints import (
    FAMILIES,
    IDS,
    INDEX,
    LLAMA,
    SIZES,
    contents,
    error,
    exact,
    load,
    make,
    raw,
    stored,
)
from tests.tiny import scramble_all

# -- the result


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_folded_checkpoint_is_the_folded_model(family: str, shard: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make(family), shard)
    assert len(list(source.glob("*.safetensors"))) == 1 if shard == "5GB" else (source / INDEX).exists()
    before = contents(source)
    report = fold_checkpoint(source, tmp_path / "out")
    assert contents(source) == before
    assert [name for name, _ in report.kept] == FAMILIES[family][2]
    old, new = load(source), load(tmp_path / "out")
    assert error(exact(new), exact(old)) <= 1e-6
    fold_(old, "affine", where=list(report.absorbed))
    here, there = old.state_dict(), load(tmp_path / "out").state_dict()
    for name, tensor in there.items():
        if name.endswith("bias"):  # W·shift, summed up in another order
            torch.testing.assert_close(tensor, here[name], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(tensor, here[name]), name
    for name in report.absorbed:
        gain = there[f"{name}.weight"] + (family == "gemma2")
        assert torch.equal(gain, torch.ones_like(gain))
        assert not there.get(f"{name}.bias", torch.zeros(())).any()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make(family, dtype))
    report = fold_checkpoint(source, tmp_path / "out")
    old, new = load(source), load(tmp_path / "out")
    assert new.dtype == dtype
    rounding = torch.finfo(dtype).eps
    # Gemma computes the whole norm in float32, even in float64.
    assert error(exact(new), exact(old)) <= max(30 * rounding, 1e-6 if family == "gemma2" else 1e-12)
    fold_(old, "affine", where=list(report.absorbed), verify=False)
    for name, tensor in new.state_dict().items():
        allowed = rounding if name.endswith("bias") else 0  # W·shift is summed up in another order
        torch.testing.assert_close(tensor, old.state_dict()[name], rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_fast_product_is_the_float64_product_rounded_once(dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 4096) * torch.logspace(-3, 1, 4096)).to(dtype)
    narrow = (1 + torch.randn(4096)).to(dtype).double()
    for gain in (narrow, narrow + 1e-9):
        for axis, w in ((1, weight), (0, weight.T.contiguous())):
            product = w.double() * gain.reshape((-1, 1) if axis == 0 else (1, -1))
            result = w.clone()
            multiply_(result, gain, axis)
            assert torch.equal(result, product.to(dtype))
            # Rounded once: nothing of this dtype is nearer to the exact product. (torch rounds a float64 to a half
            # by way of float32, so for other gains that holds up to ties.)
            for neighbour in (math.inf, -math.inf) if gain is narrow else ():
                other = torch.nextafter(result, torch.tensor(neighbour, dtype=dtype)).double()
                assert ((result.double() - product).abs() <= (other - product).abs()).all()


def test_everything_else_is_as_it_was(llama: Path, tmp_path: Path) -> None:
    report = fold_checkpoint(llama, tmp_path / "out")
    before, after = contents(llama), contents(tmp_path / "out")
    assert after.pop(".normsmith") == b""
    assert after.keys() == before.keys()
    shards = {name for name in before if name.endswith(".safetensors")}
    assert set(report.files) == shards
    assert len(shards) > 3
    for name in before:
        if name in shards:
            length = 8 + int.from_bytes(before[name][:8], "little")
            assert after[name][:length] == before[name][:length]  # order, dtypes, shapes and metadata
            assert len(after[name]) == len(before[name])
            with safe_open(str(tmp_path / "out" / name), "pt") as file:
                assert file.metadata() == {"format": "pt"}
        else:
            assert after[name] == before[name], name
    changed = {name for name, tensor in raw(llama).items() if raw(tmp_path / "out")[name] != tensor}
    readers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert changed == {n for n in raw(llama) if "norm" in n or n == "lm_head.weight" or n.split(".")[-2] in readers}
    assert report.written == sum(len(data) for _, _, data in raw(llama).values())


def test_small_blocks_and_experts_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks shorter than a row of the first axis, and blocks that end inside of one; fused experts as stored today."""
    model = make("mixtral")
    stored(tmp_path / "model", model)
    fused = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for old in (tmp_path / "model").glob("model*"):
        old.unlink()
    save_file(fused, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    fold_checkpoint(tmp_path / "model", tmp_path / "whole")
    monkeypatch.setattr("normsmith.surgery.stream._BLOCK", 416)
    fold_checkpoint(tmp_path / "model", tmp_path / "blocks")
    assert raw(tmp_path / "blocks") == raw(tmp_path / "whole")
    assert error(exact(load(tmp_path / "whole")), exact(model)) <= 1e-6
    source = stored(tmp_path / "gpt2", make("gpt2"))  # its weights lie the other way round
    fold_checkpoint(source, tmp_path / "gpt2-blocks")
    assert error(exact(load(tmp_path / "gpt2-blocks")), exact(load(source))) <= 1e-6


def test_names_that_loading_changes(tmp_path: Path) -> None:
    """GPT-2 on the hub is stored as the model without its head, so without `transformer.`."""
    model = make("gpt2")
    stored(tmp_path / "model", model, "5GB")
    path = tmp_path / "model/model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril().to(torch.uint8)  # a mask that old versions stored
    save_file(tensors, path, metadata={"format": "pt"})
    report = fold_checkpoint(tmp_path / "model", tmp_path / "out")
    assert len(report.absorbed) == 4
    assert raw(tmp_path / "out").keys() == tensors.keys()
    assert error(exact(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")), exact(model)) <= 1e-6


def test_a_weight_that_loading_rearranges_keeps_its_norm(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**SIZES, image_size=16, patch_size=8, use_swiglu_ffn=True, mlp_ratio=2)
    model = scramble_all(transformers.Dinov2Model(config).eval())
    model.save_pretrained(tmp_path / "model")
    report = fold_checkpoint(tmp_path / "model", tmp_path / "out")
    assert report.absorbed == ("encoder.layer.0.norm1", "encoder.layer.1.norm1")
    assert "weights_in.weight, which transformers rearranges" in dict(report.kept)["encoder.layer.0.norm2"]
    pixels = torch.randn(2, 3, 16, 16)
    again = transformers.Dinov2Model.from_pretrained(tmp_path / "out")
    assert error(again(pixels)[0], model(pixels)[0]) <= 1e-5


def test_without_transformers_rules_names_must_be_equal(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert len(fold_checkpoint(llama, tmp_path / "out").absorbed) == 5


# -- tied heads


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_a_tied_head_gets_its_own_weight(shard: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make("tied llama"), shard)
    report = fold_checkpoint(source, tmp_path / "out")
    assert report.untied == ("lm_head.weight",)
    assert "lm_head.weight was tied" in str(report)
    before, after = raw(source), raw(tmp_path / "out")
    assert after["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]
    assert after.keys() - before.keys() == {"lm_head.weight"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "tie_word_embeddings": False}
    if shard == "20KB":
        old, new = (json.loads((folder / INDEX).read_text()) for folder in (source, tmp_path / "out"))
        place = new["weight_map"].pop("lm_head.weight")
        assert place == new["weight_map"]["model.embed_tokens.weight"]
        assert new["weight_map"] == old["weight_map"]
        assert new["metadata"]["total_size"] == old["metadata"]["total_size"] + 4 * 90 * 32
    assert fold_checkpoint(tmp_path / "out", tmp_path / "again").untied == ()


def test_a_head_that_must_stay_tied(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    config.decoder_start_token_id = 0
    model = scramble_all(transformers.T5ForConditionalGeneration(config).eval())
    model.save_pretrained(tmp_path / "t5")
    report = fold_checkpoint(tmp_path / "t5", tmp_path / "out")
    assert "untying them would change" in dict(report.kept)["decoder.final_layer_norm"]  # T5 always ties it
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    both = [m(input_ids=IDS, decoder_input_ids=IDS).logits for m in (again, model)]
    assert error(*both) <= 1e-5
    source = stored(tmp_path / "twice", make("tied llama"), "5GB")
    path = source / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    report = fold_checkpoint(source, tmp_path / "out", overwrite=True)
    assert "which the files hold more than once" in dict(report.kept)["model.norm"]
    assert error(exact(load(tmp_path / "out")), exact(load(source))) <= 1e-6


# -- arguments


def test_strict_and_reasons_and_ticks(tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make("gpt2"))
    before = contents(tmp_path)
    with pytest.raises(NotFoldableError, match=r"transformer.ln_f: lm_head has no bias in the files"):
        fold_checkpoint(source, tmp_path / "out", strict=True)
    assert contents(tmp_path) == before
    ticks: list[tuple[int, int]] = []
    report = fold_checkpoint(source, tmp_path / "out", tick=lambda done, total: ticks.append((done, total)))
    assert ticks == sorted(ticks)
    assert ticks[-1] == (report.written, report.written)
    assert "transformer.ln_f      kept: lm_head has no bias" in str(report)
    with pytest.raises(InputError, match="out: exists and is not empty"):
        fold_checkpoint(source, tmp_path / "out")
    assert fold_checkpoint(str(source), str(tmp_path / "out"), overwrite=True) == report


def test_nothing_to_fold(tmp_path: Path) -> None:
    config = transformers.OlmoConfig(**LLAMA)  # LayerNorms without gain and shift
    transformers.OlmoForCausalLM(config).save_pretrained(tmp_path / "olmo")
    with pytest.raises(InputError, match=r"olmo: nothing to fold, no gain or shift can be moved:\n(.*\n)*.*neither"):
        fold_checkpoint(tmp_path / "olmo", tmp_path / "out")
    assert not (tmp_path / "out").exists()
