"""Two models on the same items: the difference within each item, which is far less noisy than that of two scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.evaluation.results import Evaluation, ItemValues, Score
from normsmith.studies.statistics import ALPHA, Outcome, Values, deviation_of, holm, t_interval, t_test


class ItemComparison(Config):
    """One metric of two models on the same items.

    Attributes:
        task: name of the benchmark.
        metric: name of the number in it.
        pairs: how many items.
        value: of the first model.
        other: of the second.
        difference: first − second; for perplexities and bits of their logarithms, in nats per word, byte or item.
        low: lower end of the 95 % t interval of the difference.
        high: its upper end.
        p: two-sided; for items that are right or wrong the exact McNemar test, which is the sign-flip test over the
            items on which the models disagree; otherwise the paired t test.
        p_adjusted: by Holm over all metrics compared here.
        outcome: better or worse (the first model) where `p_adjusted` is at most 0.05.
    """

    task: str
    metric: str
    pairs: int
    value: float
    other: float
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    outcome: Outcome


def check_comparable(earlier: Evaluation, tasks: Sequence[str], limit: int | None) -> None:
    """Whether an evaluation of these benchmarks could be paired with an earlier one, before it is made.

    Raises:
        InputError: another limit, or no benchmark in common.
    """
    before = earlier.settings.get("limit")
    if before != limit:
        how = "without --limit" if before is None else f"with --limit {before}"
        raise InputError(f"{earlier.model} was evaluated {how}: evaluate this model on the same items, {how}")
    if not set(tasks) & set(earlier.items):
        raise InputError(
            f"{earlier.model} was evaluated on {', '.join(earlier.items) or 'nothing'}, nothing of which is in "
            f"{', '.join(tasks)}"
        )


def pair_items(first: Evaluation, second: Evaluation) -> list[ItemComparison]:
    """Compare what a suite counts (without a suite: every metric) on the items that both models answered.

    Raises:
        InputError: no benchmark in common, or one whose items are not the same.
    """
    found: list[ItemComparison] = []
    other_scores = {(s.task, s.metric): s for s in second.scores}
    for score in first.scores:
        mine, theirs = first.items.get(score.task), second.items.get(score.task)
        twin = other_scores.get((score.task, score.metric))
        if mine is None or theirs is None or twin is None or (first.suite is not None and score.place is None):
            continue
        if mine.hashes != theirs.hashes:
            raise InputError(
                f"{score.task}: {first.model} answered {len(mine.hashes)} items and {second.model} "
                f"{len(theirs.hashes)}, not the same ones; evaluate both with the same data and --limit"
            )
        if score.metric in mine.metrics and score.metric in theirs.metrics:
            found.append(_compare(score, twin, mine.metrics[score.metric], theirs.metrics[score.metric]))
    if not found:
        raise InputError(f"{first.model} and {second.model} have no benchmark in common")
    return _judged(found, {(s.task, s.metric): s.higher for s in first.scores})


def _compare(score: Score, twin: Score, mine: ItemValues, theirs: ItemValues) -> ItemComparison:
    d = np.asarray(mine.values) - np.asarray(theirs.values)
    if mine.weights:  # so that the mean of the differences is that of the two weighted means
        d = d * (len(d) / sum(mine.weights))
    low, high = t_interval(d) if len(d) > 1 else (None, None)
    return ItemComparison(
        task=score.task,
        metric=score.metric,
        pairs=len(d),
        value=score.value if score.value is not None else float("nan"),
        other=twin.value if twin.value is not None else float("nan"),
        difference=float(d.mean()),
        low=low,
        high=high,
        p=_p(d, binary=set(mine.values) | set(theirs.values) <= {0.0, 1.0}),
        p_adjusted=None,
        outcome="unknown",
    )


def _p(d: Values, binary: bool) -> float | None:
    if binary:
        wins, losses = int((d > 0).sum()), int((d < 0).sum())
        return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    # Differences that are all alike (repeated items, for instance) have no spread that a t test could judge by.
    return t_test(d) if len(d) > 1 and (deviation_of(d) > 0 or not d.any()) else None


def _judged(found: list[ItemComparison], higher: dict[tuple[str, str], bool]) -> list[ItemComparison]:
    known = [c.p for c in found if c.p is not None]
    adjusted = iter(holm(known))
    judged: list[ItemComparison] = []
    for c in found:
        p = None if c.p is None else next(adjusted)
        outcome: Outcome = "unknown" if p is None else "none"
        if p is not None and p <= ALPHA:
            outcome = "better" if (c.difference > 0) == higher[c.task, c.metric] else "worse"
        judged.append(c.model_copy(update={"p_adjusted": p, "outcome": outcome}))
    return judged
