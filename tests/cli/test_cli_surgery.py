"""`inspect`, `swap` and `convert` on somebody's Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import normsmith as ns
from normsmith import models as normsmith_models
from normsmith.cli.models import load_any
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery.example import make_example
from normsmith.surgery.load import load_model
from tests.cli.conftest import contents, normsmith
from tests.surgery.families import FAMILIES
from tests.tiny import apart, output, tiny


@pytest.fixture
def llama(trained: Path, work: Path) -> Path:
    """A tiny Llama with a tokenizer, a README and a picture beside its weights."""
    tiny("llama", vocab_size=300).save_pretrained("llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / "tiny" / name, work / "llama" / name)
    (work / "llama/README.md").write_text("# a model\n")
    return work / "llama"


def test_inspect_lists_every_norm(llama: Path) -> None:
    result = normsmith("inspect", llama)
    assert (result.code, result.err) == (0, "")
    header, _, *rows = result.out.splitlines()
    assert header.split() == ["site", "kind", "role", "width", "eps", "gain", "read", "by", "foldable"]
    assert len(rows) == 5
    sites = json.loads(normsmith("inspect", llama, "--json").out)
    assert [site["role"] for site in sites].count("pre") == 4
    assert sites[-1] == {
        "name": "model.norm",
        "names": ["model.norm"],
        "class": "LlamaRMSNorm",
        "kind": "rmsnorm",
        "role": "final",
        "width": 32,
        "eps": 1e-06,
        "eps_position": "inside",
        "gain": "w",
        "cast_first": True,
        "readers": ["lm_head"],
        "foldable": True,
        "blocked": "",
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("NormsmithForTokenClassification", {"num_labels": 3}),
        ("NormsmithForSequenceClassification", {"num_labels": 3}),
        ("NormsmithForImageClassification", {"num_labels": 3, "image_size": 8, "patch_size": 4}),
        ("NormsmithForTableRegression", {"num_features": 3}),
    ],
)
def test_models_of_every_task_are_read_folded_and_written(name: str, options: dict[str, Any], work: Path) -> None:
    cls = getattr(normsmith_models, name)
    model = cls(cls.config_class(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **options)).eval()
    ns.taper_(model, {"scale_loss": 0.0}, steps=10).close()
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.zero_()
        norm.gate_eval.zero_()
    model.save_pretrained("task")
    assert len(json.loads(normsmith("inspect", "task", "--json").out)) == 3
    result = normsmith("fold", "task", "-o", "folded", "--json")
    assert result.code == 0, result
    assert len(json.loads(result.out)["removed"]) == 2
    folded = load_any(work / "folded")
    assert type(folded) is cls
    inputs = make_example(model)
    assert apart(folded(**inputs).logits, model(**inputs).logits) <= 1e-5


def test_a_text_cannot_be_run_through_an_encoder_decoder(work: Path) -> None:
    FAMILIES["t5"].model().save_pretrained("t5")
    normsmith("inspect", "t5", "--text", "corpus.txt").refused("T5.* reads a text and writes another.*leave out --text")


@pytest.mark.parametrize("which", ["llama", "trained"])
def test_inspect_audits_on_a_text_and_draws_it(which: str, llama: Path, trained: Path, work: Path) -> None:
    folder = llama if which == "llama" else trained / "tiny"
    arguments = ("inspect", folder, "--text", "corpus.txt", "--tokens", 600, "--length", 40, "--picture", "audit.png")
    result = normsmith(*arguments)
    assert result.code == 0, result
    assert "unexplained" in result.out
    assert "without the 4 removable internal norm(s) a one-token forward runs" in result.out
    assert (work / "audit.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(normsmith(*arguments, "--json").out)
    assert sorted(site["order"] for site in found["sites"]) == [1, 2, 3, 4, 5]
    assert found["speedup_without"] > 0


def test_swap_writes_a_model_that_reloads_and_keeps_the_other_files(llama: Path, work: Path) -> None:
    before = contents(llama)
    result = normsmith("swap", llama, "dyt:bias=false", "-o", "swapped", "--where", "pre")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("LlamaRMSNorm → dyt") == 4
    assert result.out.splitlines()[-1] == "swapped: written with a modelling file: load it with trust_remote_code=True"
    assert contents(llama) == before
    assert (work / "swapped/README.md").read_text() == "# a model\n"
    assert (work / "swapped/tokenizer.json").exists()
    model = load_model(work / "swapped", trust_remote_code=True)
    assert [site.kind for site in ns.find_norms(model)] == ["dyt"] * 4 + ["rmsnorm"]
    again = normsmith("swap", "swapped", "rmsnorm", "-o", "back", "--trust-remote-code", "--where", "pre", "--json")
    assert [row[2] for row in json.loads(again.out)["swapped"]] == ["rmsnorm"] * 4
    inspected = normsmith("inspect", "swapped")
    inspected.refused("brings its own code", "--trust-remote-code")


def test_swap_of_a_model_that_normsmith_trained(trained: Path, work: Path) -> None:
    result = normsmith("swap", trained / "tiny", "layernorm", "-o", "swapped")
    assert result.code == 0, result
    model = AutoModelForCausalLM.from_pretrained("swapped")
    assert {m.config.kind for m in model.modules() if hasattr(m, "gamma")} == {"layernorm"}
    assert "layernorm" in normsmith("inspect", "swapped").out


def test_convert_to_onnx_and_native(llama: Path, work: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'normsmith[onnx]'")
    result = normsmith("convert", llama, "-o", "graph", "--to", "onnx", "--json")
    assert result.code == 0, result
    assert json.loads(result.out)["note"].startswith("written as model.onnx, onnxruntime's outputs differ by")
    assert {"model.onnx", "tokenizer.json", "README.md"} <= {path.name for path in (work / "graph").iterdir()}
    assert not list((work / "graph").glob("*.safetensors"))
    assert normsmith("convert", llama, "-o", "same").code == 0
    assert apart(output(load_model(work / "same")), output(load_model(llama))) == 0


def test_wrong_input_leaves_no_trace(llama: Path, work: Path, trained: Path, unchanged: Callable[[], None]) -> None:
    tiny_folder = trained / "tiny"
    normsmith("swap", tiny_folder, "layernrom", "-o", "out").refused("unknown norm 'layernrom'.*layernorm")
    normsmith("swap", tiny_folder, "rmsnorm:epz=1", "-o", "out").refused("unknown key 'epz'; did you mean 'eps'")
    normsmith("swap", tiny_folder, "rmsnorm:eps", "-o", "out").refused("'eps' is no setting; write name:key=value")
    normsmith("swap", tiny_folder, "rmsnorm", "-o", "out", "--where", "qk").refused("no site matches where='qk'")
    normsmith("swap", tiny_folder, "rmsnorm", "-o", "out", "--init", "x").refused("must be 'match' or 'fresh', got 'x'")
    normsmith("swap", "nowhere", "rmsnorm", "-o", "out").refused("nowhere: no such folder")
    normsmith("convert", tiny_folder, "-o", "out", "--to", "gguf").refused("choose one of native, stock, onnx")
    normsmith("convert", tiny_folder, "-o", "out", "--to", "stock").refused("no class of transformers")
    normsmith("inspect", tiny_folder, "--picture", "a.png").refused("give a text with --text")
    normsmith("inspect", tiny_folder, "--text", "a.txt", "--picture", "a.gif").refused("must end in .png or .svg")
    normsmith("inspect", tiny_folder, "--text", "none.txt").refused("none.txt: no such file or folder")
    normsmith("inspect", tiny_folder, "--text", Path(torch.__file__).parent / "lib/libtorch.so").refused("is NUL")
    unchanged()


def test_nothing_is_written_into_or_over_the_input(llama: Path, unchanged: Callable[[], None]) -> None:
    normsmith("swap", llama, "dyt", "-o", llama).refused("lies inside the input")
    normsmith("convert", llama, "-o", llama / "sub").refused("lies inside the input")
    normsmith("convert", llama, "-o", llama.parent, "--overwrite").refused("holds the input|is or holds the current")


def test_an_audit_needs_a_tokenizer(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    (llama / "tokenizer_config.json").unlink()
    normsmith("inspect", llama, "--text", "corpus.txt").refused("no tokenizer could be loaded")
