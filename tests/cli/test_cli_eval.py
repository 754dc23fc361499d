"""`eval`, and `inspect --stream`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import contents, normsmith
from tests.evaluation import benchmarks
from tests.tiny import tiny

pytest.importorskip("lm_eval", reason="pip install 'normsmith[eval]'")


@pytest.fixture
def data(work: Path) -> Path:
    return benchmarks.fill(work / "benchmarks")


@pytest.fixture
def llama(trained: Path, work: Path) -> Path:
    """Without normalisation by us: somebody's model, with the tokenizer of the trained one."""
    tiny("llama", vocab_size=300, num_hidden_layers=3, bos_token_id=0, eos_token_id=0).save_pretrained("llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / "tiny" / name, work / "llama" / name)
    return work / "llama"


def test_a_suite_on_local_files_then_against_the_folded_model(llama: Path, data: Path, work: Path) -> None:
    plain = normsmith("eval", llama, "--suite", "spheretnorm", "--data", data, "-o", "plain.json")
    assert plain.code == 0, plain
    rows = [line.split() for line in plain.out.splitlines()]
    assert [row[0] for row in rows[2:14]] == [str(i) for i in range(1, 13)]
    assert "no file sciq.jsonl in" in plain.out
    assert "5 metric(s) could not be measured" in plain.out
    assert "zero-shot, at most 64 tokens, local files" in plain.out
    written = json.loads((work / "plain.json").read_text())
    assert written["model"] == str(llama)
    assert len(written["items"]["piqa"]["metrics"]["acc"]["values"]) == 6
    assert {line.split(":")[0] for line in plain.err.splitlines()} == set(written["items"])

    assert normsmith("fold", llama, "-o", "folded").code == 0
    call = ("eval", "folded", "--suite", "spheretnorm", "--data", data, "--against", "plain.json")
    folded = normsmith(*call)
    assert folded.code == 0, folded
    assert f"Against {llama}, item by item" in folded.out
    assert folded.out.count("no difference seen") == 7
    found = json.loads(normsmith(*call, "--json").out)
    assert [pair["p_adjusted"] for pair in found["comparison"] if pair["metric"].startswith("acc")] == [1.0] * 5
    for old, new in zip(written["scores"], found["scores"], strict=True):
        assert (new["task"], new["metric"], new["missing"]) == (old["task"], old["metric"], old["missing"])
        assert old["missing"] or new["value"] == pytest.approx(old["value"], rel=1e-4)
    assert "items" not in found


@pytest.mark.parametrize("name", ["tiny", "taper"])
def test_models_that_normsmith_trained(name: str, trained: Path, data: Path, work: Path) -> None:
    call = ("eval", trained / name, "--tasks", "piqa, lambada_openai", "--data", data, "--limit", 3, "--json")
    found = json.loads(normsmith(*call).out)
    assert [(s["task"], s["metric"]) for s in found["scores"]] == [
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
        ("lambada_openai", "perplexity"),
        ("lambada_openai", "acc"),
    ]
    assert {s["items"] for s in found["scores"]} == {3}
    assert found["settings"]["limit"] == 3


def test_a_model_that_brings_code_runs_only_when_allowed_and_asks_nothing(llama: Path, data: Path, work: Path) -> None:
    assert normsmith("swap", llama, "dyt", "-o", "swapped", "--where", "pre").code == 0
    call = ("eval", "swapped", "--tasks", "piqa", "--data", data)
    normsmith(*call).refused("brings its own code", "--trust-remote-code")
    assert json.loads(normsmith(*call, "--trust-remote-code", "--json").out)["scores"][0]["items"] == 6
    stream = ("inspect", "swapped", "--stream", "--text", "corpus.txt", "--tokens", 60, "--length", 30)
    assert len(json.loads(normsmith(*stream, "--trust-remote-code", "--json").out)["layers"]) == 4


def test_wrong_input_is_one_sentence_and_writes_nothing(llama: Path, data: Path, work: Path) -> None:
    shutil.copytree(llama, "small")
    tiny("llama", vocab_size=100).save_pretrained("small")
    (work / "broken").mkdir()
    (work / "broken/piqa.jsonl").write_text('{"query": "a"\n')
    before = contents(work)
    normsmith("eval", llama).refused("give a suite or tasks, one of both")
    normsmith("eval", llama, "--suite", "sphere").refused("unknown suite 'sphere'; did you mean 'spheretnorm'")
    normsmith("eval", llama, "--tasks", "piqqa", "--data", data).refused("unknown task 'piqqa'; did you mean 'piqa'")
    normsmith("eval", llama, "--tasks", "boolq", "--data", data).refused("boolq: no file boolq.jsonl in")
    normsmith("eval", llama, "--suite", "spheretnorm", "--data", llama).refused("no file lambada")
    normsmith("eval", "nowhere", "--suite", "spheretnorm", "--data", data).refused("nowhere: no such folder")
    normsmith("eval", llama, "--tasks", "piqa", "--data", data, "-o", "no/a.json").refused("there is no folder no")
    (work / "mine.json").write_text('{"a": 1}')
    # Before the model is loaded, and never over something else than an older result.
    for path, message in (("mine.json", "no result of `normsmith eval`; name another"), (".", "is a folder")):
        normsmith("eval", llama, "--tasks", "piqa", "--data", data, "-o", path).refused(message)
    assert (work / "mine.json").read_text() == '{"a": 1}'
    (work / "mine.json").unlink()
    normsmith("eval", llama, "--tasks", "piqa", "--data", data, "--device", "moon").refused("--device moon")
    normsmith("eval", llama, "--tasks", "piqa", "--data", data, "--against", "a.json").refused("a.json: no such file")
    normsmith("eval", llama, "--tasks", "piqa", "--data", "broken").refused(r"piqa.jsonl, line 1: is not JSON")
    normsmith("eval", "small", "--tasks", "piqa", "--data", data).refused("does not match the model: its largest id")
    normsmith("inspect", llama, "--stream").refused("give one with --text")
    assert contents(work) == before


def test_the_stream_in_a_table_as_json_and_as_a_picture(llama: Path, trained: Path, work: Path) -> None:
    for folder in (llama, trained / "tiny"):
        call = ("inspect", folder, "--text", "corpus.txt", "--stream", "--tokens", 300, "--length", 30)
        result = normsmith(*call, "-o", "stream.svg")
        assert result.code == 0, result
        lines = result.out.splitlines()
        count = 3 if folder == llama else 2
        assert [line.split()[0] for line in lines[2 : 3 + count]] == ["input", *map(str, range(1, count + 1))]
        assert f"{count} blocks of model.layers, 300 tokens" in result.out
        assert "picture: stream.svg" in result.out
        assert (work / "stream.svg").read_text().startswith("<?xml")
        found = json.loads(normsmith(*call, "--json", "--probes", 0).out)
        assert len(found["layers"]) == count + 1
        assert found["layers"][1]["largest"] is None
        assert found["layers"][1]["sink"] > 0
        assert found["notes"] == []
