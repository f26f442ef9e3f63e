"""Bounds for small counts: how sure may an audit of `n` people be?

An audit sees `k` leaks among `n` people for the unlearned and for the gold model and wants to say something about the
*difference* of the true rates. Three questions, three tools:

* **Is the difference small?** One-sided Newcombe bounds (Wilson intervals combined, "method 10"), which keep their level
  near 0 where the textbook formula `p ± z·sqrt(pq/n)` has width zero. With no leak in either model the upper bound is
  `z²/(n + z²)`: 0.041 at 64 people, 0.026 at 100, 0.009 at 300. That is why margins depend on `n`.
* **What does "zero of n" mean?** The exact (Clopper-Pearson) upper bound `1 - alpha^(1/n)`: printed instead of "0 %".
* **Do the losses betray membership?** The area under the ROC curve against look-alikes, and a bootstrap of the
  *difference* to gold in which both models see the same resampled people (paired: most of the noise is the people).

The Newcombe bounds treat the two samples as independent although both models are asked about the same people. For models
that err on the same people this is conservative; it is the rule that INTERFACES fixes, so that rows can be rechecked.

Shape suffixes: `N` members, `M` non-members, `B` bootstrap resamples.

Sources: Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10; Wilson, JASA 22 (1927) 209-212; Clopper and
Pearson, Biometrika 26 (1934) 404-413; Mann and Whitney, Ann. Math. Stat. 18 (1947) 50-60; Efron and Tibshirani (1993).
"""

# ruff: noqa: N802 - shape suffixes in names (STYLE 2)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

ALPHA = 0.05  # one-sided level of every bound of an audit (INTERFACES 8)
MAX_PEOPLE = 1_000_000  # above this `people_to_decide` answers "no realistic number"


@dataclass(frozen=True, slots=True)
class Bounds:
    """An estimate with a lower and an upper bound, each of the stated one-sided level."""

    estimate: float
    low: float
    high: float


def wilson_bounds(count: float, n: float, alpha: float = ALPHA) -> Bounds:
    """One-sided Wilson score bounds of a rate.

    Args:
        count: successes, 0 ≤ count ≤ n; a fraction is allowed (used to ask what a larger sample would show).
        n: trials, > 0.
        alpha: one-sided level in (0, 0.5); 0.025 gives the ends of the usual two-sided 95 % interval.

    Returns:
        Rate with its two bounds, all in [0, 1].

    Raises:
        ValueError: for a count outside [0, n] or a level outside (0, 0.5).

    Source: Wilson 1927.
    """
    _require_count(count, n)
    z = _quantile(alpha)
    rate = count / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # The formula is exact at the borders; only rounding can leave [0, 1].
    low = 0.0 if count == 0 else max(0.0, centre - half)
    high = 1.0 if count == n else min(1.0, centre + half)
    return Bounds(rate, low, high)


def newcombe_bounds(
    count_1: float, n_1: float, count_2: float, n_2: float, alpha: float = ALPHA
) -> Bounds:
    """One-sided Newcombe bounds of the difference of two rates, `rate_1 - rate_2`.

    Args:
        count_1: successes of the first sample, 0 ≤ count_1 ≤ n_1.
        n_1: trials of the first sample, > 0.
        count_2: successes of the second sample, 0 ≤ count_2 ≤ n_2.
        n_2: trials of the second sample, > 0.
        alpha: one-sided level in (0, 0.5).

    Returns:
        Difference in [-1, 1] with its two bounds.

    Raises:
        ValueError: for impossible counts or levels.

    Source: Newcombe 1998, method 10.
    """
    first, second = wilson_bounds(count_1, n_1, alpha), wilson_bounds(count_2, n_2, alpha)
    difference = first.estimate - second.estimate
    low = difference - math.hypot(first.estimate - first.low, second.high - second.estimate)
    high = difference + math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Bounds(difference, max(-1.0, low), min(1.0, high))


def exact_upper(count: int, n: int, alpha: float = ALPHA) -> float:
    """Exact one-sided upper bound of a rate; `1 - alpha**(1/n)` when nothing was seen.

    Args:
        count: successes, 0 ≤ count ≤ n.
        n: trials, > 0.
        alpha: one-sided level in (0, 0.5).

    Returns:
        Largest rate under which so few successes still have probability ≥ alpha, in (0, 1].

    Raises:
        ValueError: for impossible counts or levels.

    Source: Clopper and Pearson 1934.
    """
    _require_count(count, n)
    _quantile(alpha)
    if count == n:
        return 1.0
    if count == 0:
        return float(1.0 - alpha ** (1.0 / n))
    return float(stats.beta.ppf(1.0 - alpha, count + 1, n - count))


