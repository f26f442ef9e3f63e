"""Equivalence, distances with a null band, Holm, epsilon from one run, shadow models: oracles, golden values, laws."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from unlearning.canaries import (
    epsilon_from_scores,
    one_run_epsilon,
    rate_at,
    shadow_evidence,
)
from unlearning.equivalence import distance, holm, null_band, tost
from unlearning.statistics import cluster_bounds, mean_bounds


@pytest.mark.parametrize(("guesses", "epsilon"), [(128, 3.74), (64, 3.03), (32, 2.3)])
def test_all_guesses_right_gives_the_published_epsilon(guesses, epsilon):
    """Golden values of the notes (Steinke et al., alpha 0.05), and their closed form logit(alpha^(1/r))."""
    found = one_run_epsilon(guesses, guesses)
    chance = 0.05 ** (1 / guesses)
    assert found == pytest.approx(epsilon, abs=0.025)  # the notes round 2.32 to 2.3
    assert found == pytest.approx(math.log(chance / (1 - chance)), abs=1e-9)


@given(st.integers(1, 80), st.integers(0, 80))
@settings(deadline=None, max_examples=40)
def test_epsilon_is_the_largest_that_is_refuted(guesses, right):
    """At the bound the binomial tail is alpha, a little above it is larger; nothing shown gives 0."""
    right = min(right, guesses)
    epsilon = one_run_epsilon(right, guesses)
    tail = stats.binom.sf(right - 1, guesses, 1 / (1 + math.exp(-epsilon - 1e-3)))
    assert tail > 0.05
    if epsilon > 0:
        assert stats.binom.sf(right - 1, guesses, 1 / (1 + math.exp(-epsilon))) <= 0.05 + 1e-6


def test_epsilon_from_scores_pays_for_its_choice():
    """Perfect scores of 64 in and 64 out give logit((alpha/4)^(1/128)); shuffled and tied ones give nothing."""
    budgets = (16, 32, 64, 128)
    perfect = epsilon_from_scores(np.ones(64), np.zeros(64), budgets)
    chance = (0.05 / 4) ** (1 / 128)
    assert perfect == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    assert perfect < one_run_epsilon(128, 128)
    assert epsilon_from_scores(np.zeros(64), np.zeros(64), budgets) == 0.0
    noise = np.random.default_rng(1).normal(size=128)
    assert epsilon_from_scores(noise[:64], noise[64:], budgets) < 0.5
    with pytest.raises(ValueError, match="even budgets"):
        epsilon_from_scores(np.ones(4), np.zeros(4), (3,))


def test_epsilon_keeps_its_level():
    """With true epsilon 1 the bound exceeds 1 in at most 5 % of 2,000 runs (three standard errors of room)."""
    generator, guesses = np.random.default_rng(2), 64
    right = generator.binomial(guesses, 1 / (1 + math.exp(-1.0)), 2000)
    bounds = {v: one_run_epsilon(int(v), guesses) for v in set(right.tolist())}
    share = np.mean([bounds[int(v)] > 1.0 for v in right])
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_shadow_evidence_is_a_log_likelihood_ratio():
    """Against two normal densities written out, and it tells records that were in from those that were not."""
    generator = np.random.default_rng(3)
    chance = 1 / (1 + np.exp(-generator.normal([2.0, -1.0], 0.5, (40, 2))))
    observed, was_in, was_out = chance[0], chance[1:20], chance[20:]
    was_in = 1 / (1 + np.exp(-np.log(was_in / (1 - was_in)) - 2.0))

    def normal(values, shadow):
        phi = np.log(shadow / (1 - shadow))
        mean, spread = phi.mean(0), phi.std(0, ddof=1)
        return -np.log(spread * math.sqrt(2 * math.pi)) - 0.5 * ((values - mean) / spread) ** 2

    phi = np.log(observed / (1 - observed))
    found = shadow_evidence(observed, was_in, was_out)
    assert found == pytest.approx(normal(phi, was_in) - normal(phi, was_out))
    typical_out, typical_in = (np.median(shadow, 0) for shadow in (was_out, was_in))
    assert (shadow_evidence(typical_out, was_in, was_out) < 0).all()
    assert (shadow_evidence(typical_in, was_in, was_out) > 0).all()
    with pytest.raises(ValueError, match="two shadow models"):
        shadow_evidence(observed, was_in[:1], was_out)


def test_rate_at_a_false_rate_counts_out_records():
    """Of 100 out records one may lie above the threshold."""
    out = np.arange(100.0)
    assert rate_at(np.array([98.5, 98.4, 50.0, 99.5]), out, 0.01) == 0.75
    assert rate_at(np.array([99.0]), out, 0.0) == 0.0


def test_tost_is_two_t_tests():
    """p-value and interval against scipy's one-sided t-tests on shifted data."""
    values = np.random.default_rng(4).normal(0.02, 0.3, 50)
    found = tost(values, 0.1)
    above = stats.ttest_1samp(values, -0.1, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.1, alternative="less").pvalue
    assert found.p_value == pytest.approx(max(above, below))
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_not_rejected_is_not_equivalent():
    """Three noisy differences do not differ from 0 (p > 0.05), and are not equivalent either; many of them are."""
    noise = np.random.default_rng(5).normal(0, 1, 4000)
    assert stats.ttest_1samp(noise[:3], 0.0).pvalue > 0.05
    assert not tost(noise[:3], 0.1).equivalent
    assert tost(noise, 0.1).equivalent
    assert not tost(noise + 0.2, 0.1).equivalent
    assert tost(np.zeros(5), 0.1).equivalent
    assert not tost(np.full(5, 0.1), 0.1).equivalent


