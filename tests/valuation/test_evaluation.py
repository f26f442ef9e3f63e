"""Scores are judged against retrained truth with intervals that cover, and what shows nothing says so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from valuation.errors import EvaluationError
from valuation.evaluation import (
    lds,
    lds_difference,
    predicted,
    record_values,
    reliability,
    spearman_rows,
    stability,
)
from valuation.subsets import random_subsets


def linear_world(rng, *, queries=8, records=40, subsets=50, noise=0.0):
    """A model whose loss is linear in its records: loss_mq = c_q - sum of tau over the subset (+ noise)."""
    scores_QN = rng.normal(size=(queries, records))
    member_MN = random_subsets(subsets, records, 0.5, rng)
    loss_MQ = 3.0 - (scores_QN @ member_MN.T).T + noise * rng.normal(size=(subsets, queries))
    return scores_QN, member_MN, loss_MQ


def test_spearman_by_hand():
    """Ranks 1 2 3 4 against 1 3 2 4: 1 - 6 * 2 / (4 * 15) = 0.8; with a tie, mean ranks 1 2.5 2.5 4: r = 4.5 / sqrt(5 * 4.5)."""
    x = np.array([[1.0, 2.0, 3.0, 4.0]] * 2)
    y = np.array([[10.0, 30.0, 20.0, 40.0], [1.0, 2.0, 2.0, 9.0]])
    np.testing.assert_allclose(spearman_rows(x, y), [0.8, 4.5 / np.sqrt(5 * 4.5)], atol=1e-15)


@given(st.integers(0, 10_000), st.integers(3, 12))
def test_spearman_is_scipys(seed, length):
    """Against scipy, ties included."""
    x, y = np.random.default_rng(seed).integers(0, 5, (2, 1, length)).astype(float)
    if np.ptp(x) and np.ptp(y):
        assert spearman_rows(x, y)[0] == pytest.approx(spearmanr(x[0], y[0]).statistic, abs=1e-12)


def test_a_linear_model_has_an_lds_of_one():
    """Closed form: the true scores of a linear world foretell every retraining; their negatives foretell the reverse."""
    rng = np.random.default_rng(0)
    scores_QN, member_MN, loss_MQ = linear_world(rng)
    found = lds(scores_QN, member_MN, loss_MQ, rng, draws=50)
    assert found.lds.estimate == pytest.approx(1.0, abs=1e-12)
    assert found.lds.low == pytest.approx(1.0, abs=1e-12)
    assert lds(-scores_QN, member_MN, loss_MQ, rng, draws=10).lds.estimate == pytest.approx(-1.0)
    assert found.num_subsets == 50


def test_ridge_regression_is_foretold_by_its_influence():
    """Negative control included: influence of a ridge regression ranks its retrainings, scores of permuted records don't."""
    rng = np.random.default_rng(1)
    x_ND, w_D = rng.normal(size=(60, 4)), rng.normal(size=4)
    y_N = x_ND @ w_D + rng.normal(size=60)
    q_QD, z_Q = rng.normal(size=(20, 4)), rng.normal(size=20)
    member_MN = random_subsets(80, 60, 0.8, rng)

    def fit(rows):
        x, y = x_ND[rows], y_N[rows]
        return np.linalg.solve(x.T @ x + 0.1 * np.eye(4), x.T @ y)

    loss_MQ = np.stack([(q_QD @ fit(rows) - z_Q) ** 2 / 2 for rows in member_MN])
    full_D, hessian = fit(np.ones(60, bool)), x_ND.T @ x_ND + 0.1 * np.eye(4)
    grads_ND = (x_ND @ full_D - y_N)[:, None] * x_ND
    grads_QD = (q_QD @ full_D - z_Q)[:, None] * q_QD
    scores_QN = grads_QD @ np.linalg.solve(hessian, grads_ND.T)
    assert lds(scores_QN, member_MN, loss_MQ, rng, draws=50).lds.low > 0.85
    shuffled = scores_QN[:, rng.permutation(60)]
    control = lds(shuffled, member_MN, loss_MQ, rng, draws=200).lds
    assert control.low < 0.2
    assert control.estimate < 0.3


