"""Checks of lots from their own bank: additive and saturating games by hand, all orders by enumeration, what can't be checked."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from valuation.errors import UtilityError
from valuation.leaving import lot_checks

TOKENS_Q = np.array([10.0, 30.0])


def bank(utility, num, seeds=1):
    """Losses of every coalition, the same on each target token; seed s adds s to nobody's and everybody's loss alike."""
    rows = {mask: np.stack([(7.0 + seed - utility(mask)) * TOKENS_Q for seed in range(seeds)]) for mask in range(1 << num)}  # fmt: skip
    return rows if seeds > 1 else {mask: row[0] for mask, row in rows.items()}


def test_an_additive_game_loses_each_lots_own_value():
    """Worths 0.3, 0.1, 0.2: left out is the worth itself, and paths add it up in order."""
    worth = np.array([0.3, 0.1, 0.2])
    found = lot_checks(bank(lambda mask: sum(worth[k] for k in range(3) if mask >> k & 1), 3), worth, TOKENS_Q)  # fmt: skip
    np.testing.assert_allclose(found.left_out.values_n, worth, atol=1e-12)
    assert found.rank_correlation == pytest.approx(1)
    np.testing.assert_allclose(found.best_first, [7, 6.7, 6.5, 6.4])
    np.testing.assert_allclose(found.worst_first, [7, 6.9, 6.7, 6.4])
    np.testing.assert_allclose(found.mean_order, [7, 6.8, 6.6, 6.4])
    assert found.over_seeds is None


def test_lots_that_replace_each_other_leave_nothing_when_one_goes():
    """Any one lot does it all: values share it, and without one of them nothing is lost."""
    found = lot_checks(bank(lambda mask: 0.5 * (mask > 0), 3, seeds=2), np.full((2, 3), 0.5 / 3), TOKENS_Q)  # fmt: skip
    np.testing.assert_allclose(found.left_out.values_n, 0, atol=1e-12)
    assert found.rank_correlation == 0
    np.testing.assert_allclose(found.best_first, np.array([7, 6.5, 6.5, 6.5]) + 0.5)


@given(seed=st.integers(0, 2**32 - 1), num=st.integers(2, 5))
def test_the_mean_path_is_that_of_all_orders(seed, num):
    """Against every order of a random game; seeds that agree have a rank correlation of 1."""
    table = np.random.default_rng(seed).normal(size=1 << num)
    nll = bank(lambda mask: table[mask], num, seeds=2)
    value_K = np.arange(num, dtype=float)
    found = lot_checks(nll, np.stack([value_K, value_K]), TOKENS_Q)
    paths = []
    for order in permutations(range(num)):
        masks = [sum(1 << lot for lot in order[:size]) for size in range(num + 1)]
        paths.append([7.5 - table[mask] for mask in masks])
    np.testing.assert_allclose(found.mean_order, np.mean(paths, axis=0), atol=1e-9)
    assert found.over_seeds.worst_rank_correlation == pytest.approx(1)
    assert found.best_first[0] == found.worst_first[0]
    assert found.best_first[-1] == found.worst_first[-1]


def test_a_bank_with_a_hole_is_refused():
    """A sampled bank, one lot, or values of another number of seeds: said, not guessed."""
    nll = bank(float, 2)
    for wrong, values in (({m: nll[m] for m in (0, 1, 3)}, [[1, 2]]), (bank(float, 1), [[1]]), (nll, [[1, 2]] * 2)):  # fmt: skip
        with pytest.raises(UtilityError, match="expected all coalitions of 2 or more lots"):
            lot_checks(wrong, values, TOKENS_Q)
