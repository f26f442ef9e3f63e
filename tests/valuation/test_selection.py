"""Claims about weights from values: closed forms, bounds, and no verdict without a value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import ResultError, selection_weights

NANO = st.integers(-(2**53), 2**53)


def _all(values):
    return np.array(values, np.int64), np.ones(len(values), bool)


def test_dropping_the_negative_keeps_all_others_alike():
    """Closed form: negative 0, zero and positive 1."""
    values, known = _all([-1, 0, 5, -(2**53)])
    assert selection_weights(values, known, "drop-negative").tolist() == [0, 10**6, 10**6, 0]


def test_sampling_by_value_is_proportional_up_to_the_cap():
    """Closed form: v / mean of the positive parts in millionths, rounded down; at most four times."""
    values, known = _all([-7, 1, 2, 0, 2])
    assert selection_weights(values, known, "by-value").tolist() == [
        0,
        10**6,
        2 * 10**6,
        0,
        2 * 10**6,
    ]
    values, known = _all([100, 1, 0, 0, 0, 0])
    assert selection_weights(values, known, "by-value").tolist() == [4 * 10**6, 59405, 0, 0, 0, 0]


@settings(deadline=None)
@given(values=st.lists(NANO, min_size=1, max_size=30), data=st.data())
def test_weights_are_bounded_ordered_and_neutral_where_nothing_is_known(values, data):
    """Law: 0..4 millions; more value never less weight; negative always 0; unknown always one."""
    size = len(values)
    known = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    for rule in ("drop-negative", "by-value"):
        try:
            weights = selection_weights(np.array(values, np.int64), known, rule)
        except ResultError:
            assert known.all()
            assert max(values) <= 0
            continue
        assert (weights[~known] == 10**6).all()
        seen = sorted(zip(np.array(values)[known], weights[known], strict=True))
        assert all(w == 0 for v, w in seen if v < 0)
        assert [w for _, w in seen] == sorted(w for _, w in seen)
        assert ((weights >= 0) & (weights <= 4 * 10**6)).all()


def test_scale_does_not_matter():
    """Invariance: nats or bits, a thousand times as much value for everyone gives the same weights."""
    values, known = _all([3, -2, 8, 1])
    for rule in ("drop-negative", "by-value"):
        assert np.array_equal(
            selection_weights(values, known, rule), selection_weights(values * 1000, known, rule)
        )


def test_worthless_corpora_and_unknown_rules_are_refused():
    """Nothing left to train on, or a rule that isn't one: an error that says what to do."""
    with pytest.raises(ResultError, match="train on all records instead"):
        selection_weights(*_all([-1, -2]), "drop-negative")
    with pytest.raises(ResultError, match="no record would be left"):
        selection_weights(*_all([-1, 0]), "by-value")
    with pytest.raises(ResultError, match="expected drop-negative or by-value"):
        selection_weights(*_all([1]), "by-luck")
