"""Updates from the bank: equal to full recomputation within the interval, at less than a third of the calls."""

from __future__ import annotations

import numpy as np
import pytest

from valuation import UtilityError, exact_shapley
from valuation.updates import after_delivery, after_erasure, semivalue_matrix, update_values


def learning(num_players, seed, noise=0.003, target=0):
    """Utilities like those of retraining: loss falls with the log of useful tokens, lots overlap in topics, and each training has noise."""
    rng = np.random.default_rng(seed)
    topic_nk = rng.dirichlet(np.ones(3), num_players) * rng.uniform(5, 15, (num_players, 1))
    wanted_k = np.random.default_rng(100 + target).dirichlet(np.ones(3))
    masks = np.arange(1 << num_players)
    member_Cn = masks[:, None] >> np.arange(num_players) & 1
    return np.log1p(member_Cn @ topic_nk) @ wanted_k + noise * rng.normal(size=len(masks))


@pytest.mark.parametrize("change", ["delivery", "target", "altered"])
def test_updates_agree_with_full_recomputation_at_a_third_of_the_calls(change):
    """Over 40 changes of a game of 8 lots, intervals at 95 % hold for at least 90 % of all values, with at most 0.3 of the calls."""
    inside = total = 0
    share = []
    for seed in range(40):
        n = 8
        truth_C = learning(n, seed)
        masks = np.arange(1 << n)
        last_C = masks >> (n - 1) & 1
        if change == "delivery":
            known, base_C = after_delivery(truth_C[: 1 << (n - 1)])
        elif change == "altered":
            known = {m: float(truth_C[m]) for m in masks[last_C == 0].tolist()}
            base_C = truth_C - 0.2 * last_C / (1 + truth_C)
        else:
            known, base_C = {}, learning(n, seed, target=1)
        budget = int(0.3 * (1 << n))
        found = update_values(
            n, known, base_C, lambda m, t=truth_C: t[m], budget, np.random.default_rng(seed)
        )
        full_n = exact_shapley(truth_C, n)
        assert found.values_n.sum() == pytest.approx(truth_C[-1] - truth_C[0], abs=1e-9)
        assert found.calls <= budget
        share.append(found.calls / (1 << n))
        inside += int((np.abs(found.values_n - full_n) <= found.half_n).sum())
        total += n
        assert (found.half_n < 0.1 * np.abs(full_n).max()).all()
    assert inside / total >= 0.9
    assert max(share) <= 0.3


def test_an_erased_lot_costs_nothing():
    """The half of the bank without the lot is the whole new game: exact values, no training."""
    old_C = learning(5, 0)
    new_C = after_erasure(old_C, 2)
    found = update_values(4, dict(enumerate(new_C.tolist())), new_C, lambda _: pytest.fail("trained"), 0, np.random.default_rng(0))  # fmt: skip
    keep = [m for m in range(32) if not m >> 2 & 1]
    np.testing.assert_allclose(found.values_n, exact_shapley(old_C[keep], 4))
    assert (found.calls, found.predicted, found.half_n.max()) == (0, 0, 0.0)


def test_with_the_whole_budget_nothing_is_predicted():
    """A budget of all unknown coalitions is full recomputation, to the last bit."""
    truth_C = learning(5, 3)
    known, base_C = after_delivery(truth_C[:16])
    found = update_values(5, known, base_C, lambda m: truth_C[m], 16, np.random.default_rng(0))
    np.testing.assert_array_equal(found.values_n, exact_shapley(truth_C, 5))
    assert (found.calls, found.reused) == (16, 16)


def test_the_matrix_of_values_is_the_enumeration():
    """W V is the exact Shapley value of a random game; the interval's formula rests on it."""
    table_C = np.random.default_rng(0).normal(size=16)
    weights = np.array([1 / 4, 1 / 12, 1 / 12, 1 / 4])
    np.testing.assert_allclose(semivalue_matrix(4, weights) @ table_C, exact_shapley(table_C, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 3}, "budget: expected at least"),
        ({"base_C": np.zeros(4)}, "base_C: expected 32"),
        ({"base_C": np.full(32, np.nan)}, "base_C"),
        ({"known": {0: np.nan}}, "finite"),
        ({"num_players": 21}, "num_players"),
        ({"level": 0}, "level"),
    ],
)
def test_what_cannot_be_updated_is_refused(change, message):
    """A budget without an error, tables that don't fit and losses that aren't finite are named."""
    given = {"num_players": 5, "known": {}, "base_C": np.zeros(32), "utility": lambda m: np.zeros(len(m)), "budget": 20,
             "generator": np.random.default_rng(0)} | change  # fmt: skip
    with pytest.raises(UtilityError, match=message):
        update_values(**given)
    with pytest.raises(UtilityError, match="player"):
        after_erasure(np.zeros(8), 3)