@given(st.integers(0, 1000), st.floats(0.1, 10), st.floats(-5, 5))
def test_lds_ignores_scale_and_shift(seed, factor, shift):
    """Scores times a positive number, plus a number per query, rank subsets of equal size alike."""
    rng = np.random.default_rng(seed)
    scores_QN, member_MN, loss_MQ = linear_world(rng, queries=2, subsets=6, noise=3.0)
    one, two = (
        lds(s, member_MN, loss_MQ, np.random.default_rng(1), draws=2).lds.estimate
        for s in (scores_QN, factor * scores_QN + shift)
    )
    assert one == pytest.approx(two, abs=1e-12)


def test_the_interval_covers_queries_and_subsets():
    """100 worlds: the 95 % interval contains the LDS over all queries and subsets in >= 88 % (95 % - 3 standard errors).

    An interval over queries alone doesn't, which is why subsets are resampled too.
    """
    rng = np.random.default_rng(5)
    covered, narrow, worlds = 0, 0, 100
    records = 30
    # One population: noise with a part common to all queries of a subset, as a retraining has.
    for _ in range(worlds):
        quality_Q = rng.normal(size=(160, 1))
        truth_QN = rng.normal(size=(160, records))
        guess_QN = truth_QN + (1 + 0.5 * quality_Q) * rng.normal(size=truth_QN.shape)
        member_MN = random_subsets(160, records, 0.5, rng)
        shared_M1 = rng.normal(size=(160, 1)) * 3
        loss_MQ = -(truth_QN @ member_MN.T).T + shared_M1 + rng.normal(size=(160, 160))
        population = spearman_rows(predicted(guess_QN, member_MN), -loss_MQ.T).mean()
        queries, subsets = rng.permutation(160)[:12], rng.permutation(160)[:25]
        sample = loss_MQ[subsets][:, queries]
        found = lds(guess_QN[queries], member_MN[subsets], sample, rng, draws=80)
        covered += found.lds.low <= population <= found.lds.high
        error = found.lds_Q.std(ddof=1) / np.sqrt(12)
        narrow += abs(found.lds.estimate - population) <= 2.2 * error
    assert covered / worlds >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / worlds)
    assert narrow / worlds < covered / worlds - 0.05


def test_a_difference_is_paired():
    """A method against itself differs by exactly 0; a better one is distinct where separate intervals overlap."""
    rng = np.random.default_rng(3)
    scores_QN, member_MN, loss_MQ = linear_world(rng, queries=20, subsets=100, noise=4.0)
    worse_QN = scores_QN + 0.6 * rng.normal(size=scores_QN.shape)
    same = lds_difference(scores_QN, scores_QN, member_MN, loss_MQ, rng, draws=50)
    assert (same.estimate, same.low, same.high) == (0, 0, 0)
    assert not same.distinct
    better = lds_difference(scores_QN, worse_QN, member_MN, loss_MQ, rng, draws=300)
    apart = [lds(s, member_MN, loss_MQ, rng, draws=300).lds for s in (scores_QN, worse_QN)]
    assert apart[0].low < apart[1].high
    assert better.distinct
    assert better.estimate == pytest.approx(apart[0].estimate - apart[1].estimate, abs=1e-12)


