"""Values after a change, from the bank and a few more trainings.

After a delivery, an erasure or a change of target most of what must be known is known already. A *base* says for every
coalition S of the new game what the bank has instead:

    new lot j        base(S) = V(S - j), known for all S; V(S) is known where j is not in S
    lot j changed    base(S) = V(S with the old j); V(S) is known where j is not in S
    lot j erased     nothing is missing: the new game is the half of the old one without j
    new target       base(S) = V for the old target; V(S) is known nowhere

Half of the budget goes to the unknown coalitions that weigh most, those of few and of nearly all lots, where utilities also bend
most; the other half to a random draw of the rest. What is left is predicted by least squares from base and membership,

    V(S) - base(S) = b_0 + Σ_{i ∈ S} b_i + c base(S) + d base(S)² + ε,        Var ε = σ²

and the semivalues of the completed table are φ = W V, so that the prediction's error is theirs in a closed form,

    Cov φ = σ² (W_u W_uᵀ + A (XᵀX)⁻¹ Aᵀ),      A = W_u X_u,      u = coalitions that were predicted

with Student quantiles. Values still sum to V(all) - V(nobody) exactly. When it is wrong: the error is that of the model of ε; a utility
with strong interactions of three lots and more has errors that are not independent, which is what a wide interval and `residual` show.

Shapes: n players, C = 2^n coalitions, M trained ones, F = n + 3 features.

Source: regression-adjusted Shapley estimators, 2506.11849; prediction error of least squares, any text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.semivalues import Memo
from valuation.shapley import check_exact, exact_semivalue, shapley_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UpdatedValues:
    """Values of the new game."""

    values_n: Floats
    """They sum to V(all) - V(nobody)."""
    half_n: Floats
    """Half-widths of the intervals, each at `level`; zeros if everything was known or trained."""
    calls: int
    """Coalitions trained now."""
    reused: int
    """Coalitions taken from the bank."""
    predicted: int
    """Coalitions predicted."""
    residual: float
    """Standard deviation of ε, in units of utility."""


def update_values(
    num_players: int,
    known: Mapping[int, float],
    base_C: ArrayLike,
    utility: Callable[[list[int]], ArrayLike],
    budget: int,
    generator: np.random.Generator,
    *,
    level: float = 0.95,
) -> UpdatedValues:
    """Shapley values of a changed game.

    Args:
        num_players: n of the new game, 1 .. 20.
        known: bitmask → V, as the bank has it for the *new* game.
        base_C: what stands in for V(S), for every bitmask.
        utility: V of a list of bitmasks, by retraining.
        budget: most coalitions to train; full recomputation would train 2^n.
        generator: which coalitions are trained.
        level: coverage of each interval.

    Returns:
        Values, intervals, and what it cost.

    Raises:
        UtilityError: shapes that don't fit, numbers that aren't finite, or a budget too small to estimate an error from.
    """
    check_exact(num_players)
    size = 1 << num_players
    base_C = np.asarray(base_C, np.float64)
    if base_C.shape != (size,) or not np.isfinite(base_C).all():
        raise UtilityError(f"base_C: expected {size} finite numbers, got {list(base_C.shape)}")
    if not 0 < level < 1:
        raise UtilityError(f"level: expected within (0, 1), got {level}")
    memo = Memo(utility, known)
    missing = [mask for mask in range(size) if mask not in memo.known]
    ends = [mask for mask in (0, size - 1) if mask in missing]
    inner = [mask for mask in missing if mask not in ends]
    num_features = num_players + 3
    if budget < len(missing) and budget < num_features + 2 + len(ends):
        raise UtilityError(
            f"budget: expected at least {num_features + 2 + len(ends)} of {len(missing)} unknown coalitions, got {budget}"
        )
    trained = [*ends, *chosen_coalitions(inner, num_players, max(0, budget - len(ends)), generator)]
    reused = len(memo.known)
    memo(trained)
    table_C = np.array([memo.known.get(mask, 0.0) for mask in range(size)])
    weights_n = shapley_weights(num_players)
    left = np.array([mask for mask in missing if mask not in memo.known], np.int64)
    if not len(left):
        values_n = exact_semivalue(table_C, num_players, weights_n)
        return UpdatedValues(values_n, np.zeros(num_players), len(trained), reused, 0, 0.0)
    seen = np.array(trained, np.int64)
    found = predicted(_features(base_C, num_players), seen, left, table_C[seen] - base_C[seen], num_players)  # fmt: skip
    variance = float(found.rest_M @ found.rest_M) / found.freedom
    table_C[left] = base_C[left] + found.gap_U
    spread_n = (found.weight_nU**2).sum(axis=1) + found.leverage_n
    from scipy.stats import t as student

    half_n = student.ppf((1 + level) / 2, found.freedom) * np.sqrt(variance * spread_n)
    values_n = exact_semivalue(table_C, num_players, weights_n)
    return UpdatedValues(
        values_n, half_n, len(trained), reused, len(left), float(np.sqrt(variance))
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """What coalitions that were not trained have above their base, by least squares."""

    gap_U: Floats
    """[U] or, of target records, [U, Q]."""
    rest_M: Floats
    """Residuals of the trained ones, [M] or [M, Q]."""
    freedom: int
    """Degrees of freedom that they leave, at least 1."""
    weight_nU: Floats
    """W of the predicted ones."""
    leverage_n: Floats
    """A (XᵀX)⁻¹ Aᵀ: what the error of the coefficients adds to each Shapley value's variance, over σ²."""


