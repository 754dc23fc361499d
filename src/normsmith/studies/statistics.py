"""Evidence for or against a difference between two arms that ran with the same seeds.

Two runs with one seed share their initial weights and their batches, so what is compared is the difference within each
pair; the spread between seeds cancels. Everything here takes such differences, `arm − reference`, one per seed (or per
item of an evaluation suite).

The verdict rests on the paired t test. The sign-flip test needs no normality, but with n pairs its p cannot fall below
2^(1−n) (0.0625 for five), so for few seeds it can warn and never convince; both are printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from normsmith.config import Config
from normsmith.errors import InputError

Values = npt.NDArray[np.float64]

EXACT_PAIRS = 16
"""Up to this many pairs all 2^n signs are enumerated; beyond, `RESAMPLES` random ones."""
RESAMPLES = 99_999
BOOTSTRAP = 9_999
ALPHA = 0.05
MOST_PAIRS = 100_000
"""`needed_pairs` gives up here: no study has that many seeds."""

Outcome = Literal["better", "worse", "none", "unknown"]


class Paired(Config):
    """What the differences of one arm to the reference say; a number that does not exist for so few pairs is None.

    Attributes:
        pairs: how many differences.
        mean: of the differences, `arm − reference`.
        deviation: their standard deviation (n − 1).
        low: lower end of the 95 % t interval of the mean.
        high: its upper end.
        bootstrap_low: lower end of the 95 % percentile bootstrap interval (`BOOTSTRAP` resamples, fixed generator); too
            narrow for few pairs, so it is for comparison only.
        bootstrap_high: its upper end.
        p_t: two-sided p of the paired t test; like its interval, None for equal differences that are not zero.
        p_sign_flip: two-sided p of the sign-flip permutation test.
        p_wilcoxon: two-sided p of the Wilcoxon signed-rank test.
        p_smallest: the smallest p that the last two can reach with so many pairs, 2^(1−n).
        effect: Cohen's d_z with Hedges' correction for small samples.
    """

    pairs: int
    mean: float | None = None
    deviation: float | None = None
    low: float | None = None
    high: float | None = None
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    p_t: float | None = None
    p_sign_flip: float | None = None
    p_wilcoxon: float | None = None
    p_smallest: float | None = None
    effect: float | None = None


class Verdict(Config):
    """A conclusion and the sentence that says it."""

    outcome: Outcome
    text: str


def compare_paired(differences: Sequence[float] | Values) -> Paired:
    """All the numbers for `differences (n,)`.

    Raises:
        InputError: a difference that is not finite; leave such pairs out and count them.
    """
    d = _values(differences)
    n = len(d)
    if n < 2:
        return Paired(pairs=n, mean=float(d[0]) if n else None)
    # Noise that happens to be equal to the last bit is not noise: a t of infinity would be believed.
    judged = deviation_of(d) > 0 or not d.any()
    low, high = t_interval(d) if judged else (None, None)
    bootstrap_low, bootstrap_high = bootstrap_interval(d)
    return Paired(
        pairs=n,
        mean=float(d.mean()),
        deviation=deviation_of(d),
        low=low,
        high=high,
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        p_t=t_test(d) if judged else None,
        p_sign_flip=sign_flip(d),
        p_wilcoxon=wilcoxon(d),
        p_smallest=2.0 ** (1 - n),
        effect=effect_size(d),
    )


def _values(values: Sequence[float] | Values) -> Values:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise InputError(f"the values {array.tolist()} are not a list of finite numbers; leave out what did not finish")
    return array


def deviation_of(values: Sequence[float] | Values) -> float:
    """s with n − 1 in the denominator, for n ≥ 2; exactly 0 where the values differ by rounding alone.

    Accuracies that both differ by two images of 360 have differences that are equal but for their last bits.
    """
    x = _values(values)
    return 0.0 if np.ptp(x) <= 1e-9 * np.abs(x).max() else float(x.std(ddof=1))


def t_interval(values: Sequence[float] | Values, level: float = 0.95) -> tuple[float, float]:
    """x̄ ± t(n−1)·s/√n for n ≥ 2 values."""
    x = _values(values)
    half = float(stats.t.ppf((1 + level) / 2, len(x) - 1) * deviation_of(x) / math.sqrt(len(x)))
    return float(x.mean()) - half, float(x.mean()) + half


def bootstrap_interval(values: Sequence[float] | Values, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean: its quantiles over `BOOTSTRAP` resamples with replacement."""
    x = _values(values)
    rows = np.random.default_rng(seed).integers(0, len(x), (BOOTSTRAP, len(x)))
    low, high = np.quantile(x[rows].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def t_test(differences: Sequence[float] | Values) -> float:
    """Two-sided p of the paired t test, t = x̄/(s/√n), for n ≥ 2; 1 where all are zero, 0 where all are equal."""
    d = _values(differences)
    spread = deviation_of(d)
    if spread == 0:
        return 1.0 if d.mean() == 0 else 0.0
    return float(2 * stats.t.sf(abs(d.mean()) / (spread / math.sqrt(len(d))), len(d) - 1))


def sign_flip(values: Sequence[float] | Values, seed: int = 0) -> float:
    """Two-sided p of the permutation test that flips signs: how often |Σ ±x| ≥ |Σ x|.

    Exact over all 2^n signs for n ≤ `EXACT_PAIRS`; beyond, (b + 1)/(m + 1) with m = `RESAMPLES` random ones.
    """
    x = _values(values)
    n, observed = len(x), abs(float(x.sum()))
    limit = observed - 1e-12 * float(np.abs(x).sum())  # sums of the same numbers in another order are equal
    if n <= EXACT_PAIRS:
        # |Σ| is the same for a choice of signs and its opposite, so the first sign stays.
        choices = np.arange(2 ** max(n - 1, 0))[:, None] >> np.arange(max(n - 1, 0)) & 1
        sums = x[:1].sum() + (1.0 - 2.0 * choices) @ x[1:]
        return float(np.mean(np.abs(sums) >= limit))
    rng = np.random.default_rng(seed)
    hits, left = 0, RESAMPLES
    while left:
        m = min(left, 10_000)
        hits += int(np.sum(np.abs((1.0 - 2.0 * rng.integers(0, 2, (m, n))) @ x) >= limit))
        left -= m
    return (hits + 1) / (RESAMPLES + 1)


def wilcoxon(differences: Sequence[float] | Values) -> float:
    """Two-sided p of the signed-rank test: sign flips of the ranks of |d|, zeros dropped, ties at their mean rank.

    Values that differ by rounding alone, as differences of equal accuracies do, are zero or tied.
    """
    d = _values(differences)
    sizes = np.round(np.abs(d) / max(float(np.abs(d).max(initial=0.0)), 1e-300), 9)
    d, sizes = d[sizes > 0], sizes[sizes > 0]
    return sign_flip(np.sign(d) * stats.rankdata(sizes)) if len(d) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: sorted upwards, p_(i)·(m − i) made monotone and cut at 1; in the order given."""
    m = len(p_values)
    adjusted, running = [0.0] * m, 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def effect_size(differences: Sequence[float] | Values) -> float | None:
    """d_z = x̄/s times J = Γ(f/2)/(√(f/2)·Γ((f−1)/2)), f = n − 1; None for fewer than three or equal differences."""
    d = _values(differences)
    f = len(d) - 1
    if f < 2 or deviation_of(d) == 0:
        return None
    correction = math.exp(special.gammaln(f / 2) - special.gammaln((f - 1) / 2)) / math.sqrt(f / 2)
    return float(d.mean()) / deviation_of(d) * correction


def power_of(pairs: int, difference: float, deviation: float, alpha: float = ALPHA) -> float:
    """Chance that the two-sided paired t test sees a true mean `difference`, from the noncentral t distribution."""
    shift = abs(difference) / deviation * math.sqrt(pairs)
    critical = float(stats.t.ppf(1 - alpha / 2, pairs - 1))
    distribution: Any = stats.nct
    # Far out scipy gives NaN: the chance of a significant result in the wrong direction is zero there.
    wrong = float(np.nan_to_num(distribution.cdf(-critical, pairs - 1, shift)))
    right = float(distribution.sf(critical, pairs - 1, shift))
    return 1.0 if math.isnan(right) else right + wrong


def needed_pairs(difference: float, deviation: float, power: float = 0.8, alpha: float = ALPHA) -> int | None:
    """The smallest number of pairs with which the paired t test sees `difference` with chance `power`.

    None where more than `MOST_PAIRS` would be needed.

    Raises:
        InputError: the difference is not positive, or the deviation negative.
    """
    if not (difference > 0 and deviation >= 0 and math.isfinite(difference) and math.isfinite(deviation)):
        raise InputError(f"a difference of {difference:g} with deviation {deviation:g}: give a difference above zero")
    if deviation == 0 or power_of(2, difference, deviation, alpha) >= power:
        return 2
    high = 3
    while power_of(high, difference, deviation, alpha) < power:
        if high >= MOST_PAIRS:
            return None
        high = min(2 * high, MOST_PAIRS)
    low = 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle, difference, deviation, alpha) >= power else (middle, high)
    return high


def verdict(
    found: Paired,
    p_adjusted: float | None,
    alpha: float = ALPHA,
    unit: str = "",
    better: Literal["higher", "lower"] = "lower",
) -> Verdict:
    """Say in words what `found` shows about a metric of which the values that `better` names are better.

    Better or worse needs at least two pairs and a t test whose p, corrected for the number of arms, is at most `alpha`.
    """
    if found.pairs == 0:
        return Verdict(outcome="unknown", text="no verdict: no seed finished in both arms")
    if found.deviation == 0 and found.mean != 0:
        return Verdict(outcome="unknown", text="no verdict: the difference does not depend on the seed")
    if found.pairs == 1 or found.mean is None or found.low is None or found.high is None or p_adjusted is None:
        return Verdict(outcome="unknown", text="no verdict: one seed")
    if p_adjusted > alpha:
        return Verdict(outcome="none", text="no difference seen")
    low, high = sorted((abs(found.low), abs(found.high)))
    word: Outcome = "better" if (found.mean < 0) == (better == "lower") else "worse"
    return Verdict(
        outcome=word,
        text=f"{word} by {abs(found.mean):.4g} [{low:.4g}, {high:.4g}]{unit}",
    )
