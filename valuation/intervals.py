"""Intervals for values that are ratios over target records.

With g_iq the gain of group i on target record q (nats) and t_q its scored tokens,

    v_i = Σ_q g_iq / Σ_q t_q,        se(v_i)² = Q/(Q-1) Σ_q (g_iq - v_i t_q)² / (Σ_q t_q)²,

the ratio estimate and its linearised variance: whole records are the sampling unit, because the
tokens of one text are not independent. The alternative is a bootstrap of whole records, numerator
and denominator together.

What an interval covers: which target records were drawn (and which orders, if sampled), and, where
utilities of several seeds were given, the seeds of the proxy trainings (`valuation.seeds`, which adds their
variance without counting twice). What it does not: whether the proxy speaks for a larger model.

Shapes: n groups, Q target records, B bootstrap draws.

Source: Cochran, "Sampling Techniques", 1977, equation 6.13; Efron and Tibshirani, "An Introduction
to the Bootstrap", 1993, chapter 13 (percentile intervals).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.result import ValueRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from valuation.seeds import SeedSpread

    Floats = NDArray[np.float64]

LEVEL = 0.95
"""Coverage of the intervals of lots, owners and entities, unless a caller asks for another."""


def zero_words(low: float | None, high: float | None, level: float = LEVEL) -> str:
    """Whether an interval tells a value from zero, in words.

    Args:
        low: lower end, or None without an interval.
        high: upper end, in the same unit.
        level: coverage of the interval.

    Returns:
        ``not distinguishable from zero at the 95 % level`` where the interval holds zero, its ends included;
        empty where it doesn't, or where there is none.
    """
    if low is None or high is None or not low <= 0 <= high:
        return ""
    return f"not distinguishable from zero at the {100 * level:g} % level"


@dataclass(frozen=True, slots=True)
class GroupValues:
    """Values of n groups in nats per target token, with their uncertainty."""

    values_n: Floats
    """Value of each group; positive lowers the buyer's loss."""
    se_n: Floats
    """Standard error of each value."""
    ci_low_n: Floats
    """Lower end of the interval."""
    ci_high_n: Floats
    """Upper end of the interval."""
    total: float
    """V(all) - V(nobody), which the values add up to."""
    total_se: float
    """Its standard error."""
    num_target_records: int
    """Q."""
    level: float
    """Coverage that the intervals aim at."""
    method: str
    """``shapley.exact`` or ``shapley.sampled``."""
    num_seeds: int = 1
    """Seeds that every coalition was trained under; with 1, errors know nothing of them."""
    seed_se_n: Floats | None = None
    """The part of each standard error that seeds add; None of one seed."""


def value_rows(
    values: GroupValues, group_ids: Sequence[str], *, target: str
) -> tuple[ValueRow, ...]:
    """Values of groups as rows that can be published.

    Args:
        values: values of n groups.
        group_ids: their ids, in the order of the bits of the coalitions.
        target: on which data the utility was measured, such as ``target_value``.

    Returns:
        One row per group, in nats per target token.

    Raises:
        UtilityError: for another number of ids.
    """
    if len(group_ids) != len(values.values_n):
        raise UtilityError(
            f"group_ids: expected {len(values.values_n)}, one per value, got {len(group_ids)}"
        )
    return tuple(
        ValueRow(
            subject_kind="group",
            subject_id=group_id,
            method=values.method,
            target=target,
            unit="nat",
            value=float(values.values_n[i]),
            se=float(values.se_n[i]),
            ci_low=float(values.ci_low_n[i]),
            ci_high=float(values.ci_high_n[i]),
            n=values.num_target_records,
        )
        for i, group_id in enumerate(group_ids)
    )


