"""The table of all coalitions after a delivery, of which a part was trained and the rest is predicted, record by record.

The first n₀ lots are those of a bank that holds all of their coalitions; the m last ones came with a delivery. What the bank
lacks are the coalitions S with one of the new lots, and for each of them it has what the old lots of S are worth. For every target record q

    nll_q(S) = nll_q(S ∩ old) + x_S · b_q + ε_q,      b_q by least squares over the coalitions that were trained now

    x_S   = membership of each new lot, membership of each old lot, level
    level = mean loss of S ∩ old, standardised: what is known already leaves less to gain

One x for all records, so the records' predictions add up to that of the mean loss. Trained are at most 0.3 of all 2^n coalitions: that of all lots, so that values
sum to V(all) - V(nobody) exactly; of the others half are the outermost by size, where utilities bend most and weigh most, and half are drawn. Values
are linear in the table, φ = W V, so the error that prediction brings has a bound in a closed form,

    Var φ_k <= σ² ((Σ_S |W_kS|)² + A (XᵀX)⁻¹ Aᵀ),    A = W X,    S over what was predicted,   σ² of the mean loss, on M - F degrees of freedom

that of errors which all go one way: lots that teach the same leave a pattern in ε, and taken as independent it gives intervals that hold
for 88 % of values in place of 95 (games of `tests/valuation/test_updates.py`). `variance_n` is the bound times (t_{M-F} / t_∞)² at 95 %: added to another variance
it gives an interval at least as wide as Student's.

When it is wrong: σ² is that of the coalitions that were trained; with few of them (three degrees of freedom at five lots) it may by luck be far too
small. Games of fewer than five lots, where 0.3 of the coalitions can't carry an estimate, are trained in full.

Shapes: n = n₀ + m lots, C = 2^n coalitions, M trained now, F features, Q target records.

Source: `valuation.updates` with a vector in place of V; regression-adjusted Shapley estimators, 2506.11849.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.shapley import check_exact
from valuation.updates import chosen_coalitions, predicted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from valuation.bank import Utilities

    Floats = NDArray[np.float64]

SHARE = 0.3
"""Most trainings of an update over those of a full recomputation."""
_SPARE = 3
"""Least degrees of freedom that an error is estimated from."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Losses of all coalitions."""

    nll_CQ: Floats
    """Summed nats of each target record; row = bitmask."""
    predicted_C: NDArray[np.bool_]
    """Which rows were predicted."""
    variance_n: Floats
    """What prediction adds to the variance of each lot's value per target token (see the module)."""


def coalitions_after(
    num_players: int, first: int, generator: np.random.Generator, share: float = SHARE
) -> list[int]:
    """What the bank of a game must hold after a delivery.

    Args:
        num_players: n of the new game, the lots of the bank first.
        first: n₀, lots that the bank holds all coalitions of, 1 .. n.
        generator: which of the others are trained.
        share: most trainings over those of all 2^n.

    Returns:
        Bitmasks, ascending: all of the first lots, and those to train; all 2^n where so few trainings carry no estimate.

    Raises:
        UtilityError: numbers out of range.
    """
    check_exact(num_players)
    if not 1 <= first <= num_players or not 0 < share <= 1:
        raise UtilityError(f"expected 1 <= first <= {num_players} and a share in (0, 1], got {first} and {share}")  # fmt: skip
    everything = (1 << num_players) - 1
    missing = list(range(1 << first, everything + 1))
    budget = int(share * (everything + 1))
    if budget >= len(missing) or budget < _features(num_players) + _SPARE:
        return list(range(everything + 1))
    inner = chosen_coalitions(missing[:-1], num_players, budget - 1, generator)
    return [*range(1 << first), *inner, everything]


def complete(
    nll: Mapping[int, ArrayLike], num_players: int, first: int, tokens_Q: ArrayLike
) -> Completed:
    """Predict what was not trained.

    Args:
        nll: bitmask → summed nats per target record, for all of `coalitions_after`.
        num_players: n.
        first: n₀.
        tokens_Q: scored tokens of each target record.

    Returns:
        The table of all coalitions.

    Raises:
        UtilityError: a coalition of the first lots or of all lots is missing, or too few of the others are there.
    """
    from scipy.stats import t as student

    check_exact(num_players)
    size, old = 1 << num_players, (1 << first) - 1
    lacking = [mask for mask in (*range(old + 1), size - 1) if mask not in nll]
    if lacking:
        raise UtilityError(f"nll: expected every coalition of the first {first} lots and that of all, got no {lacking[0]}")  # fmt: skip
    table_CQ = np.stack([np.asarray(nll[mask if mask in nll else mask & old], np.float64) for mask in range(size)])  # fmt: skip
    predicted_C = np.array([mask not in nll for mask in range(size)])
    if not predicted_C.any():
        return Completed(table_CQ, predicted_C, np.zeros(num_players))
    trained = np.flatnonzero(~predicted_C & (np.arange(size) > old))
    least = _features(num_players) + _SPARE
    if len(trained) < least:
        raise UtilityError(f"nll: expected at least {least} coalitions with a new lot, got {len(trained)}")  # fmt: skip
    total = float(np.asarray(tokens_Q, np.float64).sum())
    base_CQ = table_CQ[np.arange(size) & old]
    design_CF = _design(base_CQ.sum(axis=1) / total, num_players, first)
    left = np.flatnonzero(predicted_C)
    found = predicted(design_CF, trained, left, table_CQ[trained] - base_CQ[trained], num_players)
    rest_M = found.rest_M.sum(axis=1) / total
    table_CQ[left] = base_CQ[left] + found.gap_U
    spread_n = np.abs(found.weight_nU).sum(axis=1) ** 2 + found.leverage_n
    wider = float(student.ppf(0.975, found.freedom) / student.ppf(0.975, np.inf)) ** 2
    return Completed(table_CQ, predicted_C, spread_n * wider * float(rest_M @ rest_M) / found.freedom)  # fmt: skip


def added_variance(banks: Sequence[Utilities]) -> Floats | None:
    """What prediction adds to the variance of each lot's mean value over seeds.

    Args:
        banks: of one target, one per seed.

    Returns:
        n variances; None where every coalition was trained. Tables are completed by one rule under every seed, so its error isn't taken to
        shrink with their number.
    """
    found = [bank.variance_K for bank in banks if bank.variance_K is not None]
    return np.asarray(np.mean(found, axis=0), np.float64) if found else None


def _features(num_players: int) -> int:
    """F."""
    return num_players + 1


def _design(level_C: Floats, num_players: int, first: int) -> Floats:
    """X of all coalitions."""
    member_Cn = (np.arange(len(level_C))[:, None] >> np.arange(num_players) & 1).astype(np.float64)
    level_C = (level_C - level_C.mean()) / max(float(level_C.std()), 1e-12)
    return np.column_stack([member_Cn[:, first:], member_Cn[:, :first] - 0.5, level_C])
