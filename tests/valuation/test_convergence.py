"""The replay of a valuation ends at what was published, and its widths are those of a run that stopped there."""

from __future__ import annotations

import numpy as np
import pytest

from valuation import coalitions_needed, lot_gains, owner_intervals, sample_orders
from valuation.convergence import convergence


def _game(num, generator, queries=12):
    learned = generator.uniform(1, 5, num)
    tokens_Q = generator.integers(20, 60, queries)
    blur_Q = generator.uniform(0.5, 1.5, queries)
    nll = {}
    for mask in range(1 << num):
        known = sum(learned[i] for i in range(num) if mask >> i & 1)
        nll[mask] = tokens_Q * blur_Q * (6 - np.log1p(known))
    return nll, tokens_Q


def test_an_exact_replay_ends_with_all_coalitions_and_the_published_interval():
    """Calls ascend to 2^n; the last width is the exact interval's; the others are wider on the whole."""
    nll, tokens_Q = _game(5, np.random.default_rng(1))
    tokens_OK = np.array([[5, 0, 3, 0, 1], [1, 4, 0, 9, 2]])
    found = convergence(nll, 5, tokens_OK, tokens_Q, None, np.random.default_rng(0))
    assert found.calls[-1] == 32
    assert list(found.calls) == sorted(set(found.calls))
    exact = owner_intervals(lot_gains(nll, 5, None, tokens_Q)[0], tokens_OK, tokens_Q)
    width_O = exact.ci_high_n - exact.ci_low_n
    assert found.mean_width[-1] == pytest.approx(width_O.mean())
    assert found.worst_width[-1] == pytest.approx(width_O.max())
    assert found.mean_width[0] > found.mean_width[-1]


def test_a_sampled_replay_uses_the_published_orders_only():
    """Only coalitions of the bank are asked for, and the last point is the published interval."""
    nll, tokens_Q = _game(9, np.random.default_rng(2))
    orders = sample_orders(9, 12, np.random.default_rng(3))
    bank = {mask: nll[mask] for mask in coalitions_needed(9, orders)}
    tokens_OK = np.eye(9, dtype=np.int64) + 1
    found = convergence(bank, 9, tokens_OK, tokens_Q, orders, np.random.default_rng(0))
    gains_KQ, variance_K = lot_gains(bank, 9, orders, tokens_Q)
    whole = owner_intervals(gains_KQ, tokens_OK, tokens_Q, order_variance_K=variance_K)
    assert found.calls[-1] == len(bank)
    assert found.mean_width[-1] == pytest.approx((whole.ci_high_n - whole.ci_low_n).mean())
