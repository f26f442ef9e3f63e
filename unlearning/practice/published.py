"""Published numbers of five methods on TOFU forget10, and how the order of ours agrees with theirs.

The table is open-unlearning's own reproduction: one rate, ten epochs, published defaults for every method, none tuned, for two models. Forget quality
is a p-value (higher = more like a model that never saw the authors), utility the harmonic mean of nine numbers. The authors say themselves
that some methods gain much by tuning: it is the order of untuned methods that is compared.

With five methods an order says little: of 120 orders one has rho = 1 (p = 0.008), five have rho >= 0.9 (p = 0.042), and a rho below 0.9
cannot be told from chance at 5 %. Hence the exact p-value beside every coefficient.

Source: locuslab/open-unlearning `docs/repro.md` at 7fa0b552, tables "Llama-2-7b-hf-chat" and "Llama-3.2-1B-Instruct", columns forget10;
methods: TOFU, arXiv 2401.06121; NPO, arXiv 2404.05868; SimNPO, arXiv 2410.07163.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

QUALITY, UTILITY = "forget_quality", "model_utility"

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "Llama-2-7b-chat": {
        QUALITY: {"ascent": 1.06e-239, "graddiff": 1.80e-229, "dpo": 5.42e-13, "npo": 0.42, "simnpo": 1.47e-198},
        UTILITY: {"ascent": 0.0, "graddiff": 0.58, "dpo": 0.04, "npo": 0.54, "simnpo": 0.60},
    },
    "Llama-3.2-1B-Instruct": {
        QUALITY: {"ascent": 1.06e-239, "graddiff": 1.06e-239, "dpo": 4.64e-12, "npo": 0.02, "simnpo": 2.47e-203},
        UTILITY: {"ascent": 0.0, "graddiff": 0.49, "dpo": 0.23, "npo": 0.46, "simnpo": 0.54},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well two orders agree."""

    methods: int
    """n."""
    spearman: float
    """Pearson's correlation of ranks, ties share their mean rank; NaN if one side is all ties."""
    kendall: float
    """Kendall's tau-b."""
    p_value: float
    """Exact, one-sided: share of all n! orders whose rho is at least this."""


def agreement(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Agreement:
    """Compare the order of the methods that both sides have.

    Args:
        ours: method → value.
        theirs: method → value, with the same direction.

    Returns:
        Coefficients with the exact p-value.

    Raises:
        ValueError: with fewer than three methods in common, or more than eight (8! orders are tried).
    """
    both = sorted(set(ours) & set(theirs))
    if not 3 <= len(both) <= 8:
        raise ValueError(f"expected three to eight methods in common, got {len(both)}")
    a, b = ([values[name] for name in both] for values in (ours, theirs))
    first, second = stats.rankdata(a), stats.rankdata(b)
    rho = _pearson(first, second)
    tried = [_pearson(first[list(order)], second) for order in permutations(range(len(both)))]
    reached = float(np.mean([one >= rho - 1e-12 for one in tried]))
    return Agreement(len(both), rho, _tau(a, b), reached if np.isfinite(rho) else 1.0)


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def _tau(a: Sequence[float], b: Sequence[float]) -> float:
    if len(set(a)) == 1 or len(set(b)) == 1:
        return float("nan")
    return float(stats.kendalltau(a, b).statistic)
