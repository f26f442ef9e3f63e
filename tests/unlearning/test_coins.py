"""Coins: fair, independent of the list, bound to what was published; and the one-run bound that they make true."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from unlearning.canaries import epsilon_from_scores
from unlearning.coins import checked_coins, commitment, throw_coins
from unlearning.errors import PlanError

SEED = bytes(range(32))
IDS = [f"canary-{n}" for n in range(64)]
BUDGETS = (16, 32, 64)


def test_coins_are_fair_and_each_canarys_own():
    """Half of 4,000 are in, neighbours are no likelier to agree, and a coin stays whatever else is listed."""
    many = [f"canary-{n}" for n in range(4000)]
    in_N = throw_coins(SEED, many)
    assert binomtest(int(in_N.sum()), 4000).pvalue > 0.01
    assert binomtest(int((in_N[1:] == in_N[:-1]).sum()), 3999).pvalue > 0.01
    assert (throw_coins(SEED, many[::-1]) == in_N[::-1]).all()
    assert (throw_coins(SEED, many[7:9]) == in_N[7:9]).all()
    assert (throw_coins(bytes(32), many) != in_N).any()


def test_coins_that_were_not_committed_to_are_refused():
    """Another seed, one canary more, fewer, or renamed; the order doesn't matter."""
    told = commitment(SEED, IDS)
    assert (checked_coins(SEED, IDS, told) == throw_coins(SEED, IDS)).all()
    assert commitment(SEED, IDS[::-1]) == told
    for seed, ids in ((bytes(32), IDS), (SEED, IDS[1:]), (SEED, [*IDS, "more"])):
        with pytest.raises(PlanError, match="committed"):
            checked_coins(seed, ids, told)
    for seed, ids in ((b"short", IDS), (SEED, []), (SEED, ["a", "a"])):
        with pytest.raises(PlanError, match="expected"):
            throw_coins(seed, ids)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 2.0])
def test_the_bound_keeps_its_level_under_a_mechanism_of_known_epsilon(epsilon):
    """Randomised response tells each coin with chance e^eps / (1 + e^eps), eps-DP and tight: at most 5 % of 400 bounds lie above eps."""
    generator = np.random.default_rng(5)
    truth = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(400):
        in_N = throw_coins(generator.bytes(32), IDS)
        told_N = np.where(generator.random(64) < truth, in_N, ~in_N) + 0.1 * generator.random(64)
        bounds.append(epsilon_from_scores(told_N[in_N], told_N[~in_N], BUDGETS))
    above = sum(bound > epsilon + 1e-9 for bound in bounds)
    assert above / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    if epsilon == 2.0:
        assert np.median(bounds) > 0.8  # a bound of nothing would keep any level


def test_a_cut_is_no_coin():
    """Scores that depend on the canary's place and on no training: a cut by place "shows" 2.9, coins show nothing in 95 of 100 runs."""
    place_N = np.arange(64.0)
    assert epsilon_from_scores(place_N[32:], place_N[:32], BUDGETS) > 2.5
    generator = np.random.default_rng(6)
    thrown = [throw_coins(generator.bytes(32), IDS) for _ in range(200)]
    found = [epsilon_from_scores(place_N[in_N], place_N[~in_N], BUDGETS) for in_N in thrown]
    assert np.mean(np.array(found) > 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
