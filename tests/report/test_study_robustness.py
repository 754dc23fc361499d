"""What a report says of accuracy under corruptions: means with intervals, differences by seed, and every corruption."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from normsmith.report.account import read_account
from normsmith.report.attached import CORRUPTED
from normsmith.report.robustness_tables import corruptions_grid, robustness_grid
from normsmith.report.study_page import write_study_report
from normsmith.studies.study import Cell
from tests.report.synthetic import make

NAMES = ("fog", "snow")
VALUES = {"layernorm": [(0.5, 0.7), (0.52, 0.74), (0.4, 0.66)], "dyt": [(0.41, 0.75), (0.4, 0.76), (0.3, 0.71)]}


def further(cell: Cell) -> dict[str, float]:
    values = VALUES[cell.arm][cell.seed]
    panel = {"title": CORRUPTED, "x": NAMES, "series": {"accuracy": values}, "x_label": "Corruption"}
    (cell.folder / "diagnostics.json").write_text(json.dumps([panel]))
    return {"corrupted_accuracy": float(np.mean(values))}


@pytest.fixture
def corrupted(tmp_path: Path) -> Path:
    return make(tmp_path / "study", ["layernorm", "dyt"], further=further)


def test_arms_are_compared_by_seed(corrupted: Path) -> None:
    grid = robustness_grid(read_account(corrupted))
    assert grid is not None
    reference, other = grid.rows
    means = {arm: [float(np.mean(pair)) for pair in pairs] for arm, pairs in VALUES.items()}
    assert reference[2].value == pytest.approx(np.mean(means["layernorm"]))
    assert other[2].value == pytest.approx(np.mean(means["dyt"]))
    difference = np.array(means["dyt"]) - np.array(means["layernorm"])
    low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
    assert other[3].text == f"{difference.mean():+.4f} [{low:+.4f}, {high:+.4f}]".replace("-", "−")
    assert other[4].value == pytest.approx(stats.ttest_rel(means["dyt"], means["layernorm"]).pvalue)


def test_every_corruption_has_a_line_the_hardest_first(corrupted: Path) -> None:
    grid = corruptions_grid(read_account(corrupted))
    assert grid is not None
    assert [row[0].text for row in grid.rows] == ["fog", "snow"]
    assert [heading.title for heading in grid.headings] == ["Corruption", "layernorm", "dyt"]
    assert [entry.value for entry in grid.rows[0][1:]] == pytest.approx(
        [(0.5 + 0.52 + 0.4) / 3, (0.41 + 0.4 + 0.3) / 3]
    )


def test_pages_show_it_and_others_do_not(corrupted: Path, tmp_path: Path) -> None:
    write_study_report([corrupted], tmp_path / "with.html")
    text = (tmp_path / "with.html").read_text(encoding="utf-8")
    assert re.findall("<h2[^>]*>(Accuracy [^<]*)</h2>", text) == [
        "Accuracy under corruptions",
        "Accuracy by corruption",
    ]
    plain = make(tmp_path / "plain", ["layernorm", "dyt"])
    assert robustness_grid(read_account(plain)) is None
    assert corruptions_grid(read_account(plain)) is None


def test_a_run_that_measured_nothing_is_no_pair(corrupted: Path) -> None:
    path = corrupted / "dyt/2/result.json"
    result = json.loads(path.read_text())
    del result["corrupted_accuracy"]
    path.write_text(json.dumps(result))
    grid = robustness_grid(read_account(corrupted))
    assert grid is not None
    assert [row[1].text for row in grid.rows] == ["3", "2"]
    assert grid.rows[1][3].value == pytest.approx(((0.58 - 0.6) + (0.58 - 0.63)) / 2)
