"""Datamodels are the least squares that a slow solver finds, unbiased on linear games, and Banzhaf values on whole tables."""

import numpy as np
import pytest

from valuation import Datamodel, UtilityError, datamodel, exact_banzhaf
from valuation.datamodels import RIDGES
from valuation.evaluation import lds
from valuation.subsets import random_subsets


def rng(seed=0):
    return np.random.default_rng(seed)


def world(generator, *, subsets, records=6, queries=3, noise=0.0):
    """A linear game: members drawn with a fair coin, loss = c - sum of the members' worth + noise."""
    worth_QN = generator.normal(size=(queries, records))
    member_MN = generator.random((subsets, records)) < 0.5
    loss_MQ = 7.0 - member_MN @ worth_QN.T + noise * generator.normal(size=(subsets, queries))
    return worth_QN, member_MN, loss_MQ


def slow(member_MN, loss_MQ, penalty):
    """The same by one large least squares with an intercept: the penalty as rows of its own."""
    subsets, records = member_MN.shape
    rows = np.hstack([member_MN, np.ones((subsets, 1))])
    pulls = np.hstack([np.sqrt(penalty) * np.eye(records), np.zeros((records, 1))])
    wanted = np.vstack([-loss_MQ, np.zeros((records, loss_MQ.shape[1]))])
    return np.linalg.lstsq(np.vstack([rows, pulls]), wanted, rcond=None)[0]


def penalty_of(member_MN, ridge):
    return ridge * np.mean([np.sum((column - column.mean()) ** 2) for column in member_MN.T])


@pytest.mark.parametrize(("subsets", "records"), [(40, 6), (10, 25)])
@pytest.mark.parametrize("ridge", [0.1, 3.0])
def test_it_is_the_least_squares_of_a_slow_solver(subsets, records, ridge):
    """With more subsets than records and with fewer, to 1e-10, intercept free."""
    _, member_MN, loss_MQ = world(rng(1), subsets=subsets, records=records, noise=0.5)
    found = datamodel(member_MN, loss_MQ, rng(), ridge=ridge, draws=2)
    want = slow(member_MN.astype(float), loss_MQ, penalty_of(member_MN.astype(float), ridge))
    np.testing.assert_allclose(found.scores_QN, want[:-1].T, atol=1e-10)
    np.testing.assert_allclose(found.value_N, want[:-1].sum(1), atol=1e-10)


def test_a_linear_game_is_found_exactly_and_without_bias_under_noise():
    """Closed form without noise; over 300 noisy banks the mean of the estimates is the truth within 4 standard errors."""
    worth_QN, member_MN, loss_MQ = world(rng(2), subsets=30)
    found = datamodel(member_MN, loss_MQ, rng(), ridge=0, draws=20)
    np.testing.assert_allclose(found.scores_QN, worth_QN, atol=1e-10)
    np.testing.assert_allclose(found.low_N, found.high_N, atol=1e-9)
    assert found.explained == pytest.approx(1)
    generator, estimates = rng(3), []
    for _ in range(300):
        noisy = loss_MQ + generator.normal(size=loss_MQ.shape)
        estimates.append(datamodel(member_MN, noisy, generator, ridge=0, draws=1).scores_QN)
    error = np.std(estimates, axis=0, ddof=1) / 300**0.5
    assert (np.abs(np.mean(estimates, axis=0) - worth_QN) < 4 * error).all()


def test_on_all_coalitions_it_is_the_banzhaf_value():
    """Any game, also one that is far from linear: the best linear fit under a fair coin."""
    members = np.array([[mask >> bit & 1 for bit in range(5)] for mask in range(32)], dtype=bool)
    utility_CQ = rng(4).normal(size=(32, 2)) ** 3
    found = datamodel(members, -utility_CQ, rng(), ridge=0, draws=1)
    np.testing.assert_allclose(found.scores_QN.T, exact_banzhaf(utility_CQ, 5), atol=1e-12)


