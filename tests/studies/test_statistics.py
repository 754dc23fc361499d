"""Statistics: against hand-computed numbers, against scipy, and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from normsmith.errors import InputError
from normsmith.studies.comparison import ArmRow, Comparison
from normsmith.studies.statistics import (
    ALPHA,
    BOOTSTRAP,
    bootstrap_interval,
    compare_paired,
    effect_size,
    holm,
    needed_pairs,
    power_of,
    sign_flip,
    t_interval,
    t_test,
    verdict,
    wilcoxon,
)

FIVE = [0.3, -0.1, 0.4, 0.2, 0.7]


def draws(n: int, count: int, mean: float = 0.0, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1.0, (count, n))


def within(hits: int, count: int, rate: float) -> bool:
    """Whether `hits` of `count` is what a chance of `rate` gives, in its 99.9 % binomial interval."""
    low, high = stats.binom.interval(0.999, count, rate)
    return bool(low <= hits <= high)


def test_t_test_and_interval_by_hand_and_as_in_scipy() -> None:
    # mean 0.3, squared deviations 0 + .16 + .01 + .01 + .16 = .34, s = √.085, standard error s/√5 = 0.130384
    low, high = t_interval(FIVE)
    assert (low, high) == pytest.approx((0.3 - 2.776445 * 0.130384, 0.3 + 2.776445 * 0.130384), abs=1e-6)
    theirs = stats.ttest_1samp(FIVE, 0.0)
    assert t_test(FIVE) == pytest.approx(theirs.pvalue, rel=1e-12)
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-12)
    assert t_test([0.0, 0.0, 0.0]) == 1.0


def test_sign_flip_by_hand() -> None:
    # |±1 ±2 ±4| ≥ 7 for two of eight; with −1 the observed sum is 5: ±(1+2+4) and ±(−1+2+4), four of eight
    assert sign_flip([1, 2, 4]) == 2 / 8
    assert sign_flip([-1, 2, 4]) == 4 / 8
    assert sign_flip([0, 0]) == 1.0
    signs = itertools.product([1, -1], repeat=5)
    count = sum(abs(np.dot(s, FIVE)) >= abs(sum(FIVE)) - 1e-12 for s in signs)
    assert sign_flip(FIVE) == count / 32


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12])
def test_the_smallest_p_of_the_sign_flip_test(n: int) -> None:
    found = compare_paired(np.linspace(1, 2, n))
    assert found.p_sign_flip == found.p_wilcoxon == found.p_smallest == 2.0 ** (1 - n)


def test_sign_flip_as_in_scipy_exact_and_by_resampling() -> None:
    def mean(x: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(x, axis=axis)

    d = draws(9, 1, 0.7)[0]
    theirs = stats.permutation_test((d,), mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d) == pytest.approx(theirs.pvalue, rel=1e-12)
    many = draws(17, 1, 0.4)[0]  # above the limit of the exact test
    exact = stats.permutation_test((many,), mean, permutation_type="samples", n_resamples=np.inf).pvalue
    assert sign_flip(many) == pytest.approx(exact, abs=4 * math.sqrt(exact / 1e5))
    assert sign_flip(many) != pytest.approx(exact, abs=1e-12)
    assert sign_flip(many) == sign_flip(many)


@pytest.mark.parametrize("n", [3, 6, 11, 16])
def test_wilcoxon_as_in_scipy(n: int) -> None:
    d = draws(n, 1, 0.5, seed=n)[0]
    assert wilcoxon(d) == pytest.approx(stats.wilcoxon(d, method="exact").pvalue, rel=1e-12)


def test_wilcoxon_with_zeros_and_ties_by_hand() -> None:
    # zeros dropped; |d| = 1, 1, 2 have ranks 1.5, 1.5, 3: only all-positive and all-negative reach 6
    assert wilcoxon([0.0, 1.0, 1.0, 2.0]) == 2 / 8
    # −1.5 + 1.5 + 3 = 3: |±1.5 ±1.5 ±3| is 6, 3, 3, 0, 0, 3, 3, 6, so six of eight
    assert wilcoxon([-1.0, 1.0, 2.0]) == 6 / 8
    assert wilcoxon([0.0, 0.0]) == 1.0


def test_wilcoxon_ties_what_rounding_alone_tells_apart() -> None:
    accuracies = ((0.9, 0.8), (0.7, 0.8), (0.4, 0.3), (0.6, 0.5), (0.2, 0.1), (0.3, 0.3 + 1e-17))
    assert wilcoxon([a - b for a, b in accuracies]) == wilcoxon([1.0, -1.0, 1.0, 1.0, 1.0]) == 0.375


def test_the_bootstrap_is_that_of_scipy_on_the_same_draws() -> None:
    theirs = stats.bootstrap(
        (np.array(FIVE),), np.mean, n_resamples=BOOTSTRAP, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    ours = bootstrap_interval(FIVE)
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.01)
    assert ours == bootstrap_interval(FIVE)
    assert ours[0] < np.mean(FIVE) < ours[1]


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_effect_size_by_hand() -> None:
    # d_z = 0.3/√.085 = 1.0289915; J(4) = Γ(2)/(√2·Γ(1.5)) = 1/(1.4142136·0.8862269) = 0.7978846
    assert effect_size(FIVE) == pytest.approx(1.0289915 * 0.7978846, rel=1e-6)
    assert effect_size([1.0, 2.0]) is None
    assert effect_size([1.0, 1.0, 1.0]) is None


def test_power_is_that_of_the_tables() -> None:
    # Cohen's tables and every power calculator: d_z = 0.5, α = .05 two-sided, power .8 → 34 pairs; 0.8 → 15; 1 → 10
    assert [needed_pairs(d, 1.0) for d in (0.5, 0.8, 1.0)] == [34, 15, 10]
    assert needed_pairs(0.2, 1.0) == 199
    assert needed_pairs(5.0, 10.0) == 34
    assert needed_pairs(0.1, 0.0) == 2
    assert needed_pairs(100.0, 1.0) == 2
    assert needed_pairs(1e-4, 1.0) is None
    assert 0.8 <= power_of(34, 0.5, 1.0) < 0.82
    assert power_of(33, 0.5, 1.0) < 0.8
    assert power_of(1000, 5.0, 1.0) == pytest.approx(1.0)
    for wrong in [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0)]:
        with pytest.raises(InputError, match="give a difference above zero"):
            needed_pairs(*wrong)


@pytest.mark.parametrize("n", [2, 5, 10])
def test_false_positives_of_the_t_test_are_as_many_as_stated(n: int) -> None:
    count = 3000
    assert within(sum(t_test(d) <= ALPHA for d in draws(n, count, seed=n)), count, ALPHA)


def test_false_positives_of_the_sign_flip_test_are_as_many_as_it_can_have() -> None:
    count = 2000  # eight pairs: p is a multiple of 2/256, so the level that is really used is 12/256
    assert within(sum(sign_flip(d) <= ALPHA for d in draws(8, count, seed=3)), count, 12 / 256)
    assert not any(sign_flip(d) <= ALPHA for d in draws(5, 200, mean=2.0))  # five pairs can never convince


def test_t_intervals_hold_the_truth_as_often_as_they_say() -> None:
    count = 2000
    hits = sum(low <= 0.7 <= high for low, high in map(t_interval, draws(5, count, mean=0.7, seed=4)))
    assert within(hits, count, 0.95)


def test_power_is_reached_and_not_one_pair_earlier() -> None:
    n, count = needed_pairs(1.0, 1.0), 3000
    assert n is not None
    for pairs in (n, n - 1):
        hits = sum(t_test(d) <= ALPHA for d in draws(pairs, count, mean=1.0, seed=pairs))
        assert within(hits, count, power_of(pairs, 1.0, 1.0))
    assert power_of(n - 1, 1.0, 1.0) < 0.8 <= power_of(n, 1.0, 1.0)


def test_over_several_arms_a_verdict_is_wrong_at_most_as_often_as_stated() -> None:
    wrong, count = 0, 1000
    for row in draws(6 * 4, count, seed=9):
        reference, *arms = row.reshape(4, 6)
        found = [arm - reference for arm in arms]
        wrong += any(p <= ALPHA for p in holm([t_test(d) for d in found]))
    assert stats.binomtest(wrong, count, ALPHA, "greater").pvalue > 0.001
    assert wrong > count * 0.02  # a correction that never lets anything through would pass the line above


def judged(differences: list[float], arms: int = 1) -> tuple[str, str]:
    found = compare_paired(differences)
    p = None if found.p_t is None else min(1.0, arms * found.p_t)
    said = verdict(found, p)
    return said.outcome, said.text


def test_a_verdict_knows_which_values_are_better() -> None:
    rise = compare_paired([0.5, 0.6, 0.55, 0.52])
    for better, word in (("lower", "worse"), ("higher", "better")):
        said = verdict(rise, 0.01, better=better)  # pyright: ignore[reportArgumentType]
        assert (said.outcome, said.text.split(" [")[0]) == (word, f"{word} by 0.5425")


def test_verdicts_in_words() -> None:
    clear = [-0.30, -0.31, -0.29]
    assert judged(clear) == ("better", "better by 0.3 [0.2752, 0.3248]")
    assert judged([-d for d in clear]) == ("worse", "worse by 0.3 [0.2752, 0.3248]")
    assert judged([0.1, -0.1, 0.2]) == ("none", "no difference seen")
    assert judged([]) == ("unknown", "no verdict: no seed finished in both arms")
    assert judged([-5.0]) == ("unknown", "no verdict: one seed")
    assert judged([-0.5, -0.5]) == ("unknown", "no verdict: the difference does not depend on the seed")
    assert judged([0.0, 0.0]) == ("none", "no difference seen")
    assert judged([-0.3, -0.4])[0] == "none"  # two seeds, 1 degree of freedom: p = 0.09
    assert judged(clear, arms=200)[0] == "none"  # what one arm shows, the best of two hundred does not


def test_differences_that_are_equal_but_for_rounding_have_no_spread() -> None:
    accuracies = [[(i + 2) / n - i / n, (i + 5) / n - (i + 3) / n] for n in (100, 360, 872) for i in range(0, n - 5, 9)]
    assert any(np.ptp(pair) > 0 for pair in accuracies)
    for differences in (*accuracies, [0.1, 0.1, 0.1], [247.1 + 5e4 - 5e4, 247.1]):
        found = compare_paired(differences)
        assert (found.deviation, found.effect, found.p_t, found.low) == (0, None, None, None)
        assert judged(differences) == ("unknown", "no verdict: the difference does not depend on the seed")
    assert compare_paired([0.1, 0.1 + 1e-7]).deviation == pytest.approx(1e-7 / math.sqrt(2))


@pytest.mark.parametrize(
    ("values", "decimals"),
    [
        ((0.5, 0.6), 4),
        ((3.7, 40.0), 4),
        ((52911.0, 53158.0), 1),
        ((2.1e-5, 2.6e-5), 8),
        ((0.012, 0.02), 5),
        ((0.0,), 4),
        ((), 4),
    ],
)
def test_tables_show_as_many_decimals_as_the_values_need(values: tuple[float, ...], decimals: int) -> None:
    arms = tuple(ArmRow.model_construct(mean=value) for value in values)
    assert Comparison.model_construct(arms=arms).decimals == decimals


def test_values_that_are_no_numbers_are_refused() -> None:
    for values in ([0.1, math.nan], [math.inf], [[1.0]]):
        with pytest.raises(InputError, match="not a list of finite numbers"):
            compare_paired(values)  # pyright: ignore[reportArgumentType]
