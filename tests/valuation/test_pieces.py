"""Work in pieces: results in order, few pieces at a time, errors told."""

from __future__ import annotations

import time
from threading import get_ident

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import TokensError
from valuation.pieces import in_order


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_results_come_in_the_order_of_the_items(naps, threads):
    """However long each takes: items that take long don't change places with short ones."""

    def work(item):
        time.sleep(naps[item] / 2000)
        return item

    assert list(in_order(work, range(len(naps)), threads)) == list(range(len(naps)))


def test_no_more_than_two_items_per_thread_wait():
    """The difference of what was asked for and what was handed out is bounded, so memory is."""
    asked = []

    def items():
        for number in range(50):
            asked.append(number)
            yield number

    for number in in_order(lambda item: item, items(), 3):
        assert len(asked) - number <= 2 * 3 + 1
    assert len(asked) == 50


def test_one_thread_is_the_caller_and_several_are_not():
    """With one thread nothing is started."""
    here = get_ident()
    assert set(in_order(lambda _: get_ident(), range(4), 1)) == {here}
    assert here not in set(in_order(lambda _: get_ident(), range(4), 2))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_error_of_an_item_is_told(threads):
    """It comes in its place, after the results before it."""
    done = in_order(lambda item: 1 // (2 - item), range(5), threads)
    assert [next(done), next(done)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(done)


def test_no_threads_are_refused():
    """A bad number is named."""
    with pytest.raises(TokensError, match="at least 1, got 0"):
        list(in_order(str, [1], 0))
