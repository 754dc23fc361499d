"""Folding on disk: the same bits as in memory, everything else as it was, and nothing half done."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from normsmith.errors import InputError, NotFoldableError
from normsmith.surgery import CheckpointReport, fold_, fold_checkpoint
from normsmith.surgery.stream import multiply_
from tests.tiny import scramble_all

IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(2))
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LM = {"vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **_SIZES}
_LLAMA = {**_LM, "intermediate_size": 48, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_SANDWICH = [f"model.layers.{i}.post_{part}_layernorm" for i in (0, 1) for part in ("attention", "feedforward")]
INDEX = "model.safetensors.index.json"

# family → (model class, options of its configuration, sites that stay with all their gain and shift)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA, []),
    "tied llama": ("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}, []),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA, []),
    "gemma2": ("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}, _SANDWICH),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}, []),
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "eos_token_id": 2}, ["transformer.ln_f"]),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_LM, "intermediate_size": 48}, ["gpt_neox.final_layer_norm"]),
    "opt": (
        "OPTForCausalLM",
        {**_LM, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        ["model.decoder.final_layer_norm"],
    ),
}


def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    name, options, _ = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    return scramble_all(cls(cls.config_class(**{**options, **changes})).eval()).to(dtype)


def stored(folder: Path, model: Any, shard: str = "20KB") -> Path:
    """The model in a folder, with a tokenizer's file and a subfolder beside it."""
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "figures").mkdir()
    (folder / "figures/loss.txt").write_text("3.2")
    return folder


@pytest.fixture(scope="session")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("llama") / "model", make("llama"))


