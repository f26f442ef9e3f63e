"""Cooperative games with known values: the oracles of everything that estimates values.

A game is the utility of every coalition. Coalitions are bitmasks: player i is in coalition S when
bit i of S is set, so a game of n players is a table of 2^n numbers and ``table[0]`` is the utility
of nobody. Each game here has a closed form for its Shapley values (and, where it is short, for its
Banzhaf values) that owes nothing to enumeration, so an error in one can't hide in the other.

=============  =========================================  ==========================================
game           V(S)                                       Shapley value of player i
=============  =========================================  ==========================================
airport        the longest runway needed, max cost in S   Σ_{k ≤ i} (c_k - c_{k-1}) / (n - k + 1)
voting         1 if S is a majority                       1 / n
shoes          pairs, min(left in S, right in S)          chance of arriving to a surplus of others
unanimity      1 if S contains the carrier T              1 / |T| in T, else 0
additive       Σ of the weights in S                      its weight
=============  =========================================  ==========================================

Shapes: n players, C = 2^n coalitions.

Source: Littlechild and Owen, "A simple expression for the Shapley value in a special case", 1973
(airport); Shapley and Shubik, "Pure competition, coalitional power and fair division", 1969 (shoes).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

MAX_PLAYERS = 20


@dataclass(frozen=True, slots=True)
class Game:
    """A game with its answer."""

    name: str
    """What it is called in tables and test ids."""
    utilities_C: NDArray[np.float64]
    """V(S) for every bitmask S."""
    shapley_n: NDArray[np.float64]
    """Shapley values from the closed form."""
    banzhaf_n: NDArray[np.float64] | None = None
    """Banzhaf values from the closed form, where there is a short one."""

    @property
    def num_players(self) -> int:
        """Number of players n."""
        return len(self.shapley_n)


def airport(costs: Sequence[float]) -> Game:
    """Aeroplanes share a runway; V(S) is the length that the largest of S needs.

    Args:
        costs: runway needed by each player, at least 0, in any order.

    Returns:
        The game; each stretch of runway is shared equally by those who need it.
    """
    costs_n = np.asarray(costs, dtype=np.float64)
    order_n = np.argsort(costs_n, kind="stable")
    steps_n = np.diff(costs_n[order_n], prepend=0.0)
    shapley_n = np.empty(len(costs_n))
    shapley_n[order_n] = np.cumsum(steps_n / np.arange(len(costs_n), 0, -1))
    return Game(
        "airport",
        _table(len(costs_n), lambda s: max((costs_n[i] for i in s), default=0.0)),
        shapley_n,
    )


def voting(num_players: int) -> Game:
    """One vote each; V(S) is 1 for a strict majority.

    Args:
        num_players: n, at least 1.

    Returns:
        The game; everybody has the same power.
    """
    n = num_players
    swing = comb(n - 1, n // 2) / 2 ** (n - 1)
    return Game(
        "voting",
        _table(n, lambda s: float(2 * len(s) > n)),
        np.full(n, 1 / n),
        np.full(n, swing),
    )


def shoes(num_left: int, num_right: int) -> Game:
    """Players own single shoes; V(S) is the number of pairs in S. The scarce side earns more.

    Args:
        num_left: players 0 .. num_left - 1 own a left shoe.
        num_right: the others own a right shoe.

    Returns:
        The game. A left shoe earns exactly when more right than left shoes came before it, so its
        value is the probability of that under a random order of arrival.
    """
    n = num_left + num_right

    def share(own: int, other: int) -> float:
        chance = Fraction(0)
        for before_own in range(own):
            for before_other in range(before_own + 1, other + 1):
                before = before_own + before_other
                ways = comb(own - 1, before_own) * comb(other, before_other)
                orders = ways * factorial(before) * factorial(n - 1 - before)
                chance += Fraction(orders, factorial(n))
        return float(chance)

    values = [share(num_left, num_right)] * num_left + [share(num_right, num_left)] * num_right
    return Game(
        "shoes",
        _table(
            n, lambda s: float(min(sum(i < num_left for i in s), sum(i >= num_left for i in s)))
        ),
        np.array(values),
    )


def unanimity(num_players: int, carrier: Collection[int]) -> Game:
    """V(S) is 1 when S contains the whole carrier. These games are a basis of all games.

    Args:
        num_players: n.
        carrier: the players who are needed, at least one.

    Returns:
        The game; players outside the carrier are null players.
    """
    needed = frozenset(carrier)
    inside_n = np.array([i in needed for i in range(num_players)], dtype=np.float64)
    return Game(
        "unanimity",
        _table(num_players, lambda s: float(needed <= set(s))),
        inside_n / len(needed),
        inside_n / 2 ** (len(needed) - 1),
    )


def additive(weights: Sequence[float]) -> Game:
    """No interaction: V(S) is the sum of the weights in S.

    Args:
        weights: one weight per player, of any sign.

    Returns:
        The game; every semivalue of a player is its weight.
    """
    weights_n = np.asarray(weights, dtype=np.float64)
    table = _table(len(weights_n), lambda s: float(sum(weights_n[i] for i in s)))
    return Game("additive", table, weights_n, weights_n)


def _table(num_players: int, utility: Callable[[list[int]], float]) -> NDArray[np.float64]:
    """Evaluate a game on every coalition."""
    if not 1 <= num_players <= MAX_PLAYERS:
        raise UtilityError(f"num_players: expected 1 .. {MAX_PLAYERS}, got {num_players}")
    coalitions = ([i for i in range(num_players) if s >> i & 1] for s in range(2**num_players))
    return np.array([utility(coalition) for coalition in coalitions])