def test_the_ceiling_is_what_perfect_scores_reach_where_queries_are_alike():
    """Losses = signal + noise of equal variance per seed, 4 seeds: reliability 0.8, ceiling about sqrt(0.8), and true scores reach it."""
    rng = np.random.default_rng(7)
    scores_QN, member_MN, clean_MQ = linear_world(rng, queries=60, records=60, subsets=400)
    spread = clean_MQ.std(0)
    loss_RMQ = clean_MQ + spread * rng.normal(size=(4, *clean_MQ.shape))
    found = reliability(loss_RMQ, rng, draws=50)
    assert found.split_half.estimate == pytest.approx(0.8, abs=0.02)
    reached = spearman_rows(predicted(scores_QN, member_MN), -loss_RMQ.mean(0).T).mean()
    assert found.ceiling.estimate == pytest.approx(reached, abs=0.02)
    # Half the queries without noise, half with nothing else: the bound is sqrt(1/2), and perfect scores reach half.
    uneven_RMQ = np.concatenate([np.tile(clean_MQ, (2, 1, 1)), rng.normal(size=(2, *clean_MQ.shape))], axis=2)  # fmt: skip
    uneven = reliability(uneven_RMQ, rng, draws=20)
    perfect = spearman_rows(predicted(np.concatenate([scores_QN] * 2), member_MN), -uneven_RMQ[0].T)
    assert uneven.ceiling_one.estimate == pytest.approx(0.5**0.5, abs=0.02)
    assert perfect.mean() == pytest.approx(0.5, abs=0.02)
    noise = reliability(rng.normal(size=(4, 100, 30)), rng, draws=50)
    assert not noise.split_half.distinct
    assert noise.ceiling.estimate < 0.2
    assert noise.ceiling_one.estimate < 0.2


def test_the_ceilings_interval_covers():
    """100 banks of 12 subsets and two seeds, signal and noise alike: what perfect scores reach lies in the interval in >= 88 % (95 % - 3 standard errors)."""
    rng, truth = np.random.default_rng(9), np.sqrt(6 / np.pi * np.arcsin(1 / 4))
    covered = 0
    for _ in range(100):
        shared_M1 = rng.normal(size=(12, 1))
        clean_MQ = 0.5**0.5 * shared_M1 + 0.5**0.5 * rng.normal(size=(12, 16))
        noise_RMQ = 0.5**0.5 * (rng.normal(size=(2, 12, 1)) + rng.normal(size=(2, 12, 16)))
        found = reliability(clean_MQ + noise_RMQ, rng, draws=80).ceiling_one
        covered += found.low <= truth <= found.high
    assert covered >= 88, covered


def test_the_target_as_a_whole_is_one_rank_of_sums():
    """By hand: two queries that disagree; their sums rank as the losses' sums do, while each query alone is half right."""
    scores_QN = np.array([[4.0, 0.0, 1.0], [0.0, 5.0, 1.0]])
    member_MN = np.eye(3, dtype=bool)
    loss_MQ = -np.array([[4.0, 1.0], [0.0, 6.0], [1.0, 0.5]])
    rng = np.random.default_rng(0)
    found = lds(scores_QN, member_MN, loss_MQ, rng, draws=20, whole=True)
    assert found.lds_Q.tolist() == [1.0]
    assert lds(scores_QN, member_MN, loss_MQ, rng, draws=20).lds.estimate == pytest.approx(0.75)
    # Scores that know the target alone, the same row for every query, lose nothing by it.
    tiled = np.tile(scores_QN.sum(0), (2, 1))
    assert lds(tiled, member_MN, loss_MQ, rng, draws=20, whole=True).lds.estimate == 1.0
    loss_RMQ = np.stack([loss_MQ, loss_MQ + np.array([[0.4, -0.4]])])
    assert reliability(loss_RMQ, rng, draws=5, whole=True).ceiling_one.estimate == pytest.approx(1)


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_ceiling_of_one_seed_is_lower_and_in_closed_form(seeds):
    """Signal and noise of equal variance: normal seeds correlate by 1/2, ranks by 6/pi asin(1/4); perfect scores reach 6/pi asin(sqrt(1/8)) on one seed."""
    rng = np.random.default_rng(8)
    scores_QN, member_MN, clean_MQ = linear_world(rng, queries=80, records=60, subsets=600)
    loss_RMQ = clean_MQ + clean_MQ.std(0) * rng.normal(size=(seeds, *clean_MQ.shape))
    found = reliability(loss_RMQ, rng, draws=10)
    assert found.ceiling_one.estimate == pytest.approx(
        np.sqrt(6 / np.pi * np.arcsin(1 / 4)), abs=0.015
    )
    reached = spearman_rows(predicted(scores_QN, member_MN), -loss_RMQ[0].T).mean()
    assert reached == pytest.approx(6 / np.pi * np.arcsin(np.sqrt(1 / 8)), abs=0.015)
    assert found.ceiling_one.estimate == pytest.approx(reached, abs=0.02)
    assert found.ceiling.estimate > found.ceiling_one.estimate + 0.05, (
        "that of the mean would be too high a bar"
    )


