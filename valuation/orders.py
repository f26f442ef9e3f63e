"""Shapley values by sampled orders of arrival, for more groups than can be enumerated.

The Shapley value of a player is the mean, over all orders of arrival, of what it adds to those who
came before. M sampled orders give an unbiased mean and a standard error; they need at most
M (n - 1) + 2 utilities, and prefixes are shared between orders. Each order telescopes, so the
values sum to V(all) - V(nobody) exactly, whatever was drawn.

An order followed by its reverse (antithetic) has a lower variance in most games, because a player
who came late comes early; then the pair is one draw, and the error is taken over pairs.

When it is wrong: the standard error tells about the draw of orders, not about the trainings behind
the utilities; with few draws it is itself uncertain.

Shapes: n players (groups), M orders, D independent draws (M, or M/2 pairs), Q target records.

Source: Castro, Gómez and Tejada, "Polynomial calculation of the Shapley value based on sampling",
2009; Mitchell et al., "Sampling permutations for Shapley value estimation", 2104.12199 (pairs).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.intervals import checked_tokens, group_values
from valuation.seeds import by_seed, over_seeds, seed_spread
from valuation.shapley import check_exact, finite_utilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from valuation.intervals import GroupValues

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders of arrival that a sampled value averages over."""

    orders_Mn: NDArray[np.int64]
    """M permutations of the n players."""
    antithetic: bool
    """Whether rows 2k and 2k + 1 are reverses of each other, so that the pair is one draw."""

    def __post_init__(self) -> None:
        """Refuse rows that are not permutations.

        Raises:
            UtilityError: if a row is no permutation, or antithetic rows are not reverses.
        """
        orders_Mn = self.orders_Mn
        if orders_Mn.ndim != 2 or orders_Mn.size == 0:
            raise UtilityError(f"orders_Mn: expected [M, n] with M, n >= 1, got {orders_Mn.shape}")
        if not (np.sort(orders_Mn, axis=1) == np.arange(orders_Mn.shape[1])).all():
            raise UtilityError(f"orders_Mn: expected permutations of 0 .. {orders_Mn.shape[1] - 1}")
        reverses = self.antithetic and (
            len(orders_Mn) % 2 == 0 and bool((orders_Mn[::2] == orders_Mn[1::2, ::-1]).all())
        )
        if self.antithetic and not reverses:
            raise UtilityError("orders_Mn: expected each even row followed by its reverse")


