"""Shapley and Banzhaf values from Harsanyi dividends: a second definition. For tests only.

Every game is a sum of unanimity games; the weight of the one on T is the dividend

    d(T) = Σ_{S ⊆ T} (-1)^(|T| - |S|) V(S),

and its members share it: equally for Shapley (1/|T|), with weight 2^(1-|T|) for Banzhaf.
Source: Harsanyi, "A simplified bargaining model for the n-person cooperative game", 1963.
"""

from __future__ import annotations

from fractions import Fraction


def dividends(utilities: list[Fraction], num_players: int) -> list[Fraction]:
    """Moebius transform of a game, in exact arithmetic.

    Args:
        utilities: V of every bitmask.
        num_players: n.

    Returns:
        Dividend of every bitmask.
    """
    table = list(utilities)
    for player in range(num_players):
        for mask in range(2**num_players):
            if mask >> player & 1:
                table[mask] -= table[mask ^ 1 << player]
    return table


def shapley_by_dividends(utilities: list[Fraction], num_players: int) -> list[Fraction]:
    """Share each dividend equally among the members of its coalition.

    Args:
        utilities: V of every bitmask.
        num_players: n.

    Returns:
        Exact Shapley values.
    """
    table = dividends(utilities, num_players)
    return [
        sum((table[m] / m.bit_count() for m in range(1, 2**num_players) if m >> i & 1), Fraction(0))
        for i in range(num_players)
    ]


def banzhaf_by_dividends(utilities: list[Fraction], num_players: int) -> list[Fraction]:
    """Share each dividend with weight 2^(1 - |T|).

    Args:
        utilities: V of every bitmask.
        num_players: n.

    Returns:
        Exact Banzhaf values.
    """
    table = dividends(utilities, num_players)
    half = Fraction(1, 2)
    return [
        sum(
            (
                table[m] * half ** (m.bit_count() - 1)
                for m in range(1, 2**num_players)
                if m >> i & 1
            ),
            Fraction(0),
        )
        for i in range(num_players)
    ]
