"""Exact semivalues: oracles, the axioms, vector utilities, and intervals over target records."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.shapley_dividends import banzhaf_by_dividends, shapley_by_dividends
from tests.oracles.shapley_permutations import shapley_by_permutations
from valuation import (
    UtilityError,
    additive,
    airport,
    banzhaf_weights,
    beta_weights,
    exact_banzhaf,
    exact_semivalue,
    exact_shapley,
    shapley_weights,
    shapley_with_interval,
    shoes,
    to_nano,
    unanimity,
    value_rows,
    voting,
)

LARGE_GAMES = [
    airport(np.arange(10) ** 2.0),
    voting(9),
    shoes(4, 6),
    unanimity(8, [0, 5, 6]),
    additive(np.linspace(-1, 1, 7)),
]


@st.composite
def tables(draw, max_players=5, width=None):
    """A game with small integer utilities, so that the axioms can be checked closely."""
    n = draw(st.integers(1, max_players))
    size = 2**n * (width or 1)
    numbers = draw(st.lists(st.integers(-1000, 1000), min_size=size, max_size=size))
    table = np.array(numbers, dtype=np.float64)
    return n, table.reshape(2**n, width) if width else table


@pytest.mark.parametrize("game", LARGE_GAMES, ids=lambda game: f"{game.name}-{game.num_players}")
def test_exact_values_meet_the_closed_forms(game):
    """Enumeration gives the known Shapley and Banzhaf values of games of up to ten players."""
    n = game.num_players
    np.testing.assert_allclose(exact_shapley(game.utilities_C, n), game.shapley_n, atol=1e-12)
    if game.banzhaf_n is not None:
        np.testing.assert_allclose(exact_banzhaf(game.utilities_C, n), game.banzhaf_n, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_exact_values_are_the_mean_over_all_orders(n):
    """On random games the weighted sum over coalitions is the definition over permutations."""
    table = np.random.default_rng(n).normal(size=2**n)
    np.testing.assert_allclose(
        exact_shapley(table, n), shapley_by_permutations(table, n), atol=1e-12
    )


@settings(deadline=None, max_examples=60)
@given(tables())
def test_exact_values_are_what_dividends_give(game):
    """Shapley and Banzhaf values equal those from Harsanyi dividends in exact fractions."""
    n, table = game
    exact = [Fraction(int(value)) for value in table]
    shapley = [float(value) for value in shapley_by_dividends(exact, n)]
    banzhaf = [float(value) for value in banzhaf_by_dividends(exact, n)]
    np.testing.assert_allclose(exact_shapley(table, n), shapley, atol=1e-9)
    np.testing.assert_allclose(exact_banzhaf(table, n), banzhaf, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(tables())
def test_efficiency(game):
    """The values sum to V(all) - V(nobody), also when V(nobody) is not 0."""
    n, table = game
    assert exact_shapley(table, n).sum() == pytest.approx(table[-1] - table[0], abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(tables(), st.randoms())
def test_symmetry(game, random):
    """Renaming the players renames the values, so equal players are paid equally."""
    n, table = game
    renamed = list(range(n))
    random.shuffle(renamed)
    moved = np.array(
        [table[sum(1 << renamed[i] for i in range(n) if mask >> i & 1)] for mask in range(2**n)]
    )
    np.testing.assert_allclose(exact_shapley(moved, n), exact_shapley(table, n)[renamed], atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(tables())
def test_a_null_player_gets_nothing_and_changes_nothing(game):
    """Somebody who never adds anything has value 0, and the others keep theirs."""
    n, table = game
    with_null = np.concatenate([table, table])  # the new player is the highest bit
    values = exact_shapley(with_null, n + 1)
    assert values[-1] == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(values[:-1], exact_shapley(table, n), atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(tables(width=2), st.integers(-5, 5), st.integers(-5, 5))
def test_linearity(game, a, b):
    """The values of a sum of games are the sums of the values."""
    n, table = game
    mixed = exact_shapley(table @ np.array([a, b], dtype=float), n)
    np.testing.assert_allclose(mixed, exact_shapley(table, n) @ [a, b], atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(tables(width=3))
def test_a_vector_game_is_its_columns_side_by_side(game):
    """Utilities [2^n, Q] give values [n, Q], each column as if it were alone."""
    n, table = game
    values = exact_shapley(table, n)
    assert values.shape == (n, 3)
    for column in range(3):
        np.testing.assert_allclose(values[:, column], exact_shapley(table[:, column], n), atol=1e-9)


def test_a_mapping_and_an_array_mean_the_same():
    """Utilities may come as bitmask -> number or bitmask -> vector, in any order."""
    table = np.random.default_rng(0).normal(size=(8, 4))
    backwards = {mask: table[mask] for mask in reversed(range(8))}
    np.testing.assert_array_equal(exact_shapley(backwards, 3), exact_shapley(table, 3))
    scalars = {mask: float(table[mask, 0]) for mask in range(8)}
    np.testing.assert_allclose(exact_shapley(scalars, 3), exact_shapley(table, 3)[:, 0], atol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "make", [shapley_weights, banzhaf_weights, lambda n: beta_weights(n, 4, 1)]
)
def test_the_weights_of_all_coalitions_sum_to_one(n, make):
    """A semivalue is an average: Σ_s C(n-1, s) w(s) = 1."""
    from math import comb

    assert sum(comb(n - 1, s) * w for s, w in enumerate(make(n))) == pytest.approx(1, abs=1e-12)


def test_beta_one_one_is_shapley_and_a_large_alpha_looks_at_small_coalitions():
    """Beta(1, 1) = Shapley; Beta(16, 1) puts more weight on size 0 than Shapley does."""
    np.testing.assert_allclose(beta_weights(6, 1, 1), shapley_weights(6), rtol=1e-12)
    assert beta_weights(6, 16, 1)[0] > shapley_weights(6)[0] > beta_weights(6, 1, 16)[0]
    additive_game = additive([1.0, -2.0, 4.0])
    values = exact_semivalue(additive_game.utilities_C, 3, beta_weights(3, 16, 4))
    np.testing.assert_allclose(values, additive_game.shapley_n, atol=1e-12)


@pytest.mark.parametrize(
    ("utilities", "n", "message"),
    [
        ({0: 0.0, 1: 1.0, 3: 2.0}, 2, "1 missing, first 2"),
        (np.zeros(7), 3, r"expected \[8\] or \[8, Q\], got \[7\]"),
        (np.array([0.0, np.nan]), 1, "coalition 1 has another"),
        ({0: 0.0, 1: np.inf}, 1, "coalition 1 has another"),
        ({0: [0.0, 1.0], 1: [0.0]}, 1, "vectors of one length"),
        (np.zeros(1), 0, "expected 1 .. 20 for enumeration, got 0"),
        (np.zeros(2), 21, "use fewer groups or sampled orders"),
    ],
)
def test_an_incomplete_or_broken_table_is_refused(utilities, n, message):
    """A missing or not finite utility is an error that names the coalition, never a zero."""
    with pytest.raises(UtilityError, match=message):
        exact_shapley(utilities, n)


# --- intervals over target records -----------------------------------------------------------


def nll_table(n=3, num_records=40, seed=0):
    """Nats per target record for every coalition, from a game with noise per record."""
    generator = np.random.default_rng(seed)
    tokens_Q = generator.integers(5, 60, size=num_records)
    gain_nQ = generator.gamma(2.0, 0.1, size=(n, num_records)) * tokens_Q
    nll_CQ = np.empty((2**n, num_records))
    for mask in range(2**n):
        inside = [gain_nQ[i] for i in range(n) if mask >> i & 1]
        total = np.sum(inside, axis=0) if inside else np.zeros(num_records)
        nll_CQ[mask] = 7 * tokens_Q - tokens_Q * np.log1p(total / tokens_Q)
    return nll_CQ, tokens_Q


def test_values_are_in_nats_per_target_token_and_sum_to_the_total_drop():
    """Efficiency to 1e-9: the values sum to the drop of the mean loss per token."""
    nll_CQ, tokens_Q = nll_table()
    result = shapley_with_interval(nll_CQ, tokens_Q)
    drop = nll_CQ[0].sum() / tokens_Q.sum() - nll_CQ[-1].sum() / tokens_Q.sum()
    assert abs(result.values_n.sum() - drop) < 1e-9
    assert abs(result.total - drop) < 1e-12
    scalar = exact_shapley(-nll_CQ.sum(axis=1) / tokens_Q.sum(), 3)
    np.testing.assert_allclose(result.values_n, scalar, atol=1e-12)
    assert (result.values_n > 0).all()
    assert result.method == "shapley.exact"
    assert result.num_target_records == 40


def test_with_equal_tokens_the_error_is_the_error_of_a_mean():
    """If every record has the same tokens, the ratio error is the text-book s/sqrt(Q)."""
    nll_CQ, _ = nll_table(num_records=25)
    result = shapley_with_interval(nll_CQ, np.full(25, 10))
    per_record = -exact_shapley(nll_CQ, 3) / 10
    np.testing.assert_allclose(result.se_n, per_record.std(axis=1, ddof=1) / 5, rtol=1e-12)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Over 400 draws of target records the 90 % interval covers the true value about 90 %.

    Tolerance: 400 trials at 0.9 have standard error 0.015; the bound is three of those.
    """
    nll_CQ, tokens_Q = nll_table(n=2, num_records=4000, seed=1)
    truth = shapley_with_interval(nll_CQ, tokens_Q).values_n
    generator = np.random.default_rng(2)
    covered = np.zeros(2)
    for _ in range(400):
        some = generator.integers(0, 4000, size=60)
        got = shapley_with_interval(nll_CQ[:, some], tokens_Q[some], level=0.9)
        covered += (got.ci_low_n <= truth) & (truth <= got.ci_high_n)
    assert (np.abs(covered / 400 - 0.9) < 3 * 0.015).all()


