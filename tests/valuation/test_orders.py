"""Sampled Shapley values: unbiased, efficient in every draw, with honest standard errors."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from valuation import (
    Orders,
    UtilityError,
    airport,
    coalitions_needed,
    exact_shapley,
    sample_orders,
    sampled_shapley,
    sampled_with_interval,
    shapley_with_interval,
    shoes,
    voting,
)


def as_mapping(table):
    """Utilities as the bank of trainings gives them: bitmask -> number or vector."""
    return dict(enumerate(table))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_together_give_the_exact_value(n):
    """Without sampling error nothing but the exact value is left."""
    table = np.random.default_rng(n).normal(size=2**n)
    everything = Orders(np.array(list(permutations(range(n)))), antithetic=False)
    values, _ = sampled_shapley(as_mapping(table), everything)
    np.testing.assert_allclose(values, exact_shapley(table, n), atol=1e-12)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(
    "game", [shoes(3, 5), airport([1, 2, 4, 8, 16]), voting(7)], ids=lambda g: g.name
)
def test_sampled_values_are_within_their_standard_errors(game, antithetic):
    """200 orders: no value is further from the closed form than five of its standard errors.

    Five standard errors: a false alarm has probability below 1e-4 for all players together.
    """
    orders = sample_orders(game.num_players, 200, np.random.default_rng(0), antithetic=antithetic)
    values, se = sampled_shapley(as_mapping(game.utilities_C), orders)
    assert (np.abs(values - game.shapley_n) <= 5 * se + 1e-12).all()


def test_the_standard_error_is_the_spread_of_the_estimate():
    """Over 300 repeats the mean squared error equals the mean squared standard error.

    Both means have a relative standard error of about sqrt(2/300) = 8 %; the bound is 25 %.
    """
    game = shoes(2, 3)
    bank = as_mapping(game.utilities_C)
    for antithetic in (False, True):
        squares, claims = np.zeros(5), np.zeros(5)
        for seed in range(300):
            orders = sample_orders(5, 20, np.random.default_rng(seed), antithetic=antithetic)
            values, se = sampled_shapley(bank, orders)
            squares += (values - game.shapley_n) ** 2 / 300
            claims += se**2 / 300
        assert claims.mean() == pytest.approx(squares.mean(), rel=0.25)


def test_pairs_of_reverses_are_better_than_as_many_single_orders():
    """On a game of pairs (shoes) antithetic orders have the smaller error, as published."""
    game = shoes(3, 5)
    bank = as_mapping(game.utilities_C)
    error = {}
    for antithetic in (False, True):
        repeats = [
            sampled_shapley(
                bank, sample_orders(8, 50, np.random.default_rng(s), antithetic=antithetic)
            )[0]
            for s in range(40)
        ]
        error[antithetic] = np.abs(np.array(repeats) - game.shapley_n).mean()
    assert error[True] < error[False]


def test_efficiency_holds_in_every_sample():
    """Each order telescopes: two orders are enough for the values to sum to V(all) - V(nobody)."""
    table = np.random.default_rng(5).normal(size=2**9)
    orders = sample_orders(9, 2, np.random.default_rng(6), antithetic=False)
    values, _ = sampled_shapley(as_mapping(table), orders)
    assert values.sum() == pytest.approx(table[-1] - table[0], abs=1e-12)


def test_only_the_needed_coalitions_are_asked_for():
    """The prefixes of the orders suffice, each is listed once, and none of them is spare."""
    orders = sample_orders(12, 6, np.random.default_rng(7))
    needed = coalitions_needed(12, orders)
    assert needed == sorted(set(needed))
    assert needed[0] == 0
    assert needed[-1] == 2**12 - 1
    assert len(needed) <= 6 * 11 + 2
    bank = {mask: float(mask.bit_count()) for mask in needed}
    values, se = sampled_shapley(bank, orders)
    np.testing.assert_allclose(values, 1)
    np.testing.assert_allclose(se, 0, atol=1e-12)
    for mask in needed:
        with pytest.raises(UtilityError, match=f"1 missing, first {mask}"):
            sampled_shapley({m: v for m, v in bank.items() if m != mask}, orders)


def test_without_orders_all_coalitions_are_needed():
    """An exact value needs all 2^n, and says so before a large machine is rented."""
    assert coalitions_needed(3) == list(range(8))
    with pytest.raises(UtilityError, match="use fewer groups or sampled orders"):
        coalitions_needed(21)


def test_more_than_sixty_three_players_fit():
    """Bitmasks are Python integers: 80 players don't overflow."""
    orders = sample_orders(80, 4, np.random.default_rng(8))
    bank = {mask: float(mask.bit_count() ** 2) for mask in coalitions_needed(80, orders)}
    values, _ = sampled_shapley(bank, orders)
    assert values.sum() == pytest.approx(6400)


