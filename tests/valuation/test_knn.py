"""KNN-Shapley: brute force over all subsets, the law of efficiency, chunks, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import UtilityError, exact_shapley
from valuation.knn import knn_shapley


def by_brute_force(x, y, query, label, k, utility):
    """Shapley values of the vote from all 2^n subsets: no recursion, no sort of the whole set."""
    n = len(x)
    distance = ((x - query) ** 2).sum(axis=1)
    table = np.zeros(2**n)
    for mask in range(1, 2**n):
        inside = [i for i in range(n) if mask >> i & 1]
        nearest = sorted(inside, key=lambda i: (distance[i], i))[:k]
        match = [y[i, label] if y.ndim == 2 else float(y[i] == label) for i in nearest]
        table[mask] = sum(match) / (k if utility == "votes" else len(nearest))
    return exact_shapley(table, n), table[-1]


@pytest.mark.parametrize("utility", ["votes", "soft"])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 20])
def test_both_recursions_are_the_shapley_values_of_their_vote(utility, n, k):
    """For every K below, at and above n the values are those of enumeration."""
    rng = np.random.default_rng(100 * n + k)
    x, y = rng.normal(size=(n, 3)), rng.integers(0, 2, n)
    queries, labels = rng.normal(size=(3, 3)), rng.integers(0, 2, 3)
    found = knn_shapley(x, y, queries, labels, k, utility=utility)
    truth = [by_brute_force(x, y, q, c, k, utility) for q, c in zip(queries, labels, strict=True)]
    np.testing.assert_allclose(found.values_N, np.mean([t[0] for t in truth], axis=0), atol=1e-13)
    assert found.utility == pytest.approx(np.mean([t[1] for t in truth]), abs=1e-13)
    errors = np.std([t[0] for t in truth], axis=0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(found.se_N, errors, atol=1e-8)  # a difference of squares


@pytest.mark.parametrize("utility", ["votes", "soft"])
def test_soft_labels_are_the_same_game_with_fractions(utility):
    """Probabilities instead of labels: still what enumeration gives, because values are linear in matches."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(6, 2)), rng.dirichlet(np.ones(3), 6)
    found = knn_shapley(x, y, x[:1] + 0.1, [2], 2, utility=utility)
    truth, total = by_brute_force(x, y, x[0] + 0.1, 2, 2, utility)
    np.testing.assert_allclose(found.values_N, truth, atol=1e-13)
    assert found.utility == pytest.approx(total)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 80), st.integers(0, 99),
    st.sampled_from(["votes", "soft"]),
)  # fmt: skip
def test_values_sum_to_the_vote_of_all_and_chunks_change_nothing(n, t, k, seed, utility):
    """Efficiency holds to 1e-12, and one query at a time gives what all at once give."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 4)), rng.integers(0, 3, n)
    queries, labels = rng.normal(size=(t, 4)), rng.integers(0, 3, t)
    whole = knn_shapley(x, y, queries, labels, k, utility=utility)
    single = knn_shapley(x, y, queries, labels, k, utility=utility, memory_bytes=1)
    assert whole.values_N.sum() == pytest.approx(whole.utility, abs=1e-12)
    np.testing.assert_allclose(single.values_N, whole.values_N, atol=1e-13)


def test_wrong_labels_stand_at_the_bottom():
    """Of two blobs with one label in ten flipped, the flipped records are the lowest values."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 50)
    x = rng.normal(size=(100, 2)) + 8 * y[:, None]
    wrong = rng.choice(100, 10, replace=False)
    seen = y.copy()
    seen[wrong] ^= 1
    test_y = np.repeat([0, 1], 20)
    values = knn_shapley(
        x, seen, rng.normal(size=(40, 2)) + 8 * test_y[:, None], test_y, 5
    ).values_N
    assert set(np.argsort(values)[:10]) == set(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_neighbours": 0}, "num_neighbours >= 1"),
        ({"labels_N": [0]}, r"labels_N: expected \[2\]"),
        ({"labels_T": [0, 1]}, "one label each"),
        ({"queries_TD": [[0.0, 0.0]]}, r"expected \[T, 1\]"),
        ({"records_ND": [[0.0], [np.nan]]}, "got another in row 1"),
        ({"records_ND": np.zeros((0, 1)), "labels_N": []}, "at least 1"),
        ({"utility": "mean"}, "votes or soft"),
        ({"labels_N": [[1.0], [1.0]], "labels_T": [1]}, r"labels_T: expected 0 \.\. 0"),
    ],
)  # fmt: skip
def test_what_is_no_vote_is_refused(change, message):
    """Shapes, K, features and labels that don't fit are named, never scored as zero."""
    given = {"records_ND": [[0.0], [1.0]], "labels_N": [0, 1], "queries_TD": [[0.2]], "labels_T": [0],
             "num_neighbours": 1} | change  # fmt: skip
    with pytest.raises(UtilityError, match=message):
        knn_shapley(**given)