def test_worthless_records_are_not_distinct_from_zero():
    """1,000 records of pure noise: in at most 5 % + 3 standard errors of 100 targets is any record distinct; a real one always is."""
    rng = np.random.default_rng(11)
    false, found = 0, 0
    for _ in range(100):
        scores_QN = rng.normal(size=(24, 1000))
        scores_QN[:, 0] += 4
        values = record_values(scores_QN)
        found += values.distinct_N[0]
        false += values.distinct_N[1:].any()
    assert found == 100
    assert false / 100 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 100)
    lone = record_values(scores_QN)
    assert ((lone.low_N > 0) | (lone.high_N < 0)).mean() > 0.03, "without correction many would be"


def test_values_are_means_and_weights_count():
    """By hand: equal weights give mean and its standard error; a query of weight 3 counts as three thirds."""
    scores_QN = np.array([[1.0], [2.0], [6.0]])
    values = record_values(scores_QN)
    assert values.value_N[0] == pytest.approx(3)
    assert values.se_N[0] == pytest.approx(scores_QN.std(ddof=1) / np.sqrt(3))
    assert record_values(scores_QN, np.array([1.0, 1.0, 2.0])).value_N[0] == pytest.approx(15 / 4)
    constant = record_values(np.array([[2.0, 0.0], [2.0, 0.0]]))
    assert constant.distinct_N.tolist() == [True, False]


def test_stability_of_seeds():
    """Equal values agree fully; reversed values have correlation -1, disjoint tops and no sign in common."""
    values = np.arange(20) - 9.5
    same = stability(np.stack([values, values]))
    assert (same.mean_rank_correlation, same.top_overlap, same.sign_agreement) == (1, 1, 1)
    other = stability(np.stack([values, -values]), top_share=0.25)
    assert other.worst_rank_correlation == pytest.approx(-1)
    assert (other.top_overlap, other.sign_agreement) == (0, 0)


def test_what_does_not_fit_is_refused():
    """Shapes, too few rows, a score or loss that is not finite, one seed: errors that say so, never a zero."""
    rng = np.random.default_rng(0)
    scores_QN, member_MN, loss_MQ = linear_world(rng, queries=3, records=5, subsets=4)
    broken = scores_QN.copy()
    broken[1, 2] = np.nan
    cases = [
        ((broken, member_MN, loss_MQ), "nan for query 1 and record 2"),
        ((scores_QN[:, :4], member_MN, loss_MQ), r"\[Q, N\]"),
        ((scores_QN, member_MN, loss_MQ.T), r"\[M, Q\]"),
        ((scores_QN, member_MN[:1], loss_MQ[:1]), "at least 2"),
        ((scores_QN, member_MN, loss_MQ * np.inf), "diverged"),
    ]
    for arguments, message in cases:
        with pytest.raises(EvaluationError, match=message):
            lds(*arguments, rng)
    with pytest.raises(EvaluationError, match="2 seeds"):
        reliability(loss_MQ[None], rng)
    with pytest.raises(EvaluationError, match="2 seeds"):
        stability(scores_QN[:1])
    with pytest.raises(EvaluationError, match="2 queries"):
        record_values(scores_QN[:1])
    with pytest.raises(EvaluationError, match="weight"):
        record_values(scores_QN, np.array([1.0, 0.0, 1.0]))
