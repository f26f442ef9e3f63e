"""Bounds of an audit against published tables, scipy, closed forms and simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from unlearning.statistics import (
    auc,
    auc_difference,
    exact_upper,
    mean_bounds,
    newcombe_bounds,
    people_to_decide,
    wilson_bounds,
)

# Newcombe 1998, Statistics in Medicine 17:873-890, table II, method 10, two-sided 95 %.
NEWCOMBE_1998 = [
    ((56, 70), (48, 80), 0.0524, 0.3339),
    ((9, 10), (3, 10), 0.1705, 0.8090),
    ((6, 7), (2, 7), 0.0582, 0.8062),
    ((5, 56), (0, 29), -0.0381, 0.1926),
    ((0, 10), (0, 20), -0.1611, 0.2775),
    ((0, 10), (0, 10), -0.2775, 0.2775),
    ((10, 10), (0, 20), 0.6791, 1.0000),
    ((10, 10), (0, 10), 0.6075, 1.0000),
]
counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(("first", "second", "low", "high"), NEWCOMBE_1998)
def test_newcombe_bounds_equal_the_published_table(first, second, low, high):
    """The bounds are those of Newcombe's table II to its four decimals."""
    bounds = newcombe_bounds(*first, *second, alpha=0.025)
    assert (round(bounds.low, 4), round(bounds.high, 4)) == (low, high)


@given(counts, st.sampled_from([0.01, 0.025, 0.05, 0.1]))
def test_wilson_and_exact_bounds_equal_scipy(count_n, alpha):
    """Wilson and Clopper-Pearson bounds are scipy's two-sided intervals of twice the level."""
    count, n = count_n
    wilson = stats.binomtest(count, n).proportion_ci(1 - 2 * alpha, method="wilson")
    ours = wilson_bounds(count, n, alpha)
    assert (ours.low, ours.high) == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    exact = stats.binomtest(count, n, alternative="less").proportion_ci(1 - alpha, method="exact")
    assert exact_upper(count, n, alpha) == pytest.approx(exact.high, abs=1e-9)


@pytest.mark.parametrize(("n", "percent"), [(64, 4.6), (300, 1.0), (100, 3.0), (16, 17.1)])
def test_zero_of_n_still_allows_a_rate(n, percent):
    """Zero leaks of n bound the rate by 1 - 0.05^(1/n): 4.6 % of 64 people, 1.0 % of 300."""
    assert round(100 * exact_upper(0, n), 1) == percent


@given(counts, counts)
def test_newcombe_bounds_are_antisymmetric(first, second):
    """Swapping the samples mirrors the bounds, and the estimate lies between them."""
    forward, backward = newcombe_bounds(*first, *second), newcombe_bounds(*second, *first)
    assert (forward.low, forward.high) == pytest.approx((-backward.high, -backward.low), abs=1e-12)
    assert forward.low <= forward.estimate + 1e-12 <= forward.high + 2e-12


@pytest.mark.parametrize(("n", "margin"), [(16, 0.15), (64, 0.05), (100, 0.04), (300, 0.02)])
def test_every_margin_of_the_table_can_be_passed_and_is_not_free(n, margin):
    """With no leak in either model the bound is below the margin; with an eighth more leaks than gold it is not."""
    assert newcombe_bounds(0, n, 0, n).high <= margin
    assert newcombe_bounds(n // 8, n, 0, n).high > margin


@pytest.mark.parametrize(("n", "rate"), [(64, 0.05), (100, 0.02), (300, 0.01)])
def test_newcombe_upper_bound_keeps_its_level(n, rate):
    """The one-sided 5 % bound misses the true difference in at most 5 % of audits, up to 3 standard errors.

    20,000 simulated pairs of audits with equal true rates: the standard error of the miss rate is 0.0015.
    """
    generator = np.random.default_rng(4)
    trials = 20_000
    pairs = generator.binomial(n, rate, size=(trials, 2))
    distinct, times = np.unique(pairs, axis=0, return_counts=True)
    missed = sum(
        t for (a, b), t in zip(distinct, times, strict=True) if newcombe_bounds(a, n, b, n).high < 0
    )
    assert missed / trials <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from([0.02, 0.05, 0.15]))
