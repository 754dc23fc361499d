"""Two models on the same items, against literal tests on the differences."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normsmith.errors import InputError
from normsmith.evaluation import Evaluation, Score
from normsmith.evaluation.results import ItemValues, TaskItems, aggregate, read_evaluation
from normsmith.studies.pairing import _p, check_comparable, pair_items

RIGHT = ([1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
RNG = np.random.default_rng(3)
WORDS = tuple(float(w) for w in RNG.integers(5, 300, 12))
LOSSES = tuple(tuple(float(w * x) for w, x in zip(WORDS, RNG.normal(m, 0.2, 12), strict=True)) for m in (3.0, 3.3))


def evaluation(which: int, hashes: str = "abcdefghijkl", **changes: Any) -> Evaluation:
    right = ItemValues(form="mean", values=tuple(float(x) for x in RIGHT[which]))
    pages = ItemValues(form="perplexity", values=LOSSES[which], weights=WORDS)
    scores = [
        Score(task="piqa", metric="acc", value=float(np.mean(RIGHT[which])), items=12, place=1),
        Score(task="wikitext", metric="word_perplexity", value=aggregate("perplexity", LOSSES[which], WORDS)[0],
              items=12, place=2, higher=False),
        Score(task="sciq", metric="acc_norm", place=3, missing="no file"),
        Score(task="piqa", metric="acc_norm", value=0.5, items=12),
    ]  # fmt: skip
    items = {
        "piqa": TaskItems(source="x", hashes=tuple(hashes), metrics={"acc": right, "acc_norm": right}),
        "wikitext": TaskItems(source="y", hashes=tuple(hashes), metrics={"word_perplexity": pages}),
    }
    fields: dict[str, Any] = {"model": f"m{which}", "suite": "s", "settings": {}, "scores": scores, "items": items}
    return Evaluation(**(fields | changes))


def test_right_and_wrong_by_flipping_every_sign() -> None:
    acc, _ = pair_items(evaluation(0), evaluation(1))
    d = np.array(RIGHT[0]) - np.array(RIGHT[1])
    moved = d[d != 0]
    sums = [abs(sum(s * x for s, x in zip(signs, moved, strict=True))) for signs in product((1, -1), repeat=len(moved))]
    assert acc.p == pytest.approx(np.mean([s >= abs(moved.sum()) for s in sums]))
    assert acc.p < 0.1
    assert (acc.difference, acc.pairs) == (pytest.approx(d.mean()), 12)
    half = stats.t.ppf(0.975, 11) * d.std(ddof=1) / math.sqrt(12)
    assert (acc.low, acc.high) == (pytest.approx(d.mean() - half), pytest.approx(d.mean() + half))


def test_perplexities_are_compared_in_their_logarithm() -> None:
    a, b = evaluation(0), evaluation(1)
    acc, words = pair_items(a, b)
    assert words.difference == pytest.approx(math.log(words.value / words.other))
    assert words.difference < 0
    d = (np.array(LOSSES[0]) - np.array(LOSSES[1])) / np.mean(WORDS)
    assert words.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    assert acc.p is not None
    assert words.p is not None
    assert (acc.p_adjusted, words.p_adjusted) == tuple(pytest.approx(p) for p in holm(acc.p, words.p))
    assert words.p_adjusted is not None
    assert words.p_adjusted < 0.05
    assert words.outcome == "better", "lower is better"
    assert pair_items(b, a)[1].outcome == "worse"


def holm(p: float, q: float) -> tuple[float, float]:
    low = min(p, q)
    return (min(1, 2 * low), max(2 * low, q)) if p == low else (max(2 * low, p), min(1, 2 * low))


def test_a_model_against_itself() -> None:
    for pair in pair_items(evaluation(0), evaluation(0)):
        assert (pair.difference, pair.p, pair.outcome) == (0, 1, "none")


def test_what_the_suite_does_not_count_is_left_out_but_for_single_tasks() -> None:
    assert [(p.task, p.metric) for p in pair_items(evaluation(0), evaluation(1))] == [
        ("piqa", "acc"),
        ("wikitext", "word_perplexity"),
    ]
    assert len(pair_items(evaluation(0, suite=None), evaluation(1))) == 3


def test_other_items_are_refused() -> None:
    with pytest.raises(InputError, match=r"piqa: m0 answered 12 items and m1 12, not the same ones"):
        pair_items(evaluation(0), evaluation(1, "abcdefghijkX"))
    with pytest.raises(InputError, match="m0 and m1 have no benchmark in common"):
        pair_items(evaluation(0), evaluation(1, items={}))


def test_results_survive_the_file_and_damaged_ones_are_named(tmp_path: Any) -> None:
    path = tmp_path / "a.json"
    evaluation(0).write(path)
    assert read_evaluation(path) == evaluation(0)
    path.write_text('{"model": "x"}')
    with pytest.raises(InputError, match=r"a.json: is no result of `normsmith eval`"):
        read_evaluation(path)
    with pytest.raises(InputError, match=r"nothing.json: no such file"):
        read_evaluation(tmp_path / "nothing.json")


def test_differences_that_are_all_alike_are_no_evidence() -> None:
    """Repeated items have no spread, and a t test would be infinitely sure."""
    assert _p(np.array([0.3, 0.3, 0.3]), binary=False) is None
    assert _p(np.zeros(3), binary=False) == 1.0
    assert _p(np.array([0.3, 0.2, 0.3]), binary=False) == pytest.approx(float(stats.ttest_1samp([0.3, 0.2, 0.3], 0)[1]))


def test_what_cannot_be_paired_is_known_before_it_is_evaluated() -> None:
    earlier = evaluation(0, settings={"limit": 50})
    check_comparable(earlier, ["sciq", "piqa"], 50)
    with pytest.raises(InputError, match="m0 was evaluated with --limit 50: evaluate this model on the same items"):
        check_comparable(earlier, ["piqa"], None)
    with pytest.raises(InputError, match="m0 was evaluated on piqa, wikitext, nothing of which is in copa"):
        check_comparable(earlier, ["copa"], 50)