def test_errors_of_left_out_subsets_are_those_of_refits():
    """`explained` by hand, each subset foretold by a fit of all others; the chosen ridge is the one that foretells best."""
    _, member_MN, loss_MQ = world(rng(5), subsets=12, records=20, noise=0.3)
    member = member_MN.astype(float)
    errors = {}
    for ridge in RIDGES:
        penalty, total = penalty_of(member, ridge), 0.0
        for out in range(12):
            kept = np.arange(12) != out
            theta = slow(member[kept], loss_MQ[kept], penalty)
            total += np.sum((-loss_MQ[out] - np.append(member[out], 1) @ theta) ** 2)
        errors[ridge] = total
        blind = sum(np.sum((loss_MQ[out] - np.delete(loss_MQ, out, 0).mean(0)) ** 2) for out in range(12))  # fmt: skip
        found = datamodel(member_MN, loss_MQ, rng(), ridge=ridge, draws=1)
        assert found.explained == pytest.approx(1 - total / blind, abs=1e-9)
    assert datamodel(member_MN, loss_MQ, rng(), draws=1).ridge == min(errors, key=errors.get)


def test_intervals_cover_and_a_fit_with_a_ridge_has_none():
    """200 linear games with noise: 95 % intervals hold 91 to 98 % of true values. Under a ridge there is none, and noise explains next to nothing."""
    generator, held = rng(6), []
    for _ in range(200):
        worth_QN, member_MN, loss_MQ = world(generator, subsets=60, noise=1.0)
        found = datamodel(member_MN, loss_MQ, generator, ridge=0, draws=100)
        worth_N = worth_QN.sum(0)
        held.append(((found.low_N <= worth_N) & (worth_N <= found.high_N)).mean())
    assert 0.91 <= np.mean(held) <= 0.98, np.mean(held)
    for _ in range(20):
        member_MN = generator.random((40, 30)) < 0.5
        nothing = datamodel(member_MN, generator.normal(size=(40, 5)), generator)
        assert (nothing.low_N, nothing.high_N) == (None, None)
        assert nothing.explained < 0.15


def test_equal_sizes_tell_values_apart_and_not_their_level():
    """Half subsets, fewer than records: values sum to 0, and rank what other subsets give."""
    generator = rng(7)
    worth_QN = generator.normal(size=(3, 40)) + 1
    halves, others = random_subsets(120, 40, 0.5, generator), random_subsets(60, 40, 0.5, generator)
    found = datamodel(halves, -(halves @ worth_QN.T), generator, draws=1)
    assert isinstance(found, Datamodel)
    np.testing.assert_allclose(found.scores_QN.sum(1), 0, atol=1e-9)
    assert lds(found.scores_QN, others, -(others @ worth_QN.T), generator, draws=20).lds.low > 0.9
    few = datamodel(halves[:20], -(halves[:20] @ worth_QN.T), generator, draws=1)
    assert lds(few.scores_QN, others, -(others @ worth_QN.T), generator, draws=2).lds.estimate > 0.2


def test_what_cannot_be_fitted_is_refused():
    """No ridge where subsets don't determine values, one subset many times, shapes, a loss that isn't finite."""
    _, member_MN, loss_MQ = world(rng(8), subsets=20)
    halves = random_subsets(20, 6, 0.5, rng(8))
    broken = loss_MQ.copy()
    broken[3, 1] = np.inf
    cases = [
        ((member_MN[:5], loss_MQ[:5]), {"ridge": 0}, "determine 4 of 6 values"),
        ((halves, loss_MQ), {"ridge": 0}, "determine 5 of 6 values"),
        ((np.ones((20, 6), bool), loss_MQ), {}, "got 6 others, the first 0"),
        ((member_MN[:2], loss_MQ[:2]), {}, "3 or more subsets"),
        ((member_MN, loss_MQ[:-1]), {}, r"\[20, 6\] and \[19, 3\]"),
        ((member_MN, broken), {}, "finite"),
        ((member_MN, loss_MQ), {"ridge": -1}, "ridge >= 0"),
    ]
    for arguments, settings, message in cases:
        with pytest.raises(UtilityError, match=message):
            datamodel(*arguments, rng(), **settings)
