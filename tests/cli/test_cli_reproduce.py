"""`reproduce`: from the command to the report, small."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from pathlib import Path

import pytest

from tests.cli.conftest import normsmith

TINY = (
    *("--set", "training.max_steps=8", "--set", "training.evaluate_every=4", "--set", "data.source=corpus.txt"),
    *("--set", "model.num_hidden_layers=2", "--set", "model.hidden_size=16", "--set", "evaluation.windows=4"),
)


def test_a_reproduction_from_the_command_to_the_report(work: Path) -> None:
    command = ("reproduce", "tapernorm", *TINY, "--seeds", "1", "--jobs", "1", "-o", "rep")
    result = normsmith(*command)
    assert result.code == 0, result
    assert "pretraining: A small Llama-like model" in result.err
    assert result.out.strip().splitlines()[-1] == "Report: rep/report.html"
    page = (work / "rep/report.html").read_text()
    assert "2.1538" in page
    assert "arXiv 2602.10408 v1, table 2" in page
    assert "norm-free twin" in page
    assert "published" in page.lower()
    assert "2.1538" in (work / "rep/results.md").read_text()
    rows = json.loads((work / "rep/pretraining/decode.json").read_text())
    assert [row["name"] for row in rows] == ["baseline", "fused", "tapered", "folded", "twin"]
    # The same command again trains nothing.
    before = (work / "rep/pretraining/no-schedule/0/result.json").stat().st_mtime_ns
    again = normsmith(*command, "--json")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["studies"][0]["arms"][0]["arm"] == "no-schedule"
    assert (work / "rep/pretraining/no-schedule/0/result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_smoke_reproduction_of_autonorm_takes_less_than_four_minutes(work: Path) -> None:
    started = time.monotonic()
    result = normsmith("reproduce", "autonorm", "-o", "rep", "--json")
    assert result.code == 0, result
    assert time.monotonic() - started < 240  # on two cores
    studies = json.loads(result.out)["studies"]
    assert len(studies) == 2
    for study in studies:
        assert [row["arm"] for row in study["arms"]][:2] == ["frozen_ln", "autonorm:pool=sequence+gate_freeze"]
        assert {run["state"] for run in study["runs"]} == {"finished"}
        assert len(study["runs"]) == 7 * 2


def test_a_dry_run_says_the_cost_and_writes_nothing(work: Path) -> None:
    result = normsmith("reproduce", "spheretnorm", "--scale", "paper", "--dry-run", "--peak", "1000")
    assert result.code == 0, result
    assert "each run is shared by 8 processes (torchrun)" in result.out
    assert "to download: Skylion007/openwebtext, about 13.5 GB" in result.out
    assert re.search(r"\d+ runs, [\d,]+ h \d\d min of accelerators in all .1000 TFLOP/s, 40% of it", result.out)
    found = json.loads(normsmith("reproduce", "spheretnorm", "--scale", "paper", "--dry-run", "--json").out)
    large = next(c for c in found if c["study"] == "openwebtext-36" and c["arm"] == "pre")
    # 12,500 steps of 512 windows of 1,024 tokens.
    assert large["each"]["tokens"] == 12_500 * 512 * 1024
    assert large["each"]["parameters"] / 1e6 == pytest.approx(772.3 + 1.3, rel=0.01)
    assert not (work / "runs").exists()


def test_a_dry_run_says_which_files_are_the_users(work: Path) -> None:
    (work / "mine/tinystories").mkdir(parents=True)
    (work / "mine/tinystories/tiny_stories.txt").write_text("Once.\n")
    result = normsmith("reproduce", "tapernorm", "--scale", "local", "--data", "mine", "--dry-run")
    assert result.code == 0, result
    assert result.out.strip().splitlines()[-1] == "tinystories reads your files: mine/tinystories/tiny_stories.txt"
    both = normsmith("reproduce", "autonorm", "--scale", "small", "--dry-run", "--only", "mnist,sst2", "--json")
    assert {row["study"] for row in json.loads(both.out)} == {"mnist", "sst2"}
    normsmith("reproduce", "tapernorm", "--scale", "local").refused("--scale local needs --data DIR, a folder with tin")


def test_recipes_are_written_for_torchrun(work: Path) -> None:
    result = normsmith("reproduce", "spheretnorm", "--scale", "paper", "--write-recipes", "ladder")
    assert result.code == 0, result
    paths = sorted((work / "ladder").rglob("*.yaml"))
    assert result.out.strip() == f"{len(paths)} recipes: ladder"
    again = normsmith("validate", paths[0], "--set", "model.num_hidden_layers=1")
    assert again.code == 0, again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tapernrom"], "unknown paper 'tapernrom'; did you mean 'tapernorm'?"),
        (["tapernorm", "--scale", "tiny"], "unknown scale 'tiny'"),
        (["tapernorm", "--set", "training.lr=1"], "unknown key 'lr'"),
        (["tapernorm", "--executor", "slurm"], "unknown executor 'slurm'; known: local, ray"),
        (["tapernorm", "--address", "auto"], "--address and --gpus belong to --executor ray"),
        (["spheretnorm", "--scale", "paper"], "shares a run among 8 processes: write its recipes with --write-recipes"),
        (["tapernorm", "--set", "training.batch_size=1000000000"], "GB to train"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, work: Path) -> None:
    normsmith("reproduce", *arguments).refused(message)


def test_the_markdown_and_the_page_hold_the_same_losses(work: Path) -> None:
    result = normsmith("reproduce", "tapernorm", *TINY, "--seeds", "2", "--jobs", "1", "-o", "rep", "--json")
    assert result.code == 0, result
    assert normsmith("report", "rep/pretraining", "-o", "rep/table.csv").code == 0
    table = list(csv.DictReader(io.StringIO((work / "rep/table.csv").read_text())))
    means = {row["arm"]: row["mean"] for row in json.loads(result.out)["studies"][0]["arms"]}
    assert len(means) == 5
    assert {row["arm"] for row in table if row.get("arm")} >= set(means)