def test_the_bootstrap_agrees_with_the_ratio_error():
    """Two ways to the same standard error: within 10 % for 200 records and 4,000 draws.

    A bootstrap standard error from B draws is off by about 1/sqrt(2 B) = 1.1 %.
    """
    nll_CQ, tokens_Q = nll_table(num_records=200)
    ratio = shapley_with_interval(nll_CQ, tokens_Q)
    draws = np.random.default_rng(3)
    bootstrap = shapley_with_interval(nll_CQ, tokens_Q, generator=draws, num_bootstrap=4000)
    np.testing.assert_array_equal(bootstrap.values_n, ratio.values_n)
    np.testing.assert_allclose(bootstrap.se_n, ratio.se_n, rtol=0.1)
    assert (bootstrap.ci_low_n < bootstrap.values_n).all()
    assert (bootstrap.values_n < bootstrap.ci_high_n).all()


def test_values_become_rows_that_can_be_published():
    """Each group gets its value, error and interval; rounded to nano they still sum to the total."""
    values = shapley_with_interval(*nll_table())
    rows = value_rows(values, ["a", "b", "c"], target="target_value")
    assert [row.value for row in rows] == values.values_n.tolist()
    assert all(row.ci_low < row.value < row.ci_high and row.se > 0 for row in rows)
    assert {(row.method, row.unit, row.n) for row in rows} == {("shapley.exact", "nat", 40)}
    assert sum(row.value_nano for row in to_nano(rows)) == round(values.total * 1e9)
    with pytest.raises(UtilityError, match="expected 3, one per value, got 2"):
        value_rows(values, ["a", "b"], target="target_value")


