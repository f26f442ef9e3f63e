"""Values of players from the utilities of all coalitions: Shapley, Banzhaf, Beta.

A semivalue is an average of what a player adds to the coalitions without it,

    φ_i = Σ_{S ∌ i} w(|S|) [V(S + i) - V(S)],

and the methods differ only in the weight of one coalition of size s among n players:

    Shapley    w(s) = s! (n - s - 1)! / n!          efficient: Σ φ_i = V(all) - V(nobody)
    Banzhaf    w(s) = 2^(1-n)                       the steadiest ranking under noisy utilities
    Beta(a,b)  w(s) = B(s + b, n - s - 1 + a) / B(a, b)    Beta(1,1) = Shapley; a > b: small S

Cost: 2^n utilities, so few players; `valuation.orders` samples for more. Utilities may be vectors
(one entry per target record): values are then vectors too, which gives them an error over target
records (`valuation.intervals`).

When it is wrong: the players are groups of owners. Splitting one player into several can raise
their total (Shapley values are not split-proof), so groups are cut by rule, not by request; and a
copy takes half the value of its original, so coalitions must hold each cluster once
(`valuation.pricing.first_in_cluster`).

Shapes: n players (groups), C = 2^n coalitions as bitmasks (bit i = player i), Q target records.

Source: Shapley, "A value for n-person games", 1953; Kwon and Zou, "Beta Shapley", 2110.14049;
Wang and Jia, "Data Banzhaf", 2205.15466.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.intervals import checked_tokens, group_values
from valuation.seeds import over_seeds, seed_spread

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from valuation.intervals import GroupValues

    Floats = NDArray[np.float64]

MAX_EXACT_PLAYERS = 20


def exact_shapley(utilities: Mapping[int, ArrayLike] | ArrayLike, num_players: int) -> Floats:
    """Shapley values by enumeration of all coalitions.

    Args:
        utilities: V of every bitmask: an array [2^n] or [2^n, Q], or a mapping from bitmask to a
            number or a vector [Q].
        num_players: n, 1 .. 20.

    Returns:
        Values [n] or [n, Q]; they sum to V(all) - V(nobody) over the players.

    Raises:
        UtilityError: if a coalition is missing, a utility isn't finite, or n is out of range.
    """
    return exact_semivalue(utilities, num_players, shapley_weights(num_players))


def exact_banzhaf(utilities: Mapping[int, ArrayLike] | ArrayLike, num_players: int) -> Floats:
    """Banzhaf values by enumeration; they don't sum to V(all) - V(nobody).

    Args:
        utilities: as for `exact_shapley`.
        num_players: n, 1 .. 20.

    Returns:
        Values [n] or [n, Q].

    Raises:
        UtilityError: as for `exact_shapley`.
    """
    return exact_semivalue(utilities, num_players, banzhaf_weights(num_players))


def exact_semivalue(
    utilities: Mapping[int, ArrayLike] | ArrayLike, num_players: int, weights_n: Floats
) -> Floats:
    """Any semivalue by enumeration.

    Args:
        utilities: as for `exact_shapley`.
        num_players: n, 1 .. 20.
        weights_n: weight of one coalition of size 0 .. n - 1 (see the weight functions).

    Returns:
        Values [n] or [n, Q].

    Raises:
        UtilityError: as for `exact_shapley`, or for another number of weights.
    """
    table = _table(utilities, num_players)
    if len(weights_n) != num_players:
        raise UtilityError(f"weights_n: expected {num_players}, one per size, got {len(weights_n)}")
    coalitions_C = np.arange(2**num_players)
    weight_C = np.append(weights_n, 0.0)[np.bitwise_count(coalitions_C)]
    values = []
    for player in range(num_players):
        without = coalitions_C[(coalitions_C >> player & 1) == 0]
        gain = table[without | 1 << player] - table[without]
        values.append(np.tensordot(weight_C[without], gain, axes=1))
    return np.array(values)


def shapley_weights(num_players: int) -> Floats:
    """Shapley weight of one coalition of each size: 1 / (n · C(n-1, s)).

    Args:
        num_players: n, at least 1.

    Returns:
        n weights for sizes 0 .. n - 1.
    """
    return np.array([1 / (num_players * comb(num_players - 1, s)) for s in range(num_players)])


def banzhaf_weights(num_players: int) -> Floats:
    """Banzhaf weight of one coalition: 2^(1-n) for every size.

    Args:
        num_players: n, at least 1.

    Returns:
        n weights for sizes 0 .. n - 1.
    """
    return np.full(num_players, 2.0 ** (1 - num_players))


def beta_weights(num_players: int, alpha: float, beta: float) -> Floats:
    """Beta(a, b) weight of one coalition of each size.

    Args:
        num_players: n, at least 1.
        alpha: a > 0; larger than b puts weight on small coalitions, where noise is lowest.
        beta: b > 0.

    Returns:
        n weights for sizes 0 .. n - 1; Beta(1, 1) is Shapley.

    Raises:
        UtilityError: if a parameter is not positive.

    Source: Kwon and Zou 2110.14049, equation 5, per coalition instead of per size.
    """
    from valuation.semivalues import log_beta

    return np.exp(log_beta(alpha, beta)(num_players))


def shapley_with_interval(
    nll: ArrayLike,
    tokens_Q: ArrayLike,
    *,
    level: float = 0.95,
    generator: np.random.Generator | None = None,
    num_bootstrap: int = 2000,
) -> GroupValues:
    """Exact Shapley values in nats per target token, with intervals over target records and seeds.

    Args:
        nll: summed negative log-likelihood in nats of each target record (Q, at least 2) under
            the model trained on each coalition (bitmask order, C = 2^n): [C, Q] of one seed, whose intervals know nothing of
            seeds, or [S, C, Q], whose values are means over S seeds (`valuation.seeds`).
        tokens_Q: scored tokens of each target record, above 0 in sum.
        level: coverage of the intervals, in (0, 1).
        generator: None for normal-theory ratio errors; a Generator for a bootstrap over target
            records (percentile intervals).
        num_bootstrap: number of bootstrap draws.

    Returns:
        Values that sum to V(all) - V(nobody) to 1e-9, errors and intervals.

    Raises:
        UtilityError: for a table that isn't [2^n, Q], tokens that don't fit, or not finite input.
    """
    table = np.asarray(nll, dtype=np.float64)
    nll_SCQ = table[None] if table.ndim == 2 else table
    if (
        nll_SCQ.ndim != 3 or not len(nll_SCQ) or nll_SCQ.shape[1] < 2
        or nll_SCQ.shape[1].bit_count() != 1
    ):  # fmt: skip
        raise UtilityError(
            f"nll: expected [2^n, Q] or [S, 2^n, Q] for n >= 1 groups, got {list(table.shape)}"
        )
    num_players = nll_SCQ.shape[1].bit_length() - 1
    tokens_Q = checked_tokens(tokens_Q, nll_SCQ.shape[2])
    gains_SnQ = np.stack([-exact_shapley(nll_CQ, num_players) for nll_CQ in nll_SCQ])
    spread = seed_spread(gains_SnQ, tokens_Q)
    return group_values(
        over_seeds(gains_SnQ),
        (nll_SCQ[:, 0] - nll_SCQ[:, -1]).mean(axis=0),
        tokens_Q,
        np.zeros(num_players),
        level=level,
        bootstrap=None if generator is None else (generator, num_bootstrap),
        method="shapley.exact",
        spread=None if spread is None else (spread, np.eye(num_players)),
    )


def _table(utilities: Mapping[int, ArrayLike] | ArrayLike, num_players: int) -> Floats:
    """All 2^n utilities as one finite array in bitmask order."""
    check_exact(num_players)
    size = 2**num_players
    if isinstance(utilities, Mapping):
        missing = [mask for mask in range(size) if mask not in utilities]
        if missing:
            raise UtilityError(
                f"utilities: expected all {size} coalitions, {len(missing)} missing, first {missing[0]}"
            )
        finite = finite_utilities({mask: utilities[mask] for mask in range(size)})
        return np.array([finite[mask] for mask in range(size)])
    table = np.asarray(utilities, dtype=np.float64)
    if table.ndim not in (1, 2) or len(table) != size:
        raise UtilityError(f"utilities: expected [{size}] or [{size}, Q], got {list(table.shape)}")
    if not np.isfinite(table).all():
        bad = int(np.flatnonzero(~np.isfinite(table.reshape(size, -1)).all(axis=1))[0])
        raise UtilityError(f"utilities: expected finite numbers, coalition {bad} has another")
    return table


def finite_utilities(utilities: Mapping[int, ArrayLike]) -> dict[int, Floats]:
    """Utilities as float64 arrays of one shape.

    Args:
        utilities: bitmask → number or vector [Q].

    Returns:
        The same, as float64 arrays.

    Raises:
        UtilityError: for different shapes or a number that isn't finite.
    """
    table = {mask: np.asarray(value, dtype=np.float64) for mask, value in utilities.items()}
    shapes = {value.shape for value in table.values()}
    if len(shapes) > 1 or any(len(shape) > 1 for shape in shapes):
        raise UtilityError(f"utilities: expected numbers or vectors of one length, got {shapes}")
    for mask, value in table.items():
        if not np.isfinite(value).all():
            raise UtilityError(f"utilities: expected finite numbers, coalition {mask} has another")
    return table


def check_exact(num_players: int) -> None:
    """Refuse more players than can be enumerated.

    Args:
        num_players: n.

    Raises:
        UtilityError: unless 1 <= n <= 20.
    """
    if not 1 <= num_players <= MAX_EXACT_PLAYERS:
        raise UtilityError(
            f"num_players: expected 1 .. {MAX_EXACT_PLAYERS} for enumeration, got {num_players}; "
            "use fewer groups or sampled orders"
        )