def group_values(
    gains_nQ: Floats,
    total_Q: Floats,
    tokens_Q: Floats,
    order_variance_n: Floats,
    *,
    level: float,
    bootstrap: tuple[np.random.Generator, int] | None,
    method: str,
    spread: tuple[SeedSpread, Floats] | None = None,
) -> GroupValues:
    """Ratio values, their errors over target records and seeds, and intervals.

    Args:
        gains_nQ: gain of each group on each target record, in nats; the mean over seeds.
        total_Q: gain of all groups together on each target record, in nats.
        tokens_Q: scored tokens of each target record (see `checked_tokens`).
        order_variance_n: variance of each value over sampled orders; zeros if exact.
        level: coverage of the intervals, in (0, 1).
        bootstrap: None for ratio errors with Student quantiles, or generator and draws.
        method: what the values are called.
        spread: the spread over seeds, and the weight of each lot in each group [n, K]; None of one seed.

    Returns:
        Values in nats per target token.

    Raises:
        UtilityError: for a level out of range, or a bootstrap of several seeds.
    """
    from scipy.stats import t as student

    if not 0 < level < 1:
        raise UtilityError(f"level: expected within (0, 1), got {level}")
    num_records = len(tokens_Q)
    values_n = gains_nQ.sum(axis=1) / tokens_Q.sum()
    if bootstrap is not None and spread is not None:
        raise UtilityError(
            "bootstrap: expected utilities of one seed, got several; draws of target records leave seeds out, so use ratio errors"
        )
    total_variance = _ratio_variance(total_Q[None], tokens_Q)[0]
    seed_se_n = None
    if bootstrap is None:
        variance_n = _ratio_variance(gains_nQ, tokens_Q) + order_variance_n
        half_n = student.ppf((1 + level) / 2, num_records - 1) * np.sqrt(variance_n)
        if spread is not None:
            seeds, share_nK = spread
            half_n = seeds.half_width(share_nK, variance_n, num_records, level)
            seed_n = seeds.variance(share_nK)
            variance_n, seed_se_n = variance_n + seed_n, np.sqrt(seed_n)
            total_variance += seeds.variance(np.ones((1, seeds.num_lots)))[0]
        se_n = np.sqrt(variance_n)
        low_n, high_n = values_n - half_n, values_n + half_n
    else:
        generator, count = bootstrap
        # Multinomial counts are a resample of whole records: numerator and denominator together.
        resample_BQ = generator.multinomial(
            num_records, np.full(num_records, 1 / num_records), count
        )
        ratios_Bn = (resample_BQ @ gains_nQ.T) / (resample_BQ @ tokens_Q)[:, None]
        se_n = ratios_Bn.std(axis=0, ddof=1)
        low_n, high_n = np.quantile(ratios_Bn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return GroupValues(
        values_n=values_n,
        se_n=se_n,
        ci_low_n=low_n,
        ci_high_n=high_n,
        total=float(total_Q.sum() / tokens_Q.sum()),
        total_se=float(np.sqrt(total_variance)),
        num_target_records=num_records,
        level=level,
        method=method,
        num_seeds=1 if spread is None else spread[0].num_seeds,
        seed_se_n=seed_se_n,
    )


def checked_tokens(tokens_Q: ArrayLike, num_records: int) -> Floats:
    """Token counts of at least two target records, as float64.

    Args:
        tokens_Q: scored tokens of each target record.
        num_records: Q, at least 2.

    Returns:
        The counts.

    Raises:
        UtilityError: for another number of counts, fewer than two records, or no tokens at all.
    """
    tokens_Q = np.asarray(tokens_Q, dtype=np.float64)
    if tokens_Q.shape != (num_records,) or num_records < 2:
        raise UtilityError(
            f"tokens_Q: expected one count for each of at least 2 target records, got "
            f"{list(tokens_Q.shape)} for {num_records} records"
        )
    if not (np.isfinite(tokens_Q).all() and tokens_Q.min() >= 0 and tokens_Q.sum() > 0):
        raise UtilityError("tokens_Q: expected counts of at least 0 with a positive sum")
    return tokens_Q


def _ratio_variance(gains_nQ: Floats, tokens_Q: Floats) -> Floats:
    """Linearised variance of Σ gains / Σ tokens when the Q records are the sampling unit."""
    total = tokens_Q.sum()
    residual_nQ = gains_nQ - np.outer(gains_nQ.sum(axis=1) / total, tokens_Q)
    num_records = len(tokens_Q)
    return num_records / (num_records - 1) * (residual_nQ**2).sum(axis=1) / total**2
