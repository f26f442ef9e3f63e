"""Shapley values by their definition: the mean over all n! orders of arrival. For tests only."""

from __future__ import annotations

from itertools import permutations
from math import factorial

import numpy as np


def shapley_by_permutations(utilities: np.ndarray, num_players: int) -> np.ndarray:
    """Average what each player adds to those before it, over every order.

    Args:
        utilities: V of every bitmask, [2^n] or [2^n, Q].
        num_players: n, at most about 7 (n! orders).

    Returns:
        Values [n] or [n, Q].
    """
    values = np.zeros((num_players, *utilities.shape[1:]))
    for order in permutations(range(num_players)):
        before = 0
        for player in order:
            after = before | 1 << player
            values[player] += utilities[after] - utilities[before]
            before = after
    return values / factorial(num_players)
