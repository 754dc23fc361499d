"""What a study is judged by: the loss, or its task's metric, whichever values of that are better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from normsmith.cli import app
from normsmith.errors import InputError, UnknownNameError
from normsmith.report.account import read_account
from normsmith.report.stability import stability
from normsmith.report.study_page import write_study_report
from normsmith.report.study_pictures import forest
from normsmith.studies.cells import record_failure
from normsmith.studies.comparison import Comparison, read_comparison
from normsmith.studies.library import find_recipe
from normsmith.studies.statistics import needed_pairs
from normsmith.studies.study import Cell, load_study
from normsmith.studies.tables import comma_separated, markdown
from normsmith.studies.tasks import TASKS, check_metric
from tests.report.synthetic import make

ARMS = ("rmsnorm", "layernorm", "dyt")
SEEDS = (0, 1, 2, 3)
NOISE = (0.003, -0.002, 0.001, -0.002)
LEVEL = {"rmsnorm": 0.80, "layernorm": 0.85, "dyt": 0.75}
IMAGES = {"kind": "images", "source": "digits"}
TABLE = {"kind": "table", "source": "diabetes"}


def scores(cell: Cell, name: str = "accuracy", better: str = "higher") -> dict[str, Any]:
    """Layernorm has the highest metric and the highest loss, on both splits."""
    value = LEVEL[cell.arm] + 0.01 * cell.seed + (NOISE[cell.seed] if cell.arm != "rmsnorm" else 0)
    losses = {"validation_loss": value + 1, "test_loss": value + 2}
    return {"validation_metric": value + 0.1, "test_metric": value, "metric": name, "better": better, **losses}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make(tmp_path / "images", ARMS, SEEDS, points=4, data=IMAGES, further=scores)


def outcomes(found: Comparison) -> list[str]:
    return [row.verdict.outcome for row in found.arms if row.verdict is not None]


def test_an_accuracy_decides_and_is_better_when_higher(images: Path) -> None:
    found = read_comparison(images, difference=0.002)
    assert (found.metric, found.better, found.unit) == ("test accuracy", "higher", "")
    assert outcomes(found) == ["better", "worse"]
    row = found.arms[1]
    differences = 0.05 + np.array(NOISE)
    low, high = stats.t.interval(0.95, 3, differences.mean(), stats.sem(differences))
    assert row.mean == pytest.approx(0.865)
    assert row.paired is not None
    assert (row.paired.mean, row.paired.low, row.paired.high) == pytest.approx((0.05, low, high))
    assert row.verdict is not None
    assert row.verdict.text == f"better by 0.05 [{low:.4g}, {high:.4g}]"
    assert row.needed_seeds is not None
    text = markdown(found)
    assert "Means over seeds of the test accuracy (higher is better) with" in text
    assert f"{row.needed_seeds} seeds needed to see a difference of 0.002 with" in text
    assert "nats" not in text
    assert Comparison(**found.plain()) == found
    assert ",test accuracy,0.865" in comma_separated(found)
    run = found.runs[0]
    assert (run.validation_metric, run.test_metric) == (pytest.approx(0.9), pytest.approx(0.8))


def test_one_seed_needs_no_notes_about_tests(tmp_path: Path) -> None:
    text = markdown(read_comparison(make(tmp_path / "one", ARMS, (0,), points=4, data=IMAGES, further=scores)))
    assert "The test accuracy (higher is better) of one seed: without a second there is no interval" in text
    assert "Holm's method" not in text
    assert "sign-flip test" not in text


def test_the_loss_decides_if_asked_for(images: Path) -> None:
    found = read_comparison(images, metric="loss")
    assert (found.metric, found.better, found.unit) == ("test loss", "lower", "nats")
    assert outcomes(found) == ["worse", "better"]
    assert found.arms[1].mean == pytest.approx(2.865)
    assert "Means over seeds of the test loss in nats (lower is better)" in markdown(found)
    assert "a difference of 0.01 nats with a chance" in markdown(found)


def test_an_error_is_better_when_lower(tmp_path: Path) -> None:
    folder = make(tmp_path / "t", ARMS, SEEDS, 4, data=TABLE, further=lambda cell: scores(cell, "rmse", "lower"))
    found = read_comparison(folder)
    assert (found.metric, outcomes(found)) == ("test rmse", ["worse", "better"])
    assert "test rmse in units of the target (lower is better)" in markdown(found)
    assert "difference of 0.01 units of the target with" in markdown(found)
    assert "test loss in variances of the target" in markdown(read_comparison(folder, metric="loss"))


POINTS = ("1", "2", "3")


def swept(cell: Cell) -> dict[str, Any]:
    """Point 2 is best on validation accuracy, 1 on test accuracy, 3 on both losses."""
    point = POINTS.index(cell.point[-1])
    shift = 0.001 * cell.seed
    return {
        "validation_metric": (0.5, 0.9, 0.6)[point] + shift,
        "test_metric": (0.95, 0.85, 0.6)[point] + shift,
        "validation_loss": 3.0 - point,
        "test_loss": 3.0 - point,
        "metric": "accuracy",
        "better": "higher",
    }


def test_the_point_is_chosen_on_validation_by_the_same_metric(tmp_path: Path) -> None:
    sweep = {"training.clip": POINTS}
    folder = make(tmp_path / "s", ARMS[:2], SEEDS[:2], 4, sweep=sweep, data=IMAGES, further=swept)
    found = read_comparison(folder)
    assert [(row.point, row.mean) for row in found.arms] == [("training.clip=2", pytest.approx(0.8505))] * 2
    assert "the sweep point with the highest validation accuracy over its seeds" in markdown(found)
    assert [(row.point, row.mean) for row in found.fixed] == [("training.clip=1", pytest.approx(0.9505))] * 2
    assert [row.point for row in read_comparison(folder, metric="loss").arms] == ["training.clip=3"] * 2
    picture = stability(read_account(folder))
    assert picture is not None
    assert picture.alt.startswith("Validation accuracy at the end against training.clip.")
    assert "training.clip=2: 0.90" in picture.alt
    assert "highest mean" in picture.note
    by_loss = stability(read_account(folder, metric="loss"))
    assert by_loss is not None
    assert "Validation loss at the end" in by_loss.alt
    assert "training.clip=3: 1.000" in by_loss.alt


def test_a_report_shows_metric_and_loss_and_finds_published_figures_by_name(images: Path) -> None:
    names = ("accuracy", "Test accuracy", "validation accuracy", "test loss", "validation loss", "loss")
    figures = [{"arm": "dyt", "metric": name, "value": 0.5, "source": "x"} for name in names]
    (images / "published.json").write_text(json.dumps(figures))
    account = read_account(images)
    ours = {name: account.figure_of(name, "dyt") for name in names}
    test = 0.765
    expected = (test, test, test + 0.1, test + 2, test + 1)
    assert [ours[name] for name in names[:-1]] == [pytest.approx(value) for value in expected]
    assert ours["loss"] is None
    assert {p.metric for p in account.published if account.measure.is_called(p.metric)} == {"accuracy", "Test accuracy"}
    picture = forest(account)
    assert picture is not None
    assert picture.alt.startswith("Differences in test accuracy to rmsnorm")
    write_study_report([images], images / "report.md")
    text = (images / "report.md").read_text()
    for said in (
        "| Test accuracy [95 %] |",
        "| Test accuracy (published) |",
        "| Validation accuracy | Test accuracy |",
    ):
        assert said in text
    by_loss = read_account(images, metric="loss")
    assert by_loss.figure_of("accuracy", "dyt") is None  # of which split is not said
    assert by_loss.figure_of("test accuracy", "dyt") == pytest.approx(test)


def test_a_run_without_the_metric_is_refused(images: Path) -> None:
    for name, damage in (("0", {"test_metric": float("nan")}), ("1", {"metric": "f1"})):
        path = images / "dyt" / name / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    found = read_comparison(images)
    assert found.arms[2].counts == {"finished": 2, "refused": 2}
    assert "dyt, seed 0: refused (result.json holds no finite test accuracy)" in markdown(found)
    assert read_comparison(images, metric="loss").arms[2].counts == {"finished": 4}


def test_metrics_that_runs_do_not_report(images: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="images: its runs report no metric 'f1'; write --metric loss or accuracy"):
        read_comparison(images, metric="f1")
    text = make(tmp_path / "text", ARMS[:2], SEEDS[:2], 4)
    assert read_comparison(text).unit == "nats per token"
    with pytest.raises(InputError, match="report no metric 'accuracy'; write --metric loss$"):
        read_comparison(text, metric="accuracy")
    with pytest.raises(UnknownNameError, match="unknown metric 'acuracy' in data of the kind 'images'; did you mean"):
        check_metric(find_recipe("digits-vit"), "acuracy")
    with pytest.raises(UnknownNameError, match="unknown metric 'rmse'"):
        check_metric(find_recipe("baseline-1m"), "rmse")
    for kind, task in TASKS.items():
        assert (task.metric is None) == (kind == "text")


def test_the_option_of_the_report(images: Path) -> None:
    for options, said in (
        ([], "accuracy): layernorm: better"),
        (["--metric", "loss"], "loss): layernorm: worse"),
    ):
        done = CliRunner().invoke(app, ["report", str(images), "-o", str(images / "r.csv"), *options])
        assert said in " ".join(done.output.split())


def test_language_models_are_judged_by_the_loss_whatever_else_their_runs_hold(tmp_path: Path) -> None:
    folder = make(tmp_path / "text", ARMS, SEEDS, 4, further=scores)
    assert read_comparison(folder).metric == "validation loss"
    assert read_comparison(folder, metric="accuracy").metric == "validation accuracy"


def test_a_folder_of_a_recipes_name_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits-vit").mkdir()
    assert find_recipe("digits-vit").data.kind == "images"


def test_runs_that_failed_take_what_the_others_would_win(images: Path) -> None:
    study = load_study(images)
    for cell in study.cells:
        if (cell.arm, cell.seed) in (("layernorm", SEEDS[-1]), ("rmsnorm", SEEDS[0])):
            (cell.folder / "result.json").unlink()
            record_failure(cell, "failed", "MemoryError: no memory")
    found = read_comparison(images, difference=0.002)
    better, worse = (row.verdict.text for row in found.arms[1:] if row.verdict is not None)
    assert outcomes(found) == ["unknown", "unknown"]
    assert better.startswith("no verdict: 1 of its 4 runs failed; the others: better by")
    assert worse.startswith("no verdict: 1 of the reference's 4 runs failed; the others: worse by")
    # The mean is over three seeds and the difference over two or three pairs: that is said where they are not equal.
    text = markdown(found)
    assert "(2 pairs)" in text
    assert "(3 pairs)" in text
    for pairs, smallest in ((2, "0.5"), (3, "0.25")):
        assert f"with {pairs} pairs its p cannot fall below {smallest} and can never reach 0.05" in text


def test_the_seeds_needed_are_those_of_the_corrected_test(images: Path) -> None:
    row = read_comparison(images, difference=0.002).arms[1]
    assert row.paired is not None
    assert row.paired.deviation is not None
    assert row.needed_seeds == needed_pairs(0.002, row.paired.deviation, alpha=0.025)  # two arms are tested
