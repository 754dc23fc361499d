"""`report`: from a study that was really run to the page, and from the page back to a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from normsmith.report.account import read_account
from tests.cli.conftest import contents, normsmith
from tests.cli.test_cli_compare import SMALL


def test_a_study_its_report_and_a_run_repeated_from_it(work: Path) -> None:
    result = normsmith("compare", "tiny.yaml", "--arms", "rmsnorm,sphere:p=2", "--seeds", "2", *SMALL, "-o", "st")
    assert result.code == 0, result
    assert (work / "st/.recipes.json").exists()  # so that the report waits for no torch
    command = shlex.split(result.out.strip().splitlines()[-1].removeprefix("Report: "))
    result = normsmith(*command[1:])
    assert result.code == 0, result
    assert result.out.strip().endswith("Report: st/report.html")
    assert "st: 2 arms, 2 seeds, 4 runs. Against rmsnorm (validation loss): sphere:p=2: " in result.out
    page = (work / "st/report.html").read_text()
    assert "Grad norm" in page
    found = json.loads(normsmith("report", "st", "-o", "st/report.md", "--json").out)
    assert found["output"] == "st/report.md"
    assert found["studies"] == [json.loads((work / "st/results.json").read_text())]
    # The command beside a run of the sphere gives the same run, although its own recipe alone would not: it shares the
    # reference's initial weights.
    account = read_account(Path("st"))
    run = account.runs[-1]
    assert (run.cell.arm, run.cell.seed) == ("sphere:p=2", 1)
    again = shlex.split(account.command(run))
    assert again[0] == "normsmith"
    assert normsmith(*again[1:]).code == 0
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (work / "runs/again/sphere_p=2/1" / name).read_bytes() == (run.cell.folder / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "-o", "x.html"], "absent: no such folder"),
        ([".", "-o", "x.html"], "holds no study"),
        (["tiny.yaml", "-o", "x.html"], "tiny.yaml: no such folder"),
        ([".", "-o", "x.pdf"], r"x.pdf: write a file that ends in .html, .md or .csv"),
        ([".", "-o", "tiny.yaml"], r"tiny.yaml: write a file that ends in"),
        ([".", ".", "-o", "x.md"], "the study is there twice"),
        ([".", "-o", "tiny.yaml/x.html"], "cannot be written"),
        ([".", "--difference", "0"], "Invalid value for '--difference'"),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_leaves_no_trace(arguments: list[str], message: str, unchanged: Callable[[], None]) -> None:
    normsmith("report", *arguments).refused(message)


def test_nothing_but_the_report_is_written(work: Path) -> None:
    from tests.report.synthetic import make

    folder = make(work / "st")
    read_account(folder)
    before = contents(work)
    assert normsmith("report", "st", "-o", "st/report.csv").code == 0
    after = contents(work)
    assert after.pop("st/report.csv")
    assert after == before