def test_a_longer_plan_begins_with_the_shorter_one():
    """Adding orders later keeps the trainings that were paid for already."""
    short = sample_orders(6, 10, np.random.default_rng(9)).orders_Mn
    longer = sample_orders(6, 30, np.random.default_rng(9)).orders_Mn
    np.testing.assert_array_equal(longer[:10], short)


def test_vector_utilities_give_vector_values():
    """Utilities [Q] per coalition give values and errors [n, Q], column by column."""
    table = np.random.default_rng(10).normal(size=(16, 3))
    orders = sample_orders(4, 8, np.random.default_rng(11))
    values, se = sampled_shapley(as_mapping(table), orders)
    assert values.shape == se.shape == (4, 3)
    for column in range(3):
        alone, alone_se = sampled_shapley(as_mapping(table[:, column]), orders)
        np.testing.assert_allclose(values[:, column], alone, atol=1e-12)
        np.testing.assert_allclose(se[:, column], alone_se, atol=1e-12)


def test_a_sampled_interval_adds_the_orders_to_the_records():
    """The error is never below that over records alone, and equals it where orders don't matter."""
    generator = np.random.default_rng(12)
    tokens_Q = generator.integers(5, 50, size=30)
    gain_nQ = generator.gamma(2, 1, size=(5, 30))
    linear = {
        m: -sum((gain_nQ[i] for i in range(5) if m >> i & 1), np.zeros(30)) for m in range(32)
    }
    orders = sample_orders(5, 6, generator)
    sampled = sampled_with_interval(linear, tokens_Q, orders)
    exact = shapley_with_interval(np.array([linear[m] for m in range(32)]), tokens_Q)
    np.testing.assert_allclose(sampled.values_n, exact.values_n, atol=1e-12)
    np.testing.assert_allclose(sampled.se_n, exact.se_n, rtol=1e-9)
    assert sampled.total == pytest.approx(exact.total)
    assert sampled.method == "shapley.sampled"

    curved = {m: -np.sqrt(-v) * tokens_Q for m, v in linear.items()}
    wide = sampled_with_interval(curved, tokens_Q, orders)
    narrow = shapley_with_interval(np.array([curved[m] for m in range(32)]), tokens_Q)
    assert (wide.se_n > 0).all()
    assert wide.values_n.sum() == pytest.approx(narrow.values_n.sum(), abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "antithetic", "message"),
    [
        ([[0, 0]], False, "expected permutations"),
        ([[0, 1], [0, 1]], True, "followed by its reverse"),
        ([[0, 1]], True, "followed by its reverse"),
        (np.zeros((0, 2), dtype=int), False, "M, n >= 1"),
    ],
)
def test_orders_that_are_none_are_refused(rows, antithetic, message):
    """A row that is no permutation would make values that look right and aren't."""
    with pytest.raises(UtilityError, match=message):
        Orders(np.array(rows), antithetic)


def test_a_single_draw_has_no_standard_error():
    """One pair is one draw: an error of 0 would be a lie, so it is refused."""
    orders = sample_orders(3, 2, np.random.default_rng(13))
    with pytest.raises(UtilityError, match="at least two independent draws"):
        sampled_shapley(dict.fromkeys(range(8), 0.0), orders)
    with pytest.raises(UtilityError, match="an even number"):
        sample_orders(3, 3, np.random.default_rng(13))
    with pytest.raises(UtilityError, match="expected 4 players, got 3"):
        coalitions_needed(4, orders)