def test_a_bootstrap_is_repeatable():
    """The same seed gives the same interval, bit for bit."""
    nll_CQ, tokens_Q = nll_table()
    one, two = (
        shapley_with_interval(nll_CQ, tokens_Q, generator=np.random.default_rng(4))
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.ci_low_n, two.ci_low_n)
    np.testing.assert_array_equal(one.ci_high_n, two.ci_high_n)


@pytest.mark.parametrize(
    ("nll", "tokens", "message"),
    [
        (np.zeros((3, 4)), np.ones(4), r"expected \[2\^n, Q\]"),
        (np.zeros((1, 4)), np.ones(4), r"expected \[2\^n, Q\]"),
        (np.zeros((2, 4)), np.ones(3), "one count for each"),
        (np.zeros((2, 1)), np.ones(1), "at least 2 target records"),
        (np.zeros((2, 4)), np.zeros(4), "positive sum"),
        (np.full((2, 4), np.nan), np.ones(4), "finite"),
    ],
)
def test_target_records_that_cannot_carry_an_interval_are_refused(nll, tokens, message):
    """A table of another shape, or fewer than two records, is an error and not a narrow interval."""
    with pytest.raises(UtilityError, match=message):
        shapley_with_interval(nll, tokens)
    with pytest.raises(UtilityError, match="level"):
        shapley_with_interval(np.zeros((2, 4)), np.ones(4), level=95)
