"""Reports over damaged studies: damage is said, never averaged in, and nothing of the user's is overwritten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normsmith.errors import InputError
from normsmith.report.account import read_account
from normsmith.report.study_page import write_study_report
from tests.report.synthetic import make
from tests.report.test_study_report import markdown, page, table


def test_a_cut_last_line_is_kept_up_to_it_and_marked(study: Path) -> None:
    path = study / "dyt/2/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]) + lines[8][:15])
    run = next(run for run in read_account(study).runs if (run.cell.arm, run.cell.seed) == ("dyt", 2))
    assert run.outcome.state == "finished"
    assert run.curves["loss", ""].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert "- finished (dyt, seed 2): metrics.jsonl: the last line is cut\n" in markdown(study)


def test_a_number_that_is_not_finite_is_marked_and_left_out(study: Path) -> None:
    path = study / "dyt/2/metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 5, "loss": ', '"step": 5, "loss": null, "old": '))
    run = next(run for run in read_account(study).runs if (run.cell.arm, run.cell.seed) == ("dyt", 2))
    assert 5 not in run.curves["loss", ""].steps
    text = markdown(study)
    assert "- finished (dyt, seed 2): metrics.jsonl: a number was not finite at step 5\n" in text
    assert text.count("| finished (see note) |") == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda run: edit(run / "recipe.yaml", "batch_size: 4", "batch_size: 5"),
            "recipe.yaml is not that of this study",
        ),
        (
            lambda run: (run / "result.json").write_text('{"validation_loss": NaN, "seconds": 1, "parameters": 1}'),
            "no finite",
        ),
        (lambda run: (run / "result.json").write_text('{"validation_loss": 1.0'), "cannot be read"),
        (lambda run: edit(run / "environment.json", DATA_OLD, "1" * 64), "read other data"),
        (lambda run: (run / ".normsmith").unlink(), "not written by normsmith"),
    ],
)
def test_a_run_that_is_not_the_studys_is_marked_and_left_out(damage: Any, reason: str, study: Path) -> None:
    before = {row["arm"]: row for row in table(study)}
    damage(study / "dyt/0")
    rows = {row["arm"]: row for row in table(study)}
    assert (rows["dyt"]["finished"], rows["dyt"]["refused"], rows["dyt"]["pairs"]) == ("2", "1", "2")
    assert rows["layernorm"]["mean"] == before["layernorm"]["mean"]
    assert rows["dyt"]["mean"] != before["dyt"]["mean"]
    assert re.search(rf"^- refused \(dyt, seed 0\): .*{reason}", markdown(study), re.MULTILINE)
    run = next(run for run in read_account(study).runs if (run.cell.arm, run.cell.seed) == ("dyt", 0))
    assert run.curves == {}
    # A recipe that is not the study's would repeat something else.
    row = next(line for line in markdown(study).splitlines() if line.startswith("| dyt | 0 |"))
    assert "normsmith train" not in row
    assert "normsmith train" in next(line for line in markdown(study).splitlines() if line.startswith("| dyt | 1 |"))


DATA_OLD = "0" * 64


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_plan_edited_by_hand_is_not_believed(study: Path) -> None:
    read_account(study)
    edit(study / "study.json", '"batch_size": 4', '"batch_size": 8')
    with pytest.raises(InputError, match="no run has finished .9 refused."):
        read_account(study)


def test_a_remembered_study_reads_without_torch_and_says_the_same(study: Path) -> None:
    first = page(study).source
    code = (
        "import sys; from pathlib import Path; from normsmith.report.study_page import write_study_report as w;"
        "w([Path(sys.argv[1])], Path(sys.argv[2]));"
        "assert not {'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules), 'heavy'"
    )
    second = study / "second.html"
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(study), str(second)], check=True)
    assert second.read_text(encoding="utf-8") == first
    # The memory is a cache: damaged or gone, the answer is the same.
    text = markdown(study)
    for damage in (lambda p: p.write_text("{"), lambda p: p.write_text('{"plan": 1}'), lambda p: p.unlink()):
        damage(study / ".recipes.json")
        assert markdown(study) == text


def test_a_study_of_another_version_or_none_is_refused(study: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.html"
    with pytest.raises(InputError, match="holds no study"):
        write_study_report([tmp_path], output)
    with pytest.raises(InputError, match="absent: no such folder"):
        write_study_report([tmp_path / "absent"], output)
    edit(study / "study.json", '"format": 1', '"format": 7')
    with pytest.raises(InputError, match=r"has the format 7, this version of normsmith .* reads 1"):
        write_study_report([study], output)
    assert not output.exists()


def test_without_a_finished_run_there_is_no_report(tmp_path: Path) -> None:
    folder = make(tmp_path / "st", diverge=lambda _: True)
    with pytest.raises(InputError, match=r"no run has finished \(9 diverged\).*not finite since step 10"):
        markdown(folder)


def test_only_a_report_of_ours_is_replaced(study: Path, tmp_path: Path) -> None:
    for name in ("report.md", "report.csv"):
        write_study_report([study], study / name)
        write_study_report([study], study / name)
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    for name in ("notes.md", "st/results.csv"):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match="exists and is no report"):
            write_study_report([study], tmp_path / name)
    assert notes.read_text() == "mine"
    with pytest.raises(InputError, match=r"write a file that ends in \.html, \.md or \.csv"):
        write_study_report([study], tmp_path / "report.pdf")
    with pytest.raises(InputError, match="is a folder"):
        write_study_report([study], Path(shutil.copytree(study, tmp_path / "d.html")))
    with pytest.raises(InputError, match="the study is there twice"):
        write_study_report([study, study / "../st"], tmp_path / "two.html")


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_folder_without_permission_is_named(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_study_report([study], Path("/proc/normsmith/report.html"))
    # A study that may only be read is read all the same; the superuser may write anywhere, so this write cannot work.
    (study / ".recipes.json").unlink(missing_ok=True)
    (study / ".recipes.json").mkdir()
    write_study_report([study], tmp_path / "report.md")