def test_tost_keeps_its_level():
    """With a true difference on the margin at most 5 % of 2,000 samples are called equivalent."""
    generator = np.random.default_rng(6)
    wrong = [tost(generator.normal(0.2, 0.5, 64), 0.2).equivalent for _ in range(2000)]
    assert np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_distance_is_the_largest_gap_of_two_step_functions():
    """Against the definition on all points; Cliff's delta by counting pairs."""
    generator = np.random.default_rng(7)
    a, b = generator.normal(0, 1, 30), generator.normal(0.5, 1, 40)
    points = np.concatenate([a, b])
    gap = max(abs((a <= x).mean() - (b <= x).mean()) for x in points)
    pairs = np.mean([np.sign(x - y) for x in a for y in b])
    found = distance(a, b)
    assert (found.d, found.cliff) == pytest.approx((gap, pairs))


def test_a_null_band_needs_three_gold_models():
    """The band is the largest of three distances; with two models there is none."""
    golds = [np.arange(10.0) + shift for shift in (0, 1, 3)]
    assert null_band(golds) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="three gold"):
        null_band(golds[:2])


def test_holm_is_step_down():
    """The textbook example: 0.01, 0.04, 0.03, 0.005 become 0.03, 0.06, 0.06, 0.02."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    """Adjusted values are at least the raw ones, at most Bonferroni's, and in the same order."""
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, len(p_values) * p) + 1e-12
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= -1e-12).all()


def test_clusters_of_equal_records_are_one_person():
    """Copying every record ten times changes no bound; treating copies as people would narrow it by sqrt(10)."""
    values = np.random.default_rng(8).normal(size=40)
    once = cluster_bounds(
        {str(i): [v] for i, v in enumerate(values)}, np.mean, np.random.default_rng(9)
    )
    tenfold = {str(i): [v] * 10 for i, v in enumerate(values)}
    copied = cluster_bounds(tenfold, np.mean, np.random.default_rng(9))
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))
    naive = mean_bounds(np.repeat(values, 10), np.random.default_rng(9))
    assert copied.high - copied.low > 2.5 * (naive.high - naive.low)
