"""`fold`: the smaller model computes the same, and what cannot be folded leaves no trace."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from normsmith.norms import Norm
from normsmith.norms.tapered import TaperedNorm
from tests.cli.conftest import contents, normsmith

IDS = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(5))
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def test_the_folded_model_is_complete_and_computes_the_same(trained: Path, work: Path) -> None:
    result = normsmith("fold", trained / "taper", "-o", "folded")
    assert (result.code, result.err) == (0, "")
    assert "written to folded" in result.out
    assert result.out.count("folded\n") == 5  # four norms and the last line
    files = {path.name for path in (work / "folded").iterdir()}
    assert files == {
        ".normsmith",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tapered = AutoModelForCausalLM.from_pretrained(trained / "taper").eval()
    folded = AutoModelForCausalLM.from_pretrained("folded").eval()
    assert sum(isinstance(m, TaperedNorm) for m in tapered.modules()) == 4
    assert [name for name, m in folded.named_modules() if isinstance(m, Norm)] == ["model.norm"]
    logits = tapered(IDS).logits
    assert ((folded(IDS).logits - logits).abs().max() / logits.abs().max()) <= 1e-5
    tokens = tapered.generate(IDS, **OPTIONS)
    assert torch.equal(folded.generate(IDS, **OPTIONS), tokens)
    assert torch.equal(folded.generate(IDS, use_cache=False, **OPTIONS), tokens)
    text = "Line 3: the brown"
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (trained / "taper", "folded")]
    assert ids[0] == ids[1]


def test_json_and_overwrite(trained: Path, work: Path) -> None:
    for flags in ([], ["--overwrite"]):
        result = normsmith("fold", trained / "taper", "-o", "folded", "--json", *flags)
        assert (result.code, result.err) == (0, "")
        report = json.loads(result.out)
        assert report["output"] == "folded"
        assert len(report["removed"]) == 4
        assert report["error"] <= 1e-5
        (work / "folded/left-over").touch()
    assert contents(work / "folded").keys() >= {"left-over"}
    assert normsmith("fold", trained / "taper", "-o", "folded", "--overwrite").code == 0
    assert "left-over" not in contents(work / "folded")
    again = normsmith("fold", "folded", "-o", "twice")
    assert again.code == 2
    assert again.err.startswith("normsmith: nothing to fold, no norm is linear")
    assert not (work / "twice").exists()


def test_an_unfinished_taper_is_refused_with_how_far_it_is(trained: Path, work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "taper")
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.fill_(0.25)
        norm.gate_eval.fill_(0.25)
    model.save_pretrained("half")
    before = contents(work)
    normsmith("fold", "half", "-o", "folded").refused(r"the gate is 0\.25, 75 % of the way to 0")
    assert contents(work) == before


def test_a_run_that_stopped_inside_its_taper_is_refused(work: Path) -> None:
    changes = {"max_steps": 12, "save_every": 6}
    options = [part for key, value in changes.items() for part in ("--set", f"training.{key}={value}")]
    assert normsmith("train", "taper.yaml", "-o", "out", *options, "--set", "schedule.evaluate=current").code == 0
    normsmith("fold", "out/checkpoints/checkpoint-6", "-o", "folded").refused(r"the gate is 0\.\d+, \d+ % of the way")
    assert not (work / "folded").exists()
    assert normsmith("fold", "out/checkpoints/checkpoint-12", "-o", "folded").code == 0


def damaged(folder: Path, name: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    settings: dict[str, Any] = json.loads(config.read_text())
    if name == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif name == "header":
        weights.write_bytes(weights.read_bytes()[:20])
    elif name == "garbage":
        weights.write_bytes(b"no tensors here" * 100)
    elif name == "no weights":
        weights.unlink()
    elif name == "no config":
        config.unlink()
    elif name == "config":
        config.write_text("{")
    elif name == "config list":
        config.write_text("[1]")
    else:
        config.write_text(json.dumps({**settings, **json.loads(name)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", "m: the weights cannot be read"),
        ("header", "m: the weights cannot be read"),
        ("garbage", "m: the weights cannot be read"),
        ("no weights", "m: the weights cannot be read .*no file named model.safetensors"),
        ("no config", "m: holds no model .config.json is missing"),
        ("config", "m/config.json: cannot be read"),
        ("config list", "m/config.json: holds no JSON object"),
        ('{"model_type": "gpt2"}', "m/config.json: transformers .* has no class 'NormsmithForCausalLM'"),
        ('{"num_hidden_layers": 3}', r"weights and configuration do not match; first difference: model.layers.2\."),
        ('{"num_hidden_layers": 1}', r"weights and configuration do not match; first difference: model.layers.1\."),
        ('{"hidden_size": 64}', "weights and configuration do not match; first difference: model"),
        ('{"vocab_size": 301}', "do not match; first difference: lm_head.weight|model.embed_tokens.weight"),
        ('{"norm": "rmsnorm"}', r"weights and configuration do not match; first difference: .*norm"),
        ('{"norm": "rmsnrom"}', "m/config.json: unknown norm 'rmsnrom'; did you mean 'rmsnorm'"),
        ('{"norm": 5}', "m/config.json: norm: 5 is neither a name"),
        ('{"hidden_size": "wide"}', "m/config.json: holds a wrong value"),
        ('{"num_attention_heads": 5}', "m/config.json: hidden_size=32 is not divisible by num_attention_heads=5"),
    ],
)
def test_a_damaged_checkpoint(
    damage: str, message: str, trained: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    for handler in logging.getLogger("transformers").handlers:
        monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    shutil.copytree(trained / "taper", work / "m")
    damaged(work / "m", damage)
    before = contents(work)
    normsmith("fold", "m", "-o", "folded").refused(message)
    assert contents(work) == before
    assert logged == []  # no table of transformers' beside our sentence


def llama(folder: Path) -> LlamaForCausalLM:
    """A Llama in several shards, with gains far from 1."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def test_any_other_model_loses_its_gains(work: Path) -> None:
    model = llama(work / "llama")
    before = contents(work)
    result = normsmith("fold", "llama", "-o", "out")
    assert result.code == 0, result
    assert result.err.startswith("folding, %: 100/100 (")
    assert "model.norm                               gain and shift absorbed" in result.out
    assert result.out.endswith("MB\nwritten to out\n")
    assert {k: v for k, v in contents(work).items() if not k.startswith("out")} == before
    folded = AutoModelForCausalLM.from_pretrained("out").eval()
    ids = IDS % 50
    torch.testing.assert_close(folded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(folded.model.norm.weight, torch.ones(32))
    result = normsmith("fold", "llama", "-o", "out", "--overwrite", "--json", "--strict")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert (report["output"], len(report["absorbed"]), report["kept"], report["untied"]) == ("out", 3, [], [])


def test_another_model_that_cannot_be_folded(work: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "vocab_size": 50, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    torch.nn.init.ones_(model.transformer.ln_f.bias)
    model.save_pretrained("gpt2")
    llama(work / "remote")
    auto = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = json.loads((work / "remote/config.json").read_text())
    (work / "remote/config.json").write_text(
        json.dumps({**config, "architectures": ["OwnForCausalLM"], "auto_map": auto})
    )
    before = contents(work)
    normsmith("fold", "gpt2", "-o", "o", "--strict").refused("cannot be folded: transformer.ln_f: lm_head has no bias")
    normsmith("fold", "remote", "-o", "o").refused("remote/config.json: OwnForCausalLM .*--trust-remote-code")
    normsmith("fold", "remote", "-o", "o", "--trust-remote-code").refused("remote/config.json: no model .*own.py")
    assert contents(work) == before


def test_a_checkpoint_that_is_not_ours(work: Path) -> None:
    llama(work / "llama")
    (work / "nothing").mkdir()
    before = contents(work)
    normsmith("bench", "decode", "nothing").refused("nothing: holds no model")
    normsmith("fold", "nothing", "-o", "o").refused("nothing: holds no model")
    normsmith("fold", "absent", "-o", "o").refused("absent: no such folder")
    normsmith("fold", "tiny.yaml", "-o", "o").refused("tiny.yaml: is a file, expected a model folder")
    assert contents(work) == before


def test_an_output_that_would_harm_something(trained: Path, work: Path) -> None:
    shutil.copytree(trained / "taper", work / "runs/taper")
    (work / "runs/.normsmith").touch()  # as in the folder of a demo, which holds its arms
    (work / "mine").mkdir()
    (work / "mine/notes").write_text("mine")
    (work / "empty").mkdir()
    before = contents(work)
    inside = "lies inside the input runs/taper; choose a folder outside"
    for output, flags, message in (
        ("runs/taper", ["--overwrite"], inside),
        ("runs/taper/folded", [], inside),
        ("mine/../runs/taper/x", [], inside),
        ("runs", ["--overwrite"], "runs: holds the input runs/taper, which must not be replaced"),
        (".", ["--overwrite"], "holds the input"),
        ("mine", [], "mine: exists and is not empty; choose another folder, or write --overwrite$"),
        ("mine", ["--overwrite"], "mine: was not written by normsmith"),
        ("tiny.yaml", [], "tiny.yaml: is a file"),
        ("tiny.yaml/x", [], "tiny.yaml/x: cannot be written"),
        ("/proc/normsmith", [], "/proc/normsmith: cannot be written"),
    ):
        normsmith("fold", "runs/taper", "-o", output, *flags).refused(message)
    with contextlib.chdir("empty"):
        normsmith("fold", "../runs/taper", "-o", ".").refused("is or holds the current folder")
    assert contents(work) == before
