"""The demonstration, once for real: three arms, a folded model that loads anywhere, a report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from normsmith.norms import Norm
from normsmith.report import Results
from normsmith.studies import load_recipe
from tests.cli.conftest import Result, contents, normsmith

ARMS = ("rmsnorm", "taper", "sphere")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """`normsmith demo --quick` with the user's cache, so that the tokenizer is trained once per machine."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, normsmith("demo", "--quick", "-o", folder)


def test_it_prints_one_table_and_plain_progress_lines(demo: tuple[Path, Result]) -> None:
    folder, result = demo
    assert result.code == 0, result
    for label in ("RMSNorm baseline", "Internal taper", "Sphere, p = 1"):
        assert re.search(rf"^\| {label} \| \d\.\d+ \|", result.out, re.MULTILINE)
        assert f"{label}: 60/60 (" in result.err
    for label in ("normalised baseline", "tapered, not folded", "tapered and folded", "norm-free twin"):
        assert re.search(rf"^  {label}.* \d+ tokens/s +\d\.\d\d×$", result.out, re.MULTILINE)
    assert f"Report: {folder / 'report.html'}\nFolded model: {folder / 'folded'}" in result.out
    assert "\x1b" not in result.out + result.err
    assert "\r" not in result.err


def test_the_results_are_complete_and_finite(demo: tuple[Path, Result]) -> None:
    results = Results.load(demo[0] / "results.json")
    assert tuple(arm.name for arm in results.arms) == ARMS
    assert [row.name for row in results.decode] == ["rmsnorm", "tapered", "taper", "twin"]
    assert results.decode[0].ratio == 1.0
    assert all(0 < row.low <= row.median <= row.high and row.ratio > 0 for row in results.decode)
    base, taper, sphere = results.arms
    for arm in results.arms:
        assert not arm.diverged
        assert arm.validation_loss is not None
        assert 3 < arm.validation_loss < math.log(512)  # better than guessing, no leak of the labels
        assert arm.perplexity == pytest.approx(math.exp(arm.validation_loss))
        assert [p.step for p in arm.curve if p.validation_loss is not None] == [20, 40, 60]
        assert len(arm.stream_scale) == 9  # the entry and eight sublayers
        stored = json.loads((demo[0] / arm.name / "result.json").read_text())
        assert arm.validation_loss == pytest.approx(stored["validation_loss"], rel=1e-4)
        assert load_recipe(demo[0] / arm.name / "recipe.yaml").data.vocab_size == 512
    assert base.gap_percent is None
    assert base.validation_loss is not None
    for arm in (taper, sphere):
        assert arm.validation_loss is not None
        assert arm.gap_percent == pytest.approx(100 * (arm.validation_loss / base.validation_loss - 1))
    assert taper.fold_error is not None
    assert taper.fold_error <= 1e-4
    gates = [point.gate for point in taper.curve if point.gate is not None]
    assert gates[0] == 1.0
    assert gates == sorted(gates, reverse=True)
    radius = sphere.stream_scale[0]  # of the learned radius; every sublayer keeps it
    assert radius == pytest.approx(1, abs=0.2)
    assert sphere.stream_scale == pytest.approx([radius] * 9, rel=1e-4)
    assert re.fullmatch(r"[0-9a-f]{64}", str(results.data["SHA-256"]))
    assert results.environment["torch"] == torch.__version__


def test_the_report_is_one_file_that_loads_nothing(demo: tuple[Path, Result]) -> None:
    page = (demo[0] / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href|srcset)\s*=\s*["']?(?!data:|#|["'])""", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!data:|['\"]?#)", page)
    results = Results.load(demo[0] / "results.json")
    for text in ("Internal taper", "Sphere, p = 1", str(results.data["SHA-256"]), results.environment["torch"]):
        assert text in page


def test_the_folded_model_reloads_without_norms_and_generates_the_same(demo: tuple[Path, Result]) -> None:
    folder = demo[0]
    folded = AutoModelForCausalLM.from_pretrained(folder / "folded").eval()
    tapered = AutoModelForCausalLM.from_pretrained(folder / "taper").eval()
    norms = [name for name, module in folded.named_modules() if isinstance(module, Norm)]
    assert norms == ["model.norm"]
    assert sum(isinstance(module, Norm) for module in tapered.modules()) == 9
    tokenizer = AutoTokenizer.from_pretrained(folder / "folded")
    ids = tokenizer("def main(arguments):\n    return", return_tensors="pt")["input_ids"]
    logits = tapered(ids).logits
    assert ((folded(ids).logits - logits).abs().max() / logits.abs().max()) <= 1e-4
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    tokens = tapered.generate(ids, **options)
    assert tokens.shape[1] == ids.shape[1] + 24 or tokens[0, -1] == tokenizer.eos_token_id
    assert torch.equal(folded.generate(ids, **options), tokens)
    assert torch.equal(folded.generate(ids, use_cache=False, **options), tokens)


def test_a_second_call_changes_nothing_without_overwrite(demo: tuple[Path, Result]) -> None:
    before = contents(demo[0])
    assert {"report.html", "results.json", "folded/model.safetensors"} <= before.keys()
    assert {f"{arm}/{name}" for arm in ARMS for name in ("model.safetensors", "metrics.jsonl", "environment.json")} <= (
        before.keys()
    )
    normsmith("demo", "--quick", "-o", demo[0]).refused("exists and is not empty.*or write --overwrite$")
    assert contents(demo[0]) == before


def test_overwrite_keeps_the_old_report_until_the_data_are_there(
    demo: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(demo[0])
    monkeypatch.setenv("NORMSMITH_CACHE", str(demo[0] / "report.html" / "cache"))
    normsmith("demo", "--quick", "-o", demo[0], "--overwrite").refused("the cache cannot be written")
    assert contents(demo[0]) == before


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    for flags in ([], ["--overwrite"]):
        normsmith("demo", "--quick", "-o", tmp_path, *flags).refused(str(tmp_path))
    assert contents(tmp_path) == before