@settings(max_examples=60)
def test_people_to_decide_is_the_first_n_that_decides(leaks_1, leaks_2, margin):
    """At the returned n the same rates decide, at n - 1 they do not."""
    rate_1, rate_2 = leaks_1 / 100, leaks_2 / 100
    n = people_to_decide(rate_1, rate_2, margin)

    def decided(people):
        bounds = newcombe_bounds(rate_1 * people, people, rate_2 * people, people)
        return bounds.high <= margin or bounds.low > margin

    if n is None:
        assert abs(rate_1 - rate_2 - margin) < 0.005
    else:
        assert decided(n)
        assert n == 1 or not decided(n - 1)


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
)
def test_auc_is_the_mann_whitney_statistic(members, others):
    """AUC = U / NM, ties half, as scipy counts them."""
    u = stats.mannwhitneyu(members, others).statistic
    assert auc(np.array(members), np.array(others)) == pytest.approx(u / len(members) / len(others))


def test_paired_bootstrap_of_a_model_with_itself_is_zero():
    """Both models see the same resampled people: a model does not differ from itself, without any width."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=40), generator.normal(size=40)
    bounds = auc_difference(scores, scores, np.random.default_rng(1))
    assert (bounds.estimate, bounds.low, bounds.high) == (0.0, 0.0, 0.0)


def test_auc_bootstrap_resamples_members_and_others():
    """The fast bootstrap equals resampling people one by one with the same multiplicities."""
    generator = np.random.default_rng(7)
    first, second = (
        (generator.normal(0.8, 1, 9), generator.normal(0, 1, 7)),
        (generator.normal(0.1, 1, 9), generator.normal(0, 1, 7)),
    )
    fast = auc_difference(first, second, np.random.default_rng(3), resamples=200)
    again = np.random.default_rng(3)
    members = again.multinomial(9, np.full(9, 1 / 9), size=200)
    others = again.multinomial(7, np.full(7, 1 / 7), size=200)
    slow = []
    for m, o in zip(members, others, strict=True):
        i, j = np.repeat(np.arange(9), m), np.repeat(np.arange(7), o)
        slow.append(auc(first[0][i], first[1][j]) - auc(second[0][i], second[1][j]))
    assert (fast.low, fast.high) == pytest.approx(tuple(np.quantile(slow, [0.05, 0.95])), abs=1e-12)


def test_auc_bounds_cover_the_truth():
    """The 90 % interval of the difference covers the true 0 in at least 85 % of 200 audits of 40 people.

    The standard error of a coverage of 0.90 over 200 audits is 0.021; 0.84 is three of them below.
    """
    generator = np.random.default_rng(12)
    covered = 0
    for trial in range(200):
        people = generator.normal(size=(2, 40))
        first = people + 0.7 * generator.normal(size=(2, 40))
        second = people + 0.7 * generator.normal(size=(2, 40))
        bounds = auc_difference(
            tuple(first), tuple(second), np.random.default_rng(trial), resamples=300
        )
        covered += bounds.low <= 0 <= bounds.high
    assert covered / 200 >= 0.84


def test_mean_bounds_agree_with_the_normal_theory():
    """For 400 values the bootstrap bounds of the mean are mean -+ 1.645 standard errors within 10 %."""
    values = np.random.default_rng(5).normal(1.0, 2.0, size=400)
    bounds = mean_bounds(values, np.random.default_rng(6), resamples=4000)
    half = stats.norm.ppf(0.95) * values.std() / 20
    assert bounds.high - bounds.estimate == pytest.approx(half, rel=0.1)
    assert bounds.estimate - bounds.low == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wilson_bounds(5, 4),
        lambda: wilson_bounds(0, 0),
        lambda: newcombe_bounds(1, 2, -1, 2),
        lambda: exact_upper(1, 2, alpha=0.7),
        lambda: auc(np.array([]), np.array([1.0])),
        lambda: auc(np.array([np.nan]), np.array([1.0])),
        lambda: auc_difference(
            (np.ones(2), np.ones(2)), (np.ones(3), np.ones(2)), np.random.default_rng(0)
        ),
        lambda: mean_bounds(np.ones(3), np.random.default_rng(0), resamples=5),
    ],
)
def test_impossible_input_is_refused(call):
    """Counts, levels and scores that cannot be are refused with what was expected."""
    with pytest.raises(ValueError, match="expected"):
        call()
