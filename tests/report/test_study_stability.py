"""The stability picture: together while that can be read, else a panel for each arm."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from normsmith.report.account import read_account
from normsmith.report.pictures import Picture
from normsmith.report.stability import MOST_TOGETHER, stability
from normsmith.studies.study import Cell
from tests.report.synthetic import make

RATES = ("1e-1", "1e-3", "1e-2")
ARMS = ("rmsnorm", "layernorm", "dyt", "derf", "scalenorm", "adanorm", "post", "peri", "keel", "sandwich")


def picture(folder: Path) -> Picture:
    found = stability(read_account(folder))
    assert found is not None
    return found


def drawn(found: Picture) -> str:
    return base64.b64decode(found.light.partition(",")[2]).decode()


def words(found: Picture) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawn(found))


@pytest.mark.parametrize("count", [MOST_TOGETHER, MOST_TOGETHER + 1, len(ARMS)])
def test_many_arms_get_a_panel_each(count: int, tmp_path: Path) -> None:
    def diverge(cell: Cell) -> bool:
        return cell.arm == "dyt" and cell.point.endswith("1e-1")

    arms = ARMS[:count]
    rates: dict[str, tuple[str, ...]] = {"training.learning_rate": RATES}
    found = picture(make(tmp_path / "s", arms, range(7), 4, sweep=rates, diverge=diverge))
    said = words(found)
    assert [word for word in said if word in ARMS] == list(arms)
    assert ("One panel for each arm" in found.note) == (count > MOST_TOGETHER)
    assert said.count("7") == 1  # the runs of one arm that diverged, beside their cross
    # From the smallest value to the largest, whatever the order in which they were written.
    assert found.alt.index("learning_rate=1e-3") < found.alt.index("learning_rate=1e-2")
    if count > MOST_TOGETHER:
        ends = [word for word in said if word in RATES]
        assert ends == ["1e-3", "1e-1"] * 4


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_panel_cuts_off_what_is_far_worse_and_says_so(better: str, tmp_path: Path) -> None:
    far = {"lower": 90.0, "higher": -80.0}[better]

    def further(cell: Cell) -> dict[str, Any]:
        value = far if (cell.arm, cell.point[-4:]) == ("keel", "1e-2") else 3 + 0.1 * ARMS.index(cell.arm)
        values = {f"{split}_{kind}": value for split in ("validation", "test") for kind in ("metric", "loss")}
        return {**values, "metric": "rmse" if better == "lower" else "accuracy", "better": better}

    data = {"kind": "images"}
    found = picture(make(tmp_path / "s", ARMS, sweep={"training.learning_rate": RATES}, data=data, further=further))
    ticks = [float(word.replace("−", "-")) for word in words(found) if re.fullmatch(r"[-−]?\d+(\.\d+)?", word)]
    assert ticks
    assert max(map(abs, ticks)) < 10
    assert f"{far:.3f}" in found.alt


@pytest.mark.parametrize("rates", [("1e-3", "2e-3", "5e-3"), ("1e-3", "2e-3", "4e-3", "8e-3")])
def test_ticks_are_plain_numbers_over_any_range(rates: tuple[str, ...], tmp_path: Path) -> None:
    found = picture(make(tmp_path / "s", ARMS[:2], sweep={"training.learning_rate": rates}))
    assert not [word for word in words(found) if "math" in word or "$" in word]


def test_one_point_and_settings_without_an_order_are_drawn_too(tmp_path: Path) -> None:
    one = picture(make(tmp_path / "one", ARMS, sweep={"training.learning_rate": ("1e-2",)}))
    assert words(one).count("1e-2") == 4
    named = picture(make(tmp_path / "named", ARMS, sweep={"model.preset": ("llama", "gpt")}))
    assert [word for word in words(named) if word in ("llama", "gpt")] == ["llama", "gpt"] * 4