def people_to_decide(
    rate_1: float, rate_2: float, margin: float, alpha: float = ALPHA
) -> int | None:
    """Smallest number of people at which the same two rates would decide against the margin.

    Args:
        rate_1: observed rate of the unlearned model, in [0, 1].
        rate_2: observed rate of the gold model, in [0, 1].
        margin: largest tolerated difference, in (0, 1).
        alpha: one-sided level in (0, 0.5).

    Returns:
        The smallest `n` for which the upper bound is ≤ margin (difference below it) or the lower bound is > margin
        (difference above it); `None` when the difference lies on the margin or more than a million people are needed.
    """
    passes = rate_1 - rate_2 < margin

    def decided(n: int) -> bool:
        bounds = newcombe_bounds(rate_1 * n, n, rate_2 * n, n, alpha)
        return bounds.high <= margin if passes else bounds.low > margin

    if not decided(MAX_PEOPLE):
        return None
    # The bounds close in on the difference as n grows, so bisection finds the first n that decides.
    low, high = 0, MAX_PEOPLE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high


def auc(members_N: NDArray[np.float64], others_M: NDArray[np.float64]) -> float:
    """Probability that a member scores above a non-member, ties counted half.

    Args:
        members_N: scores of members, finite, N ≥ 1; higher = more like a member.
        others_M: scores of non-members, finite, M ≥ 1.

    Returns:
        Area under the ROC curve in [0, 1]; 0.5 = no information. Far *below* 0.5 is information too.

    Raises:
        ValueError: if a side is empty or holds a value that is not finite.

    Source: Mann and Whitney 1947 (U / NM).
    """
    return float(_wins_NM(members_N, others_M).mean())


def auc_difference(
    first: tuple[NDArray[np.float64], NDArray[np.float64]],
    second: tuple[NDArray[np.float64], NDArray[np.float64]],
    generator: np.random.Generator,
    *,
    resamples: int = 2000,
    alpha: float = ALPHA,
) -> Bounds:
    """Difference of two AUCs over the same people, with paired bootstrap bounds.

    Members and non-members are resampled with replacement, once for both models: person i carries both scores. A
    resample is a vector of multiplicities, so all of them are two matrix products with the table of pairwise wins.

    Args:
        first: scores of the first model (members_N, others_M); higher = more like a member.
        second: scores of the second model, same people in the same order.
        generator: source of the resamples.
        resamples: number B of resamples, ≥ 100.
        alpha: level of each bound; 0.05 makes `low`..`high` a 90 % interval, the usual pair of one-sided tests.

    Returns:
        `auc(first) - auc(second)` with percentile bounds.

    Raises:
        ValueError: if the two models were not scored on equally many people.

    Source: Efron and Tibshirani 1993, percentile interval; the two one-sided tests of Schuirmann 1987.
    """
    return _percentiles(*resampled_wins(first, second, generator, resamples), alpha)


def resampled_wins(
    first: tuple[NDArray[np.float64], NDArray[np.float64]],
    second: tuple[NDArray[np.float64], NDArray[np.float64]],
    generator: np.random.Generator,
    resamples: int,
) -> tuple[float, NDArray[np.float64]]:
    """Difference of two AUCs, and what it is in each resample of people.

    Args:
        first: scores of the first model (members_N, others_M).
        second: scores of the second model, same people in the same order.
        generator: source of the resamples.
        resamples: number B of resamples, ≥ 100.

    Returns:
        (`auc(first) - auc(second)`, the B resampled differences).

    Raises:
        ValueError: if the two models were not scored on equally many people.
    """
    if [len(side) for side in first] != [len(side) for side in second]:
        raise ValueError(
            "expected scores of the same people for both models, got different numbers"
        )
    wins_NM = _wins_NM(*first) - _wins_NM(*second)
    num_members, num_others = wins_NM.shape
    members_BN = _multiplicities(num_members, resamples, generator)
    others_BM = _multiplicities(num_others, resamples, generator)
    differences_B = ((members_BN @ wins_NM) * others_BM).sum(axis=1) / (num_members * num_others)
    return float(wins_NM.mean()), differences_B


