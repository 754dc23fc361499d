"""Curves of runs: thinned without losing an extreme, in bands over seeds; a large study is quick and small."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normsmith.report.account import read_account
from normsmith.report.curves import Band, Curve, band_of, read_curves, split_key, thin, thin_band
from normsmith.report.diagnostic_pictures import short_names
from normsmith.report.drawing import shorten
from tests.report.synthetic import make


@pytest.mark.parametrize("length", [1, 2, 262, 263, 1000, 5003])
def test_thinning_keeps_extremes_and_ends(length: int) -> None:
    rng = np.random.default_rng(length)
    steps = np.cumsum(rng.integers(1, 9, length))
    values = rng.normal(size=length)
    values[length // 3] = 50.0
    values[length // 2] = -50.0
    kept_steps, kept = thin(steps, values, 130)
    assert len(kept) <= 262
    assert (kept.max(), kept.min()) == (values.max(), values.min())
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    assert set(zip(kept_steps.tolist(), kept.tolist(), strict=True)) <= set(
        zip(steps.tolist(), values.tolist(), strict=True)
    )
    assert np.all(np.diff(kept_steps) > 0)


def test_a_thinned_band_contains_the_band() -> None:
    rng = np.random.default_rng(3)
    steps = np.arange(1, 2001)
    low = rng.normal(size=2000)
    band = Band(steps, low + 0.5, low, low + rng.uniform(0, 3, 2000), 4)
    x, under, over = thin_band(band, 100)
    assert len(x) == 200
    assert np.all(np.interp(steps, x, under) <= band.low + 1e-12)
    assert np.all(np.interp(steps, x, over) >= band.high - 1e-12)


def test_bands_are_mean_and_range_over_the_runs_that_have_a_step() -> None:
    curves = [Curve(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), Curve(np.array([2, 3]), np.array([4.0, 9.0]))]
    band = band_of([*curves, Curve(np.array([], dtype=int), np.array([]))])
    assert (band.steps.tolist(), band.mean.tolist(), band.runs) == ([1, 2, 3], [1.0, 3.0, 6.0], 2)
    assert (band.low.tolist(), band.high.tolist()) == ([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])


def test_logs_become_curves_by_quantity_and_member() -> None:
    entries = [
        {"step": 1, "a/x.0": 1, "b": [1.0, None], "flag": True, "word": "no"},
        {"step": 4, "a/x.0": 2.0, "c.7": 3},
    ]
    curves, broken = read_curves(entries)
    assert {key: curve.values.tolist() for key, curve in curves.items()} == {
        ("a", "x.0"): [1.0, 2.0],
        ("b", "0"): [1.0],
        ("c", "7"): [3.0],
    }
    assert broken == [1]
    assert curves["a", "x.0"].steps.tolist() == [1, 4]
    assert split_key("/x") == ("/x", "")


# Size and time


@pytest.mark.slow
def test_two_hundred_runs_of_a_thousand_points_are_quick_and_small(tmp_path: Path) -> None:
    arms = ("rmsnorm", "layernorm", "dyt", "taper", *(f"set:training.learning_rate={i}e-3" for i in range(1, 7)))

    def log(arm: int, seed: int, step: int) -> dict[str, Any]:
        return {"gate_entropy": math.sin(step * (arm + 1)), "logit_norm": 3 + math.cos(step * 0.1 + seed)}

    folder = make(tmp_path / "st", arms=arms, seeds=range(20), points=1000, log=log)
    read_account(folder)  # what `compare` has done at its end
    output = tmp_path / "report.html"
    code = (
        "import sys, time; from pathlib import Path; from normsmith.report.study_page import write_study_report as w;"
        "w([Path(sys.argv[1])], Path(sys.argv[2])); print(time.process_time())"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(output)], check=True, capture_output=True, text=True
    )
    print(f"{time.perf_counter() - started:.1f} s by the clock, {done.stdout.strip()} s of the processor")  # noqa: T201
    assert float(done.stdout) < 10  # processor time: the tests' machine may be busy with other things
    assert output.stat().st_size < 5_000_000


def test_long_names_lose_their_middle_because_arms_differ_at_their_ends() -> None:
    arms = ["autonorm:pool=sequence+gate_freeze", "autonorm:pool=sequence+gate_freeze:rule=always"]
    short = [shorten(arm) for arm in arms]
    assert short == ["autonorm:pool=s…ce+gate_freeze", "autonorm:pool=s…ze:rule=always"]
    assert [shorten("abcdefgh", n) for n in (8, 7, 6)] == ["abcdefgh", "abc…fgh", "abc…gh"]


def test_places_are_called_by_what_tells_them_apart() -> None:
    sites = [f"model.layers.{i}.{part}.norm" for i in (0, 10) for part in ("attention", "mlp")]
    assert short_names([*sites, "model.norm"]) == ["0.attention", "0.mlp", "10.attention", "10.mlp", "norm"]
    ours = [f"model.layers.{i}.{part}_connection.norm" for i in (0, 1) for part in ("attention", "mlp")]
    assert short_names([*ours, "model.norm"]) == ["0.attention", "0.mlp", "1.attention", "1.mlp", "norm"]
    theirs = [f"model.layers.0.{part}_layernorm" for part in ("input", "post_attention")]
    assert short_names([*theirs, "model.norm"]) == ["0.input", "0.post_attention", "norm"]
    assert short_names(["a.0.norm", "a.1.norm"]) == ["0.norm", "1.norm"]
    assert short_names(["h.0.ln_1", "h.0.ln_2", "ln_f"]) == ["0.ln_1", "0.ln_2", "ln_f"]
    # Two stacks number their layers alike: the whole names tell them apart.
    both = ["encoder.0.norm", "decoder.0.norm"]
    assert short_names(both) == both
    assert short_names(["early", "late"]) == ["early", "late"]
