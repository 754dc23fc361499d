"""Recipes that two real processes share: the same batches, numbers, files and errors as one process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from normsmith.data import TextData, load_data
from normsmith.training import TrainingConfig
from tests.training.shared_runs import distilled, gated, ngpt, numbers, recipe, tapered

ROOT = Path(__file__).parents[2]


def torchrun(*command: str, seconds: float = 120) -> tuple[int, str, str]:
    """Run a command on two ranks: exit code, standard output, standard error."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    start = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(start, env=environment, text=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # on this signal torchrun ends its ranks
            output, errors = process.communicate(timeout=60)
            pytest.fail(f"the ranks wait for each other:\n{(output + errors)[-4000:]}")
    return process.returncode, output, errors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def shared(source: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("shared")
    code, output, errors = torchrun(str(Path(__file__).with_name("ddp_recipe.py")), source, str(folder))
    assert code == 0, (output + errors)[-4000:]
    return folder, [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def assert_alike(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert len(theirs["history"]) == len(ours["history"])
    for left, right in zip(theirs["history"], ours["history"], strict=True):
        assert left == pytest.approx(right, rel=tolerance, abs=1e-6), left["step"]
    assert theirs["weights"] == pytest.approx(ours["weights"], rel=20 * tolerance)


def test_a_taper_on_two_ranks_is_the_run_of_one_process(
    shared: tuple[Path, list[dict[str, Any]]], source: str, tmp_path: Path
) -> None:
    first, second = (rank["tapered"] for rank in shared[1])
    ours = numbers(tapered(source, 1), tmp_path / "one")
    assert_alike(first, ours)
    assert first["validation"] == pytest.approx(ours["validation"], rel=1e-5)
    assert first["moments"] == [pytest.approx(row, rel=1e-4) for row in ours["moments"]]
    assert first["target"] == pytest.approx(ours["target"], rel=1e-5)
    assert (second["validation"], second["weights"]) == (first["validation"], first["weights"])
    assert {entry["step"] for entry in first["history"] if "eval_loss" in entry} == {3, 6}


def test_gates_on_two_ranks_are_watched_and_frozen_as_in_one_process(
    shared: tuple[Path, list[dict[str, Any]]], source: str, tmp_path: Path
) -> None:
    first, second = (rank["gated"] for rank in shared[1])
    data = load_data(recipe(source, 1).data)
    assert isinstance(data, TextData)
    ours = gated(source, data, tmp_path, 1)
    assert_alike(first, ours)
    assert first["selectors stopped"]
    assert second["selectors stopped"]
    assert sum("logit_norm" in entry for entry in first["history"]) == 2
    entropies = [entry["gate_entropy"] for entry in first["history"] if "gate_entropy" in entry]
    assert len(set(entropies)) > 3, "a constant would say nothing about the reduction"
    assert [entry["gate_frozen"] for entry in first["history"] if "loss" in entry] == [0, 0, 1, 1, 1, 1]
    assert first["weights"] == second["weights"]


def test_ngpt_on_two_ranks_keeps_its_weights_on_the_sphere(
    shared: tuple[Path, list[dict[str, Any]]], source: str, tmp_path: Path
) -> None:
    ours = numbers(ngpt(source, 1), tmp_path / "one")
    assert_alike(shared[1][0]["ngpt"], ours)
    assert [rank["ngpt"]["validation"] for rank in shared[1]] == [pytest.approx(ours["validation"], rel=1e-5)] * 2
    assert shared[1][0]["ngpt"]["weights"]["model.embed_tokens.weight"] == pytest.approx(300, rel=1e-5)


def test_distillation_on_two_ranks_is_that_of_one_process(
    shared: tuple[Path, list[dict[str, Any]]], source: str, tmp_path: Path
) -> None:
    data = load_data(recipe(source, 1).data)
    assert isinstance(data, TextData)
    ours = distilled(source, data, tmp_path / "one", 1)
    assert_alike(shared[1][0]["distilled"], ours)
    assert ours["history"][0]["loss"] > 1.02 * ours["history"][-1]["loss"] > 1


def test_an_overflow_of_one_rank_is_known_to_both(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    expected = "the input of second was the first that is not finite, at step 3"
    assert [rank["overflow"] for rank in shared[1]] == [expected] * 2


def test_a_run_is_continued_where_it_was(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in shared[1]:
        assert_alike(rank["continued"], rank["tapered"], 1e-6)
        assert rank["continued"]["validation"] == pytest.approx(rank["tapered"]["validation"], rel=1e-6)


def test_only_the_first_rank_reads_the_text_and_both_have_it(
    shared: tuple[Path, list[dict[str, Any]]], source: str
) -> None:
    first, second = (dict(rank["data"]) for rank in shared[1])
    assert first.pop("said")[0] == f"reading {source}"
    assert second.pop("said") == []
    assert first == second
    assert first["train"][0] > 10_000


def test_ranks_draw_noise_of_their_own(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    assert shared[1][0]["noise"] != shared[1][1]["noise"]


def test_an_error_of_one_rank_ends_both(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (rank["errors"] for rank in shared[1])
    assert first[0] == ["RankError", "rank 1 of 2 failed: only here", 2, True]
    assert second[0] == ["InputError", "only here", 2, True]
    assert first[1][0] == "InputError"
    assert "exists and is not empty" in first[1][1]
    assert second[1] == ["RankError", f"rank 0 of 2 failed: {first[1][1]}", 2, True]
    assert [rank[2][2:] for rank in (first, second)] == [[2, True]] * 2
    assert "nowhere.txt" in first[2][1]
    assert first[3][0] == "KeyError"
    assert second[3] == ["RankError", "rank 0 of 2 failed: KeyError: 'key'", 1, True]


def test_a_run_is_not_continued_with_another_number_of_processes(
    shared: tuple[Path, list[dict[str, Any]]], source: str
) -> None:
    with pytest.raises(Exception, match=r"had 2 process\(es\) and this one has 1.*resume it with 2"):
        numbers(tapered(source, 2), shared[0] / "tapered", resume=True)


def test_other_verbs_are_refused_once() -> None:
    code, output, errors = torchrun("-m", "normsmith", "compare", "baseline-1m", "--arms", "base")
    assert code == 1
    assert output == ""
    said = [line for line in errors.splitlines() if line.startswith("normsmith: ")]
    expected = "compare runs in one process: start it without torchrun; only train shares a run between several"
    assert said == [f"normsmith: {expected}"]
    assert "exitcode  : 2" in errors.split("Root Cause")[1]  # the other rank may be ended before it has come so far


@pytest.mark.slow
def test_the_command_line_speaks_once(source: str, tmp_path: Path) -> None:
    path, output = tmp_path / "tiny.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(recipe(source, 2).to_dict()))
    command = (str(Path(sys.executable).with_name("normsmith")), "train", str(path), "-o", str(output))
    code, said, errors = torchrun(*command)
    assert code == 0, errors[-4000:]
    assert said.count("validation loss") == 1
    assert errors.count(f"reading {source}") == 1
    assert "Warning" not in errors
    result = json.loads((output / "result.json").read_text())
    ours = numbers(recipe(source, 1), tmp_path / "one")
    assert result["validation_loss"] == pytest.approx(ours["validation"], rel=1e-5)
    assert json.loads((output / "environment.json").read_text())["processes"] == "2"

    code, said, errors = torchrun("-m", "normsmith", *command[1:])
    assert (code, said) == (1, "")
    assert errors.count("exists and is not empty") == 1
    assert errors.count("exitcode  : 2") == 2


def test_a_run_without_torchrun_uses_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 4))
    assert TrainingConfig().arguments(tmp_path, 0)._n_gpu == 1
