"""Removing the norms of a pretrained model, whole, at small size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from normsmith.norms.tapered import TaperedNorm
from normsmith.report import Results
from normsmith.schedules.sequential import Uses
from normsmith.studies.removal import RemovalConfig, preset, remove_norms
from normsmith.surgery import find_norms
from normsmith.surgery.load import load_model
from normsmith.training import Reporter
from tests.cli.conftest import corpus, normsmith
from tests.tiny import tiny


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and one tokenizer each, and a text."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text(corpus())
    from normsmith.data.tokenizer import train_bpe, wrap

    tokenizer = wrap(train_bpe([corpus()], 300))
    for family in ("llama", "gpt2", "bert"):
        tiny(family, vocab_size=320).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


def settings(folder: Path, **changes: Any) -> RemovalConfig:
    base = preset(None, 12).to_dict()
    base["data"] |= {"source": str(folder / "text.txt"), "sequence_length": 16, "validation_fraction": 0.2}
    base["training"] |= {"batch_size": 4}
    return RemovalConfig(**{**base, "windows": 20, "decode_rounds": 1, **changes})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("placement", ["internal", "all"])
def test_the_command_writes_a_model_that_loads_elsewhere(
    family: str, placement: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    out = tmp_path / "free"
    result = normsmith(
        *("taper", pretrained / family, "--data", pretrained / "text.txt", "--steps", 12, "-o", out, "--json"),
        *("--placement", placement, "--set", "data.sequence_length=16", "--set", "training.batch_size=4"),
        *("--set", "data.validation_fraction=0.2", "--set", "windows=20", "--set", "decode_rounds=1"),
    )
    assert result.code == 0, result
    assert not Path("unused").exists()
    found = json.loads(result.out)
    assert [arm["name"] for arm in found["arms"]] == ["control", "original", "removed"]
    assert found["arms"][2]["fold_error"] <= 1e-4
    assert {row["name"] for row in found["decode"]} == {"original", "tapered", "removed", "twin"}
    card = (out / "README.md").read_text()
    assert "- Fine-tuned with norms: on the data, learning rate 0.0005." in card
    assert "learning rate 0.003, 100% of the training loss from the model fine-tuned with norms." in card
    assert f"Removed: {5 if placement == 'all' else 4} norms." in card
    assert "normsmith taper" in card
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert Results.load(out / "results.json").arms[2].validation_loss == found["arms"][2]["validation_loss"]
    model = load_model(out, trust_remote_code=True)
    assert not any(isinstance(m, TaperedNorm) for m in model.modules())
    assert len(find_norms(model)) == (0 if placement == "all" else 1)
    code = (
        "import sys; sys.modules['normsmith'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"t = AutoTokenizer.from_pretrained({str(out)!r})\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        "m.generate(**t('Line 3', return_tensors='pt'), max_new_tokens=4, pad_token_id=0)\n"
    )
    if (family, placement) == ("gpt2", "all"):
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("family", "placement"), [("gpt2", "all"), ("llama", "internal")])
def test_fakeln_is_the_same_command(
    family: str, placement: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    out = tmp_path / "free"
    result = normsmith(
        *("taper", pretrained / family, "--data", pretrained / "text.txt", "--steps", 12, "-o", out, "--json"),
        *("--placement", placement, "--set", "data.sequence_length=16", "--set", "training.batch_size=4"),
        *("--set", "data.validation_fraction=0.2", "--set", "windows=20", "--set", "decode_rounds=1"),
        *("--method", "fakeln"),
    )
    assert result.code == 0, result
    found = json.loads(result.out)
    assert [arm["name"] for arm in found["arms"]] == ["control", "original", "removed"]
    assert found["arms"][2]["fold_error"] <= 1e-4
    assert found["arms"][2]["description"].startswith("FakeLN and folded, learning rate 0.003")
    assert [point["gate"] for point in found["arms"][2]["curve"]][-1] == 0
    assert f"Removed: {5 if placement == 'all' else 4} norms." in (out / "README.md").read_text()
    model = load_model(out, trust_remote_code=True)
    assert len(find_norms(model)) == (0 if placement == "all" else 1)


def test_the_audits_order(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    model = load_model(pretrained / "llama")
    config = settings(pretrained, order="audit", control=False)
    with Reporter(quiet=True) as reporter:
        removal = remove_norms(
            model, pretrained / "llama", tmp_path / "out", config, reporter, command="x", overwrite=False
        )
    assert len(removal.report.removed) == 4
    assert [arm.name for arm in removal.results.arms] == ["original", "removed"]
    assert removal.results.arms[1].gap_percent is not None


def test_presets_are_those_of_the_paper() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    for layers, total, span, rate, scale in (
        (12, 300, (25, 100), 6e-4, 0.1),
        (24, 500, (20, 200), 6e-4, 0.1),
        (36, 600, (30, 500), 3e-4, 0.1),
        (48, 800, (50, 700), 1e-4, 0.01),
    ):
        with torch.device("meta"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=8, n_head=2, vocab_size=16))
        config = preset(model)
        assert config.training.max_steps == total
        assert config.taper.span(total) == span
        assert config.training.learning_rate == rate
        assert config.taper.scale_loss == scale
        assert preset(model, total * 2).taper.span(total * 2) == (2 * span[0], 2 * span[1])
        fake = preset(model, method="fakeln")
        start, gaps = fake.sequential.start_step, fake.sequential.gaps
        assert (start, gaps) == {12: (20, (2, 2, 3)), 24: (20, (2, 2, 3)), 36: (30, (4, 4, 6)), 48: (50, (4, 4, 6))}[
            layers
        ]
        assert (fake.training.max_steps, fake.training.learning_rate, fake.distill) == (total, rate, 0)
        assert fake.sequential.scale_loss == {36: 0.03}.get(layers, scale)
        longer = preset(model, total * 2, "fakeln").sequential
        uses = Uses(*(tuple(f"{i}" for i in range(layers)),) * 2, (), ("f",))
        plan, twice = fake.sequential.plan(total, uses), longer.plan(total * 2, uses)
        assert (twice[0].step, twice[-1].step) == (2 * plan[0].step, 2 * plan[-1].step)
    other = preset(tiny("llama"))
    assert other.taper.span(other.training.max_steps) == (20, 320)


def test_wrong_input_writes_nothing(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    text, out = pretrained / "text.txt", tmp_path / "out"
    short = tmp_path / "short.txt"
    short.write_text("too short")
    bare = tmp_path / "bare"
    shutil.copytree(pretrained / "llama", bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    small = (
        "--steps",
        12,
        "--set",
        "data.sequence_length=16",
        "--set",
        "data.validation_fraction=0.2",
        "--set",
        "decode_rounds=1",
    )

    def refused(model: Path, *rest: object) -> str:
        result = normsmith("taper", model, "-o", out, *small, *rest)
        assert result.code == 2, result
        assert not out.exists()
        return result.err.splitlines()[-1]

    assert "BertForMaskedLM is no causal language model" in refused(pretrained / "bert", "--data", text)
    assert "give more text" in refused(pretrained / "llama", "--data", short)
    assert "placement" in refused(pretrained / "llama", "--data", text, "--placement", "inner")
    assert "scale_loss" in refused(pretrained / "llama", "--data", text, "--set", "taper.scale_loss=-1")
    assert "after the run of 12 steps" in refused(pretrained / "llama", "--data", text, "--set", "taper.end_step=99")
    fake = ("--data", text, "--method", "fakeln")
    beyond = ("--set", "sequential.start_step=10", "--set", "sequential.gaps=[1,1,1]")
    assert "after the end of the run of 12" in refused(pretrained / "llama", *fake, *beyond)
    assert "placement = 'final'" in refused(pretrained / "llama", *fake, "--placement", "final")
    assert "fakeln has an order of its own" in refused(pretrained / "llama", *fake, "--order", "audit")
    assert "did you mean 'fakeln'" in refused(pretrained / "llama", "--data", text, "--method", "fakenl")
    assert "no such file" in refused(pretrained / "llama", "--data", tmp_path / "none.txt")
    assert str(bare) in refused(bare, "--data", text)
    assert AutoModelForCausalLM.from_pretrained(pretrained / "llama") is not None


@pytest.mark.parametrize("named", [True, False])
def test_a_learning_rate_of_the_users_counts_while_the_norms_taper(
    named: bool, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default for that time is higher; it must not silently win over what was typed."""
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    rate = ("--set", "training.learning_rate=1e-12") if named else ()
    result = normsmith(
        *("taper", pretrained / "llama", "--data", pretrained / "text.txt", "--steps", 12, "-o", tmp_path / "o"),
        *("--no-control", "--set", "data.sequence_length=16", "--set", "training.batch_size=4", "--json"),
        *("--set", "data.validation_fraction=0.2", "--set", "windows=20", "--set", "decode_rounds=1", *rate),
    )
    assert result.code == 0, result
    curve = Results(**{k: v for k, v in json.loads(result.out).items() if k != "output"}).arms[-1].curve
    logged = max(point.learning_rate or 0.0 for point in curve)  # the first log is late on the cosine
    assert (logged <= 1e-12) if named else (logged > 1e-4)


def test_a_model_without_such_norms_is_refused_before_any_training(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMSMITH_CACHE", str(pretrained / "cache"))
    short = ("--set", "data.sequence_length=16", "--set", "data.validation_fraction=0.2", "--set", "windows=20")
    common = ("--data", pretrained / "text.txt", "--steps", 12, *short, "--set", "decode_rounds=1")
    assert normsmith("taper", pretrained / "llama", *common, "--no-control", "-o", tmp_path / "free").code == 0
    again = normsmith("taper", tmp_path / "free", *common, "-o", tmp_path / "again", "--trust-remote-code")
    assert again.code == 2
    assert "no pre norm to taper" in again.err
    assert "fine-tuning" not in again.err
