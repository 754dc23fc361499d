"""`train`: what it writes, resuming to the bit, and every wrong input without a trace."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from normsmith.evaluation import language_loss
from normsmith.studies import load_recipe
from tests.cli.conftest import contents, normsmith
from tests.cli.test_cli_basics import SCRIPT

WRITTEN = {
    ".normsmith",
    "checkpoints",
    "config.json",
    "environment.json",
    "generation_config.json",
    "metrics.jsonl",
    "model.safetensors",
    "recipe.yaml",
    "result.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_a_run_leaves_a_model_that_transformers_loads_and_everything_to_repeat_it(trained: Path) -> None:
    folder = trained / "taper"
    assert {path.name for path in folder.iterdir()} == WRITTEN
    assert load_recipe(folder / "recipe.yaml") == load_recipe(trained / "taper.yaml")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == [3, 6, 9, 12]
    assert metrics[-1]["loss"] < metrics[0]["loss"] < math.log(300) + 1
    assert {"loss", "gate", "auxiliary_loss", "learning_rate", "grad_norm"} <= metrics[-1].keys()
    facts = json.loads((folder / "environment.json").read_text())
    assert {"normsmith", "torch", "python", "data_sha256", "data_source"} <= facts.keys()
    assert len(facts["data_sha256"]) == 64
    model = AutoModelForCausalLM.from_pretrained(folder)
    result = json.loads((folder / "result.json").read_text())
    assert result["parameters"] == model.num_parameters()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Line 7: the small dog jumps"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_reported_loss_is_that_of_the_written_model(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normsmith.data import PackedWindows, load_text

    monkeypatch.chdir(trained)
    data = load_text(load_recipe("tiny.yaml").data)
    model = AutoModelForCausalLM.from_pretrained("tiny").eval()
    loss = language_loss(model, PackedWindows(data.validation, 16))
    assert loss == pytest.approx(json.loads(Path("tiny/result.json").read_text())["validation_loss"], rel=1e-6)


def test_json_is_the_only_output_and_set_changes_the_run(trained: Path, work: Path) -> None:
    result = normsmith("train", "tiny.yaml", "--json", "--set", "training.max_steps=4", "--set", "seed=3")
    assert (result.code, result.err) == (0, "")
    printed = json.loads(result.out)
    assert printed["output"] == "runs/tiny"
    stored = json.loads((work / "runs/tiny/result.json").read_text())
    assert printed["validation_loss"] == stored["validation_loss"]
    assert load_recipe("runs/tiny/recipe.yaml").training.max_steps == 4
    assert load_recipe("runs/tiny/recipe.yaml").seed == 3
    assert stored["validation_loss"] != json.loads((trained / "tiny/result.json").read_text())["validation_loss"]


def test_the_same_recipe_gives_the_same_model_and_overwrite_replaces_the_old_one(trained: Path, work: Path) -> None:
    assert normsmith("train", "tiny.yaml", "-o", "out", "--set", "seed=1").code == 0
    (work / "out/extra").touch()
    normsmith("train", "tiny.yaml", "-o", "out").refused("out: exists and is not empty.*--overwrite or --resume")
    assert (work / "out/extra").exists()
    result = normsmith("train", "tiny.yaml", "-o", "out", "--overwrite")
    assert result.code == 0
    assert result.out.startswith("validation loss ")
    assert "tiny: 12/12" in result.err
    assert {path.name for path in (work / "out").iterdir()} == WRITTEN
    assert (work / "out/model.safetensors").read_bytes() == (trained / "tiny/model.safetensors").read_bytes()


LONG = ("--set", "training.max_steps=100", "--set", "training.save_every=10", "--set", "training.log_every=10")


def test_a_terminated_run_resumes_to_the_bit(work: Path) -> None:
    command = [SCRIPT, "train", "taper.yaml", "-o", "cut", *LONG]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    checkpoint = work / "cut/checkpoints/checkpoint-10"
    deadline = time.monotonic() + 90
    while not (checkpoint / "trainer_state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, ""), err
    assert err.splitlines()[-1].startswith("normsmith: terminated; the same command with --resume continues")
    assert not (work / "cut/result.json").exists()
    assert not (work / "cut/model.safetensors").exists()
    cut = contents(work / "cut")

    normsmith("train", "taper.yaml", "-o", "cut", "--resume").refused(r"cut/recipe.yaml: .*another recipe")
    normsmith("train", "taper.yaml", "-o", "cut", "--resume", "--overwrite", *LONG).refused("exclude each other")
    text = (work / "corpus.txt").read_text()
    (work / "corpus.txt").write_text(text + "One more line.\n")
    normsmith("train", "taper.yaml", "-o", "cut", "--resume", *LONG).refused("not what the interrupted run in cut read")
    (work / "corpus.txt").write_text(text)
    assert contents(work / "cut") == cut

    # What an interruption in the middle of a save leaves: a newer checkpoint without its last file.
    partial = work / "cut/checkpoints/checkpoint-99"
    shutil.copytree(checkpoint, partial)
    (partial / "trainer_state.json").write_text("{")
    # A first loss that only the checkpoint knows: a run from the beginning would not have it.
    for state in (work / "cut/checkpoints").glob("checkpoint-*/trainer_state.json"):
        state.write_text(re.sub(r'"loss": \d+\.\d+', '"loss": 123.0', state.read_text(), count=1))
    resumed = normsmith("train", "taper.yaml", "-o", "cut", "--resume", "--json", *LONG)
    assert resumed.code == 0, resumed
    whole = normsmith("train", "taper.yaml", "-o", "whole", "--json", *LONG)
    assert whole.code == 0
    assert json.loads(resumed.out)["validation_loss"] == json.loads(whole.out)["validation_loss"]
    assert (work / "cut/model.safetensors").read_bytes() == (work / "whole/model.safetensors").read_bytes()
    metrics = [(work / run / "metrics.jsonl").read_text().splitlines() for run in ("cut", "whole")]
    assert metrics[0][1:] == metrics[1][1:]
    assert [json.loads(lines[0])["loss"] == 123.0 for lines in metrics] == [True, False]
    assert not partial.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt: has no text"),
        ("blank.txt", b" \n\n\t\n", "blank.txt: has no text"),
        ("nul.txt", b"text\x00more" * 100, "nul.txt: byte 4 is NUL, so this is a binary"),
        ("latin.txt", b"caf\xe9 au lait\n" * 500, "latin.txt: byte 3 is not valid UTF-8"),
        ("short.txt", b"only a few words", "only one document.*give more text"),
        ("absent.txt", None, "absent.txt: no such file or folder"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_text_that_cannot_be_used_leaves_no_trace(
    name: str, content: bytes | None, message: str, existing: bool, work: Path
) -> None:
    if content is not None:
        (work / name).write_bytes(content)
    if existing:  # an older run, which --overwrite must not delete for a run that cannot begin
        (work / "out").mkdir()
        (work / "out/.normsmith").touch()
        (work / "out/model.safetensors").write_bytes(b"old")
    before = contents(work)
    flags = ["--overwrite"] if existing else []
    normsmith("train", "tiny.yaml", "-o", "out", "--set", f"data.source={name}", *flags).refused(message)
    assert contents(work) == before


def test_text_shorter_than_one_window_leaves_no_trace(unchanged: Callable[[], None]) -> None:
    result = normsmith("train", "tiny.yaml", "-o", "out", "--set", "data.sequence_length=100000")
    result.refused(r"the train split has \d+ tokens, one window needs 100000: lower sequence_length")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("tiny.yaml", "tiny.yaml: is a file, expected a folder"),
        ("tiny.yaml/deep/out", "tiny.yaml/deep/out: cannot be written .*tiny.yaml"),
        ("/proc/normsmith/out", "/proc/normsmith/out: cannot be written"),
        ("mine", "mine: exists and is not empty; choose another folder, or write --overwrite or --resume"),
        ("x" * 300, "cannot be (read|written) .*name too long"),
    ],
)
def test_an_output_that_cannot_be_written(output: str, message: str, work: Path) -> None:
    (work / "mine").mkdir()
    (work / "mine/thesis.tex").write_text("years of work")
    before = contents(work)
    normsmith("train", "tiny.yaml", "-o", output).refused(message)
    for flag in ("--overwrite", "--resume"):
        normsmith("train", "tiny.yaml", "-o", "mine", flag).refused("mine: was not written by normsmith")
    assert contents(work) == before


def test_a_width_that_heads_do_not_divide_costs_no_older_result(trained: Path, work: Path) -> None:
    shutil.copytree(trained / "tiny", work / "out")
    before = contents(work)
    normsmith("train", "tiny.yaml", "-o", "out", "--overwrite", "--set", "model.hidden_size=30").refused(
        "hidden_size=30 is not divisible by num_attention_heads=4"
    )
    assert contents(work) == before


def test_a_loss_that_is_not_finite_stops_with_step_and_checkpoint(work: Path) -> None:
    changes = {"learning_rate": 1e9, "max_steps": 30, "save_every": 1, "log_every": 1, "warmup": 0.5}
    options = [part for key, value in changes.items() for part in ("--set", f"training.{key}={value}")]
    message = normsmith("train", "tiny.yaml", "-o", "out", *options).refused(
        r"not finite since step \d+: the last good checkpoint is out/checkpoints/checkpoint-\d+; lower"
    )
    checkpoint = work / message.split("checkpoint is ")[1].split(";")[0]
    good, bad = int(checkpoint.name.split("-")[1]), int(message.split("since step ")[1].split(":")[0])
    assert good < bad
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert all(torch.isfinite(t).all() for s in state["state"].values() for t in s.values())
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not {"result.json", "model.safetensors"} & {path.name for path in (work / "out").iterdir()}
    curve = [json.loads(line) for line in (work / "out/metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve] == list(range(1, len(curve) + 1))  # a diverged run has a curve too
    assert good <= len(curve) <= bad


def test_a_last_update_that_breaks_the_model_is_not_reported_as_done(work: Path) -> None:
    changes = ["--set", "training.learning_rate=1e30", "--set", "training.max_steps=2"]
    normsmith("train", "tiny.yaml", "-o", "out", *changes).refused("validation loss is not finite after step 2")
    assert not (work / "out/result.json").exists()
    assert not (work / "out/model.safetensors").exists()


@pytest.mark.parametrize("verb", [("train",), ("compare", "--arms", "rmsnorm,layernorm", "--seeds", "1")])
def test_a_recipe_that_would_not_fit_memory_is_refused_before_anything_is_made(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    name, *options = verb
    sizes = ("--set", "model.hidden_size=65536", "--set", "model.num_hidden_layers=96")
    done = normsmith(name, "baseline-1m", *options, *sizes, "-o", str(tmp_path / "out"))
    done.refused("needs about [0-9.]+ GB to train and there are [0-9.]+ GB: its weights .* lower model.hidden_size")
    assert not (tmp_path / "out").exists()