def predicted(
    features_CF: Floats,
    seen_M: NDArray[np.int64],
    left_U: NDArray[np.int64],
    gap_M: Floats,
    num_players: int,
) -> Predicted:
    """Least squares over trained coalitions, and what it says of the others.

    Args:
        features_CF: X of all coalitions.
        seen_M: bitmasks of the trained ones.
        left_U: bitmasks to predict.
        gap_M: what the trained ones have above their base, [M] or [M, Q].
        num_players: n.
    """
    seen_MF, left_UF = features_CF[seen_M], features_CF[left_U]
    # A lot that stands in every trained coalition, as a new one does, has the column of the constant: the pseudo-inverse shares it.
    inverse_FF = np.linalg.pinv(seen_MF.T @ seen_MF)
    coefficient_F = inverse_FF @ seen_MF.T @ gap_M
    weight_nU = semivalue_matrix(num_players, shapley_weights(num_players))[:, left_U]
    through_nF = weight_nU @ left_UF
    return Predicted(
        left_UF @ coefficient_F, gap_M - seen_MF @ coefficient_F, max(1, len(seen_MF) - int(np.linalg.matrix_rank(seen_MF))),
        weight_nU, ((through_nF @ inverse_FF) * through_nF).sum(axis=1),
    )  # fmt: skip


def after_delivery(utility_C: ArrayLike) -> tuple[dict[int, float], Floats]:
    """Known utilities and base when one lot is added as the last player.

    Args:
        utility_C: V of every coalition of the old game, [2^n].

    Returns:
        `known` and `base_C` of the game of n + 1 players.
    """
    old_C = np.asarray(utility_C, np.float64)
    return dict(enumerate(old_C.tolist())), np.concatenate([old_C, old_C])


def after_erasure(utility_C: ArrayLike, player: int) -> Floats:
    """The game without a player; nothing has to be trained.

    Args:
        utility_C: V of every coalition of the old game, [2^n].
        player: whose lot is gone.

    Returns:
        V of every coalition of the others, [2^(n-1)], in their order.

    Raises:
        UtilityError: no such player.
    """
    old_C = np.asarray(utility_C, np.float64)
    if not 0 <= player < len(old_C).bit_length() - 1:
        raise UtilityError(f"player: expected 0 .. {len(old_C).bit_length() - 2}, got {player}")
    masks = np.arange(len(old_C))
    return old_C[(masks >> player & 1) == 0]


def chosen_coalitions(
    masks: list[int], num_players: int, budget: int, generator: np.random.Generator
) -> list[int]:
    """Coalitions to train: half of them the outermost by size, ties at random, the others drawn from the rest."""
    order = [masks[place] for place in generator.permutation(len(masks))]
    outer = sorted(order, key=lambda mask: min(mask.bit_count(), num_players - mask.bit_count()))
    first = outer[: (budget + 1) // 2]
    taken = set(first)
    rest = [mask for mask in order if mask not in taken]
    return sorted([*first, *rest[: budget - len(first)]])


def _features(base_C: Floats, num_players: int) -> Floats:
    """Constant, membership, base and its square; centred, so that the sizes of columns are comparable."""
    member_Cn = (np.arange(len(base_C))[:, None] >> np.arange(num_players) & 1) - 0.5
    scale = max(float(base_C.std()), 1e-12)
    level_C = (base_C - base_C.mean()) / scale
    return np.column_stack([np.ones(len(base_C)), member_Cn, level_C, level_C**2])


def semivalue_matrix(num_players: int, weights_n: Floats) -> Floats:
    """W of φ = W V, [n, 2^n]."""
    masks = np.arange(1 << num_players)
    sizes = np.bitwise_count(masks).astype(np.int64)
    member_nC = (masks >> np.arange(num_players)[:, None] & 1).astype(bool)
    joined_C = np.append(0.0, weights_n)[sizes]
    apart_C = np.append(weights_n, 0.0)[sizes]
    return np.where(member_nC, joined_C, -apart_C)
