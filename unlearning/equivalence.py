"""Is the unlearned model like gold? Distance with a null band, and a test that can say yes.

"The Kolmogorov-Smirnov test does not reject" is TOFU's forget quality, and it is no proof of likeness: its p-value depends on
the number of records (40 records: 0.27, 400 records: 1e-239 for methods of the same kind), and one gold model alone does not show
how much gold models differ among themselves. So three numbers stand together:

* **D** = sup |F_u - F_g| with its p-value and Cliff's delta (2·AUC - 1), which do not shrink with n;
* **null band**: the largest D between two gold models of different seeds, of at least three;
* **TOST**: two one-sided t-tests of the paired differences against ±margin; p ≤ alpha says *equivalent*.

    t_low = (mean + margin) / se        t_high = (mean - margin) / se        p = max(P(T ≥ t_low), P(T ≤ t_high))

Holm's step-down adjustment for many endpoints stands here too: p_(i) becomes max over j ≤ i of (m - j + 1) p_(j), at most 1.

Sources: Maini et al., TOFU, arXiv 2401.06121; Schuirmann, J. Pharmacokin. Biopharm. 15 (1987) 657-680; Cliff, Psychol. Bull. 114 (1993)
494-509; Holm, Scand. J. Statist. 6 (1979) 65-70.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from unlearning.statistics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart two distributions are."""

    d: float
    """Kolmogorov-Smirnov distance in [0, 1]."""
    p_value: float
    """Its two-sided p-value; small = different, large = *not shown* to be different."""
    cliff: float
    """Cliff's delta in [-1, 1]: how much more often the first is the larger one."""


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What two one-sided tests say about a mean difference."""

    estimate: float
    low: float
    """Lower end of the (1 - 2 alpha) interval."""
    high: float
    """Upper end of the (1 - 2 alpha) interval."""
    p_value: float
    """Larger of the two one-sided p-values."""
    equivalent: bool
    """Whether p ≤ alpha: the difference lies within ±margin."""


def distance(first_N: NDArray[np.float64], second_M: NDArray[np.float64]) -> Distance:
    """Kolmogorov-Smirnov distance and Cliff's delta of two samples.

    Args:
        first_N: scores under one model, finite.
        second_M: scores under another.

    Returns:
        Distance, p-value, effect size.
    """
    found = stats.ks_2samp(first_N, second_M)
    return Distance(float(found.statistic), float(found.pvalue), 2.0 * auc(first_N, second_M) - 1.0)


def null_band(golds: Sequence[NDArray[np.float64]]) -> float:
    """Largest Kolmogorov-Smirnov distance between two gold models.

    Args:
        golds: scores under each gold model, at least three.

    Returns:
        The distance below which a model is as like gold as gold is.

    Raises:
        ValueError: with fewer than three: two seeds give one distance, which is no band.
    """
    if len(golds) < 3:
        raise ValueError(f"expected scores of at least three gold models, got {len(golds)}")
    return max(distance(a, b).d for a, b in combinations(golds, 2))


def tost(differences_N: NDArray[np.float64], margin: float, alpha: float = 0.05) -> Equivalence:
    """Two one-sided tests of a mean difference.

    Args:
        differences_N: one paired difference per person, N ≥ 2, finite.
        margin: largest difference that counts as none, > 0.
        alpha: one-sided level.

    Returns:
        Mean, interval, p-value, decision.

    Raises:
        ValueError: for fewer than two differences or a margin that is not positive.
    """
    if len(differences_N) < 2 or margin <= 0:
        raise ValueError("expected at least two differences and a margin > 0")
    mean = float(np.mean(differences_N))
    error = float(np.std(differences_N, ddof=1)) / math.sqrt(len(differences_N))
    if error == 0.0:
        inside = abs(mean) < margin
        return Equivalence(mean, mean, mean, 0.0 if inside else 1.0, inside)
    student = stats.t(len(differences_N) - 1)
    p_value = max(student.sf((mean + margin) / error), student.cdf((mean - margin) / error))
    half = error * student.ppf(1.0 - alpha)
    return Equivalence(mean, mean - half, mean + half, float(p_value), bool(p_value <= alpha))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    Args:
        p_values: one per test, in [0, 1].

    Returns:
        Adjusted values: those ≤ alpha are rejected with the chance of any false rejection ≤ alpha.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted
