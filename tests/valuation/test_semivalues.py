"""Sampled semivalues: closed forms, unbiasedness, intervals that hold, tallies that merge, rules that stop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import (
    UtilityError,
    additive,
    airport,
    banzhaf_weights,
    beta_weights,
    exact_semivalue,
    shapley_weights,
    shoes,
    unanimity,
    voting,
)
from valuation.samplers import Sampler, draw, log_banzhaf, log_shapley
from valuation.semivalues import Memo, log_beta, sample_values
from valuation.stopping import Stopping, Tally

GAMES = [
    airport([3, 1, 4, 1, 5]),
    voting(5),
    shoes(2, 4),
    unanimity(5, [1, 3]),
    additive([1, -2, 3]),
]
NAMES = ["permutation", "antithetic", "stratified", "regression", "reuse"]


def table_of(game):
    """The utility of a game as a function of masks."""
    return lambda masks: game.utilities_C[masks]


def within(tally, truth, times=5):
    """Whether means are within five standard errors: one false alarm in 10^6 per number."""
    return (np.abs(tally.mean_n - truth) <= times * tally.se_n + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
def test_every_sampler_meets_the_closed_forms(name, game):
    """Eight hundred draws of any sampler are within five standard errors of the known Shapley values."""
    rng = np.random.default_rng(5)
    logs = log_shapley(game.num_players)
    rows = draw(Sampler(name=name), Memo(table_of(game)), 800, logs, rng).rows_Dn
    assert within(Tally.of(rows), game.shapley_n)


@pytest.mark.parametrize("name", ["permutation", "antithetic", "stratified", "reuse"])
@pytest.mark.parametrize(
    "logs", [log_banzhaf, log_beta(4, 1), log_beta(1, 16)], ids=["banzhaf", "4-1", "1-16"]
)
def test_every_coefficient_is_unbiased_under_every_sampler(name, logs):
    """Sampler and coefficient are independent: on a random game each pair meets the enumerated semivalue."""
    table = np.random.default_rng(9).normal(size=2**5) + 7
    truth = exact_semivalue(table, 5, np.exp(logs(5)))
    rows = draw(
        Sampler(name=name), Memo(lambda m: table[m]), 800, logs(5), np.random.default_rng(1)
    ).rows_Dn
    assert within(Tally.of(rows), truth)


def test_logarithms_are_those_of_the_plain_weights_and_survive_a_hundred_players():
    """Exp of the log weights is the plain weight at n = 9; at n = 400 they are finite and in proportion to sizes."""
    np.testing.assert_allclose(np.exp(log_shapley(9)), shapley_weights(9), rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_banzhaf(9)), banzhaf_weights(9), rtol=1e-12)
    np.testing.assert_allclose(beta_weights(9, 1, 1), shapley_weights(9), rtol=1e-12)
    many = np.linspace(-1, 2, 400)
    utility = lambda masks: [float(sum(many[i] for i in range(400) if m >> i & 1)) for m in masks]  # noqa: E731
    for name in ("antithetic", "reuse"):
        rows = draw(
            Sampler(name=name), Memo(utility), 2, log_shapley(400), np.random.default_rng(0)
        ).rows_Dn
        assert np.isfinite(rows).all()
        assert name == "reuse" or np.allclose(rows, many)


@pytest.mark.parametrize("name", ["permutation", "antithetic", "stratified", "regression"])
def test_each_draw_of_shapley_values_is_efficient(name):
    """A draw sums to V(all) - V(nobody) exactly, whatever was drawn."""
    table = np.random.default_rng(3).normal(size=2**6)
    rows = draw(
        Sampler(name=name), Memo(lambda m: table[m]), 20, log_shapley(6), np.random.default_rng(0)
    ).rows_Dn
    np.testing.assert_allclose(rows.sum(axis=1), table[-1] - table[0], atol=1e-12)


def test_an_additive_game_costs_one_draw():
    """Orders give the exact answer at once; regression does after its pilot, whose guess takes out what is additive."""
    game = additive([1, -2, 3, 0.5])
    for name in ("permutation", "antithetic", "stratified"):
        rows = draw(
            Sampler(name=name), Memo(table_of(game)), 3, log_shapley(4), np.random.default_rng(0)
        ).rows_Dn
        np.testing.assert_allclose(rows, np.tile(game.shapley_n, (3, 1)), atol=1e-12)
    rows = draw(
        Sampler(name="regression"),
        Memo(table_of(game)),
        9,
        log_shapley(4),
        np.random.default_rng(0),
        game.shapley_n,
    ).rows_Dn
    np.testing.assert_allclose(rows, np.tile(game.shapley_n, (9, 1)), atol=1e-12)


def test_truncation_cuts_what_it_says_and_errs_by_no_more_than_its_tolerance():
    """A game that is flat after the second player: orders are cut, counted, and cost fewer utilities."""
    table = np.array([1 - 0.1 ** mask.bit_count() for mask in range(2**8)])
    asked = []
    memo = Memo(lambda masks: asked.extend(masks) or table[masks])
    stop = Stopping(max_draws=40)
    cut = sample_values(
        memo, 8, stop, np.random.default_rng(0), sampler=Sampler(name="truncated", tolerance=0.05)
    )
    assert cut.truncated == cut.orders == 40
    assert max(m.bit_count() for m in set(asked) - {255}) == 2
    assert abs(cut.values_n.sum() - (table[-1] - table[0])) <= 0.05
    never = sample_values(Memo(lambda m: table[m]), 8, stop, np.random.default_rng(0), sampler=Sampler(name="truncated", tolerance=1e-9))  # fmt: skip
    full = sample_values(Memo(lambda m: table[m]), 8, stop, np.random.default_rng(0), sampler=Sampler(name="permutation"))  # fmt: skip
    assert never.truncated <= 40
    np.testing.assert_allclose(never.values_n, full.values_n, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 1000))
def test_tallies_merge_in_any_grouping(sizes, seed):
    """However a sample is cut, the merged tally is the tally of the whole: associative, commutative, with a neutral element."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(100, 3, size=(size, 3)) for size in sizes]
    tallies = [Tally.of(part) for part in parts]
    left = Tally.empty(3)
    for tally in tallies:
        left = left + tally
    right = Tally.empty(3)
    for tally in reversed(tallies):
        right = tally + right
    whole = Tally.of(np.concatenate(parts))
    for found in (left, right):
        assert found.count == whole.count
        np.testing.assert_allclose(found.mean_n, whole.mean_n, atol=1e-9)
        np.testing.assert_allclose(found.m2_n, whole.m2_n, atol=1e-7)


def test_results_of_two_processes_merge_to_one():
    """Counts and calls add, means and errors are those of all draws; another method doesn't merge."""
    game = shoes(2, 4)
    a, b = (
        sample_values(table_of(game), 6, Stopping(max_draws=64), np.random.default_rng(seed)) for seed in (1, 2)
    )  # fmt: skip
    both = a + b
    assert both.tally.count == 128
    assert both.calls == a.calls + b.calls
    assert (both.se_n < np.maximum(a.se_n, b.se_n) + 1e-12).all()
    np.testing.assert_allclose(both.values_n, (a.values_n + b.values_n) / 2)
    other = sample_values(
        table_of(game), 6, Stopping(max_draws=4), np.random.default_rng(0), coefficient=log_banzhaf
    )
    with pytest.raises(UtilityError, match="one method"):
        _ = a + other


def test_going_on_is_what_one_longer_run_would_count():
    """A result goes on from where it stopped: draws add up, utilities that are known aren't computed again."""
    game = shoes(3, 5)
    memo = Memo(table_of(game))
    rng = np.random.default_rng(0)
    half = sample_values(memo, 8, Stopping(max_draws=16), rng)
    more = sample_values(memo, 8, Stopping(max_draws=48), rng, start=half)
    assert more.tally.count == 48
    assert more.calls == memo.calls <= 2**8
    with pytest.raises(UtilityError, match="start"):
        sample_values(
            memo, 8, Stopping(max_draws=48), rng, start=half, sampler=Sampler(name="antithetic")
        )


def test_intervals_hold_for_all_players_at_the_time_they_stopped():
    """Of 60 runs that stop when ± 0.2 is reached, at least 57 - 3 sd cover every player's true value; here all do, and widths are kept."""
    game, covered = shoes(2, 3), 0
    rule = Stopping(half_width=0.2, value_range=1.0, level=0.95, max_draws=100_000)
    for seed in range(60):
        # The utilities are known, so nothing is enumerated away: `max_draws` keeps the sampling going.
        found = sample_values(
            table_of(game),
            5,
            rule,
            np.random.default_rng(seed),
            sampler=Sampler(name="permutation"),
        )
        assert found.reason == "precise"
        assert (found.half_n <= 0.2).all()
        covered += bool((np.abs(found.values_n - game.shapley_n) <= found.half_n).all())
    assert covered >= 52


def test_the_bound_is_the_formula_of_its_source():
    """Half-width by hand: √(2 v ln(3/δ)/m) + 3 R ln(3/δ)/m at the second look of two players."""
    tally = Tally.of(np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
    delta = 0.1 / (2 * 2 * 3)
    log = np.log(3 / delta)
    want = [np.sqrt(2 * 0.25 * log / 4) + 3 * log / 4, 3 * log / 4]
    np.testing.assert_allclose(
        Stopping(max_draws=4, value_range=1.0, level=0.9).half_n(tally, 2), want
    )


def test_more_orders_do_not_hide_the_noise_of_seeds():
    """With a seed variance the interval never falls below it, and the rule stops there and says why."""
    game = additive([1, 2, 3])
    rule = Stopping(half_width=0.001, value_range=4.0, seed_variance=0.04, max_draws=10**6)
    found = sample_values(table_of(game), 3, rule, np.random.default_rng(0))
    assert found.reason == "seeds"
    assert (found.half_n > 2 * 0.2).all()


def test_a_budget_of_calls_stops_and_full_knowledge_is_exact():
    """`max_calls` is kept to within a round; with all utilities known the result is the enumerated one, without error."""
    game = airport(np.arange(12) ** 2.0)
    few = sample_values(
        table_of(game), 12, Stopping(max_calls=200), np.random.default_rng(0), round_draws=2
    )
    assert few.reason == "calls"
    assert 200 <= few.calls < 200 + 2 * 24
    small = voting(4)
    all_of_it = sample_values(
        table_of(small), 4, Stopping(max_calls=10_000), np.random.default_rng(0)
    )
    assert all_of_it.reason == "exact"
    assert all_of_it.calls == 16
    np.testing.assert_allclose(all_of_it.values_n, small.shapley_n, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_player_takes_everything(name):
    """With one owner there is one coalition to add to, for every sampler."""
    found = sample_values(
        lambda masks: [float(m) * 3 for m in masks], 1, Stopping(max_draws=2), np.random.default_rng(0),
        sampler=Sampler(name=name),
    )  # fmt: skip
    np.testing.assert_allclose(found.values_n, [3.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Stopping, "half_width, max_draws or max_calls"),
        (lambda: Stopping(half_width=0.1), "needs value_range"),
        (lambda: Stopping(max_draws=0), "max_draws: expected above 0"),
        (lambda: Stopping(max_draws=3, level=1.0), "level within"),
        (lambda: Sampler(name="owen"), "expected one of"),
        (lambda: Sampler(name="truncated"), "tolerance"),
        (lambda: Sampler(tolerance=0.1), "tolerance"),
        (lambda: log_beta(0, 1), "alpha, beta"),
        (lambda: sample_values(lambda m: [0.0] * len(m), 0, Stopping(max_draws=2), np.random.default_rng(0)), "num_players"),
        (lambda: sample_values(lambda m: [np.nan] * len(m), 2, Stopping(max_draws=2), np.random.default_rng(0)), "coalition 0: expected a finite"),
        (lambda: sample_values(lambda _: 1.0, 2, Stopping(max_draws=2), np.random.default_rng(0)), "one per coalition"),
        (lambda: sample_values(lambda m: [0.0] * len(m), 3, Stopping(max_draws=2), np.random.default_rng(0),
                               sampler=Sampler(name="regression"), coefficient=log_banzhaf), "Shapley's weights"),
        (lambda: Tally.empty(2) + Tally.empty(3), "2 and 3"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(make, message):
    """Rules that never stop, samplers that don't exist and diverged trainings are errors that say so."""
    with pytest.raises(UtilityError, match=message):
        make()