@pytest.fixture
def llama(_llama: Path, tmp_path: Path) -> Path:
    """A sharded Llama of this test's own."""
    return Path(shutil.copytree(_llama, tmp_path / "model"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every stored tensor: dtype, shape and bytes, read by the format's definition."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                start, stop = info["data_offsets"]
                found[name] = (info["dtype"], info["shape"], data[begin + start : begin + stop])
    return found


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def exact(model: Any) -> Tensor:
    """The logits in float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(twin.config, "_experts_implementation"):
        twin.set_experts_implementation("eager")
    return twin(IDS).logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


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
    config = transformers.Dinov2Config(**_SIZES, image_size=16, patch_size=8, use_swiglu_ffn=True, mlp_ratio=2)
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
    config = transformers.OlmoConfig(**_LLAMA)  # LayerNorms without gain and shift
    transformers.OlmoForCausalLM(config).save_pretrained(tmp_path / "olmo")
    with pytest.raises(InputError, match=r"olmo: nothing to fold, no gain or shift can be moved:\n(.*\n)*.*neither"):
        fold_checkpoint(tmp_path / "olmo", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- bad input


def _rewrite(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / shard_of(folder, "model.norm.weight")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def _drop(folder: Path) -> None:
    _rewrite(lambda tensors: tensors.pop("model.norm.weight"))(folder)
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def _pickle(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _cut(folder: Path, size: int) -> None:
    path = folder / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(changes))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "model: holds no model .config.json is missing"),
    "config": (lambda f: (f / "config.json").write_text("{"), "model/config.json: cannot be read"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "model/config.json: holds no JSON object"),
    "pickle": (_pickle, "model/pytorch_model.bin: is a pickle, which can run code .* only safetensors are read"),
    "nothing": (lambda f: [p.unlink() for p in f.glob("model*")], "model: holds no weights .model.safetensors or"),
    "truncated": (lambda f: _cut(f, -100), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "header": (lambda f: _cut(f, 20), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "empty": (lambda f: _cut(f, 0), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "no shard": (lambda f: (f / "model-00002-of-00005.safetensors").unlink(), "00002-of-00005.safetensors: .*missing"),
    "index": (lambda f: (f / INDEX).write_text("{"), f"model/{INDEX}: cannot be read"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), f"model/{INDEX}: has no weight_map"),
    "elsewhere": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({"x": "../x.safetensors"})),
        f"model/{INDEX}: x shall lie in '../x.safetensors', which is no name of a file in this folder",
    ),
    "entry": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop("model.norm.weight")),
        f"model/{INDEX}: has no entry for model.norm.weight, which lies in model-0000",
    ),
    "tensor": (
        _rewrite(lambda tensors: tensors.pop("model.norm.weight")),
        f"model/{INDEX}: says that model.norm.weight lies in model-0000.*, which holds no such tensor",
    ),
    "half": (_drop, "model: the files hold no model.norm.weight, which the model needs; the checkpoint is incomplete"),
    "shape": (
        _rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)})),
        r"safetensors: model.norm.weight has the shape \[31\], the configuration says \[32\]",
    ),
    "integers": (
        _rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        r"safetensors: model.norm.weight is quantised \(I8\)",
    ),
    "quantised": (_config(quantization_config={"bits": 4}), "model/config.json: the model is quantised"),
    "layers": (_config(num_hidden_layers=3), r"model: the files hold no model.layers.2\."),
    "width": (_config(hidden_size=64), "has the shape"),
    "wrong value": (_config(hidden_size="wide"), "model/config.json: no model can be made from it"),
    "family": (_config(model_type="llamma"), "model/config.json: no model can be made from it"),
    "class": (
        _config(architectures=["LamaForCausalLM"]),
        "transformers .* has no class 'LamaForCausalLM'",
    ),
    "no class": (_config(architectures=None), "model/config.json: names no architecture"),
    "no model": (_config(architectures=["AutoTokenizer"]), "has no class 'AutoTokenizer'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(llama)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=message):
        fold_checkpoint(llama, tmp_path / "out")
    assert contents(tmp_path) == before


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make("mixtral"), "5GB")
    path, name = source / "model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers.1.mlp.experts.gate_up_proj is put together .* incomplete"):
        fold_checkpoint(source, tmp_path / "out")


def test_a_product_that_float16_cannot_hold(tmp_path: Path) -> None:
    model = make("llama", torch.float16)
    model.model.norm.weight.data[3] = 300
    model.lm_head.weight.data[5, 3] = 300
    source = stored(tmp_path / "model", model)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"lm_head.weight times the norm's gain is too large for float16"):
        fold_checkpoint(source, tmp_path / "out")
    assert contents(tmp_path) == before


def test_an_output_that_would_harm_something(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    before = contents(tmp_path)
    for source, output, message in (
        ("absent", "out", "absent: no such folder"),
        ("model/config.json", "out", "config.json: is a file, expected a model folder"),
        ("model", "model", "lies inside the input"),
        ("model", "model/out", "lies inside the input"),
        ("model", ".", "holds the input"),
        ("model", "mine", "exists and is not empty|was not written by normsmith"),
    ):
        for overwrite in (False, True):
            with pytest.raises(InputError, match=message):
                fold_checkpoint(tmp_path / source, tmp_path / output, overwrite=overwrite)
    assert contents(tmp_path) == before


REMOTE = """
from pathlib import Path
from transformers import LlamaForCausalLM
Path({trace!r}).touch()
class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


def test_remote_code_runs_only_when_allowed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])
    (llama / "modeling_own.py").write_text(REMOTE.format(trace=str(tmp_path / "ran")))
    _config(auto_map={"AutoConfig": "modeling_own.OwnConfig"})(llama)  # a class of transformers' needs none of it
    assert len(fold_checkpoint(llama, tmp_path / "native").absorbed) == 5
    assert not (tmp_path / "ran").exists()
    auto = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    _config(architectures=["OwnForCausalLM"], auto_map=auto)(llama)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"OwnForCausalLM is defined by Python files .*trust_remote_code=True"):
        fold_checkpoint(llama, tmp_path / "out")
    assert contents(tmp_path) == before
    report = fold_checkpoint(llama, tmp_path / "out", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert len(report.absorbed) == 5
    assert (tmp_path / "out/modeling_own.py").exists()


# -- interruptions


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 64 kB; only root can make one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(llama: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        with pytest.raises(InputError, match=r"out: cannot be written \(No space left on device\)"):
            fold_checkpoint(llama, tmp_path / "disk/out")
        assert contents(tmp_path / "disk") == {}


def test_a_file_that_may_not_grow(llama: Path, tmp_path: Path) -> None:
    """Like a full disk, for those who cannot mount one: the kernel refuses to write more than 10 kB to a file."""
    resource = pytest.importorskip("resource")
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"out: cannot be written \(File too large\)"):
            fold_checkpoint(llama, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert contents(tmp_path) == before


SLOW = """
import signal, sys, time
from normsmith.surgery import fold_checkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell hands down an ignored one

def tick(done, total):
    print(done, flush=True)
    time.sleep(60)

fold_checkpoint(sys.argv[1], sys.argv[2], tick=tick)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_rerun_finishes_after_an_interruption(number: signal.Signals, llama: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    command = [sys.executable, "-c", SLOW, str(llama), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()  # in the middle of writing
    parts = list(tmp_path.glob(".out.*.part"))
    assert len(parts) == 1
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert contents(tmp_path) == before
    else:
        assert parts[0].exists()
    report = fold_checkpoint(llama, tmp_path / "out")
    assert isinstance(report, CheckpointReport)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert error(exact(load(tmp_path / "out")), exact(load(llama))) <= 1e-6


def test_another_process_that_is_still_writing_is_left_alone(llama: Path, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    part = tmp_path / f".out.{other.pid}.part"
    part.mkdir()
    try:
        fold_checkpoint(llama, tmp_path / "out")
        assert part.exists()
    finally:
        other.kill()
        other.wait()
    fold_checkpoint(llama, tmp_path / "out", overwrite=True)
    assert not part.exists()