def mean_bounds(
    values_N: NDArray[np.float64],
    generator: np.random.Generator,
    *,
    resamples: int = 2000,
    alpha: float = ALPHA,
) -> Bounds:
    """Mean of one value per person, with bootstrap bounds over people.

    Args:
        values_N: one value per person (for a paired comparison: the difference), N ≥ 1, finite.
        generator: source of the resamples.
        resamples: number of resamples, ≥ 100.
        alpha: one-sided level of each bound.

    Returns:
        Mean with percentile bounds, in the unit of the values.

    Raises:
        ValueError: if there is no value or one is not finite.
    """
    return _percentiles(*resampled_means(values_N, generator, resamples), alpha)


def resampled_means(
    values_N: NDArray[np.float64], generator: np.random.Generator, resamples: int
) -> tuple[float, NDArray[np.float64]]:
    """Mean of one value per person, and what it is in each resample of people.

    Args:
        values_N: one value per person, N ≥ 1, finite.
        generator: source of the resamples.
        resamples: number B of resamples, ≥ 100.

    Returns:
        (mean, the B resampled means).

    Raises:
        ValueError: if there is no value or one is not finite.
    """
    values_N = _finite(values_N)
    resampled_B = _multiplicities(len(values_N), resamples, generator) @ values_N / len(values_N)
    return float(values_N.mean()), resampled_B


def cluster_bounds(
    values_by_person: Mapping[str, Sequence[float]],
    statistic: Callable[[NDArray[np.float64]], float],
    generator: np.random.Generator,
    *,
    resamples: int = 2000,
    alpha: float = ALPHA,
) -> Bounds:
    """Any statistic of records, with bootstrap bounds over *people*: a person comes with all records or with none.

    Records of one person are alike; resampling records would make intervals too narrow by up to the square root of the
    number of records per person.

    Args:
        values_by_person: person → one value per record, at least one person.
        statistic: vector of all records' values → number.
        generator: source of the resamples.
        resamples: number of resamples, ≥ 100.
        alpha: one-sided level of each bound.

    Returns:
        The statistic of all records with percentile bounds.

    Raises:
        ValueError: without a person, or with a value that is not finite.

    Source: Davison and Hinkley, Bootstrap Methods (1997), section 3.8.
    """
    people = [_finite(np.asarray(values)) for values in values_by_person.values()]
    if not people or resamples < 100:
        raise ValueError("expected at least one person and at least 100 resamples")
    drawn_BN = generator.integers(0, len(people), (resamples, len(people)))
    resampled_B = np.array(
        [statistic(np.concatenate([people[i] for i in drawn_N])) for drawn_N in drawn_BN]
    )
    return _percentiles(float(statistic(np.concatenate(people))), resampled_B, alpha)


def _wins_NM(members_N: NDArray[np.float64], others_M: NDArray[np.float64]) -> NDArray[np.float64]:
    members_N, others_M = _finite(members_N), _finite(others_M)
    gap_NM = members_N[:, None] - others_M[None, :]
    return 0.5 * (np.sign(gap_NM) + 1.0)


def _multiplicities(n: int, resamples: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """How often each of n people stands in each resample: rows sum to n."""
    if resamples < 100:
        raise ValueError(f"expected at least 100 resamples for a 5 % bound, got {resamples}")
    return generator.multinomial(n, np.full(n, 1.0 / n), size=resamples).astype(np.float64)


def _percentiles(estimate: float, resampled_B: NDArray[np.float64], alpha: float) -> Bounds:
    low, high = np.quantile(resampled_B, [alpha, 1.0 - alpha])
    return Bounds(estimate, float(low), float(high))


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError("expected a non-empty vector of finite scores, one per person")
    return values


def _require_count(count: float, n: float) -> None:
    if not (n > 0 and 0 <= count <= n):
        raise ValueError(f"expected 0 <= count <= n and n > 0, got count {count} of {n}")


def _quantile(alpha: float) -> float:
    if not 0.0 < alpha < 0.5:
        raise ValueError(f"expected a one-sided level in (0, 0.5), got {alpha}")
    return float(stats.norm.ppf(1.0 - alpha))