def sample_orders(
    num_players: int, count: int, generator: np.random.Generator, *, antithetic: bool = True
) -> Orders:
    """Draw orders of arrival. A longer plan from the same seed begins with the shorter one.

    Args:
        num_players: n, at least 1.
        count: M, at least 1; even if antithetic.
        generator: source of randomness.
        antithetic: follow each order by its reverse.

    Returns:
        The orders.

    Raises:
        UtilityError: for a count or size out of range.
    """
    if num_players < 1 or count < 1 or (antithetic and count % 2):
        raise UtilityError(
            f"expected at least one player and one order, an even number of antithetic ones; got "
            f"{num_players} players, {count} orders"
        )
    draws = [generator.permutation(num_players) for _ in range(count // 2 if antithetic else count)]
    rows = [row for draw in draws for row in (draw, draw[::-1])] if antithetic else draws
    return Orders(np.array(rows, dtype=np.int64), antithetic)


def coalitions_needed(num_players: int, orders: Orders | None = None) -> list[int]:
    """Bitmasks whose utility must be known: all for an exact value, the prefixes for a sampled one.

    Args:
        num_players: n; at most 20 without orders.
        orders: orders of arrival, or None for all 2^n coalitions.

    Returns:
        Sorted bitmasks, each once, with nobody (0) and all (2^n - 1) among them.

    Raises:
        UtilityError: if n is out of range or doesn't fit the orders.
    """
    if orders is None:
        check_exact(num_players)
        return list(range(2**num_players))
    if orders.orders_Mn.shape[1] != num_players:
        raise UtilityError(
            f"orders: expected {num_players} players, got {orders.orders_Mn.shape[1]}"
        )
    # Python integers: a bitmask of more than 63 players doesn't fit an int64.
    return sorted({mask for row in _prefixes(orders) for mask in row})


def sampled_shapley(utilities: Mapping[int, ArrayLike], orders: Orders) -> tuple[Floats, Floats]:
    """Shapley values as a mean over sampled orders, with standard errors.

    Args:
        utilities: V of every bitmask named by `coalitions_needed`: a number or a vector [Q].
        orders: orders of arrival, at least two independent draws.

    Returns:
        Values and standard errors over the draw of orders, [n] or [n, Q] each. The values sum to
        V(all) - V(nobody), whatever was drawn.

    Raises:
        UtilityError: if a coalition is missing or not finite, or there are fewer than two draws.
    """
    draws = _draws(utilities, orders)
    return draws.mean(axis=0), draws.std(axis=0, ddof=1) / np.sqrt(len(draws))


def sampled_with_interval(
    nll: Mapping[int, ArrayLike], tokens_Q: ArrayLike, orders: Orders, *, level: float = 0.95
) -> GroupValues:
    """Sampled Shapley values in nats per target token, for more groups than can be enumerated.

    Args:
        nll: bitmask → summed nats per target record [Q], or of several seeds [S, Q], for all of `coalitions_needed`.
        tokens_Q: scored tokens of each target record.
        orders: orders of arrival.
        level: coverage of the intervals, in (0, 1).

    Returns:
        Values, and errors that add the variance over orders to that over target records. The sum
        counts the variance of single order-record cells twice, so it errs on the wide side. Several seeds
        add theirs (`valuation.seeds`), under the same orders.

    Raises:
        UtilityError: as for `sampled_shapley` and `shapley_with_interval`.
    """
    tables = by_seed(nll)
    draws_SMnQ = np.stack([-_draws(table, orders) for table in tables])
    tokens_Q = checked_tokens(tokens_Q, draws_SMnQ.shape[3])
    gains_SnQ = draws_SMnQ.mean(axis=1)
    per_draw_Mn = draws_SMnQ.mean(axis=0).sum(axis=2) / tokens_Q.sum()
    num = orders.orders_Mn.shape[1]
    spread = seed_spread(gains_SnQ, tokens_Q)
    return group_values(
        over_seeds(gains_SnQ),
        np.mean([table[0] - table[(1 << num) - 1] for table in tables], axis=0),
        tokens_Q,
        per_draw_Mn.var(axis=0, ddof=1) / len(per_draw_Mn),
        level=level,
        bootstrap=None,
        method="shapley.sampled",
        spread=None if spread is None else (spread, np.eye(num)),
    )


def _draws(utilities: Mapping[int, ArrayLike], orders: Orders) -> Floats:
    """Marginal gains of each player per independent draw: [D, n] or [D, n, Q]."""
    prefixes = _prefixes(orders)
    table = finite_utilities(
        {mask: utilities[mask] for row in prefixes for mask in row if mask in utilities}
    )
    missing = {mask for row in prefixes for mask in row} - set(table)
    if missing:
        raise UtilityError(
            f"utilities: expected every coalition of coalitions_needed(), {len(missing)} missing, "
            f"first {min(missing)}"
        )
    gains = np.array(
        [[table[after] - table[before] for before, after in pairwise(row)] for row in prefixes]
    )
    by_player = np.empty_like(gains)
    rows = np.arange(len(gains))[:, None]
    by_player[rows, orders.orders_Mn] = gains
    if orders.antithetic:
        by_player = (by_player[::2] + by_player[1::2]) / 2
    if len(by_player) < 2:
        raise UtilityError(
            "orders: expected at least two independent draws, got 1: no error otherwise"
        )
    return by_player


def _prefixes(orders: Orders) -> list[list[int]]:
    """Bitmasks of nobody, the first, the first two, … for every order."""
    rows = []
    for order in orders.orders_Mn.tolist():
        masks = [0]
        for player in order:
            masks.append(masks[-1] | 1 << player)
        rows.append(masks)
    return rows
