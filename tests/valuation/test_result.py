"""Rounding to integers: exact sums, no row off by a unit, no interval narrower than computed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import ResultError, ValueRow, apportion, to_nano, values_frame

COMMON = {"method": "shapley.exact", "target": "target_value", "unit": "nat"}
FINITE = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


def row(subject, value, **more):
    """A value of a group."""
    return ValueRow(subject_kind="group", subject_id=subject, value=value, **(COMMON | more))


@settings(deadline=None, max_examples=150)
@given(st.lists(FINITE, min_size=1, max_size=20))
def test_rounded_values_sum_to_the_rounded_sum(values):
    """Efficiency survives: Σ nano is the exact sum in nano, rounded once; each row is off by < 1."""
    nano = [r.value_nano for r in to_nano([row(f"g{i:02d}", v) for i, v in enumerate(values)])]
    scaled = [Fraction(value * 10**9) for value in values]  # what float64 makes of value in nano
    assert abs(sum(nano) - sum(scaled)) <= Fraction(1, 2) + Fraction(1, 10**6)
    assert all(abs(n - s) < 1 + 1e-6 for n, s in zip(nano, scaled, strict=True))


def test_three_thirds_make_a_whole():
    """Golden values: 1/3 + 1/3 + 1/3 is one billion; the spare unit goes to the smallest id."""
    rows = to_nano([row("c", 1 / 3), row("a", 1 / 3), row("b", 1 / 3)])
    assert [r.value_nano for r in rows] == [333_333_333, 333_333_334, 333_333_333]
    assert [r.subject_id for r in rows] == ["c", "a", "b"]


@settings(deadline=None, max_examples=50)
@given(st.lists(FINITE, min_size=2, max_size=8), st.randoms())
def test_rounding_does_not_depend_on_the_order_of_rows(values, random):
    """The same rows in another order get the same integers."""
    rows = [row(f"g{i}", v) for i, v in enumerate(values)]
    shuffled = rows[:]
    random.shuffle(shuffled)
    first = {r.subject_id: r.value_nano for r in to_nano(rows)}
    assert {r.subject_id: r.value_nano for r in to_nano(shuffled)} == first


def test_lists_are_rounded_apart():
    """Rows of different methods, kinds or targets don't lend each other units."""
    thirds = [row(i, 1 / 3) for i in "abc"]
    others = [row(i, 0.4e-9, method="banzhaf.exact") for i in "ab"]
    together = to_nano([thirds[0], others[0], *thirds[1:], others[1]])
    assert sum(r.value_nano for r in together if r.method == "shapley.exact") == 10**9
    assert (
        sum(r.value_nano for r in together if r.method == "banzhaf.exact") == 1
    )  # 0.8 rounds to 1


def test_intervals_are_rounded_outwards():
    """A published interval contains the computed one, and a published error is not smaller."""
    (got,) = to_nano([row("a", 1e-9, se=1.2e-9, ci_low=-1.2e-9, ci_high=3.2e-9, n=7)])
    assert (got.se_nano, got.ci_low_nano, got.ci_high_nano, got.n) == (2, -2, 4, 7)
    (bare,) = to_nano([row("a", 0.0)])
    assert (bare.se_nano, bare.ci_low_nano, bare.ci_high_nano) == (None, None, None)


def test_negative_values_keep_their_sum():
    """Floors of negative numbers don't shift the total: -0.5 and 0.5 nano sum to zero."""
    rows = to_nano([row("a", -0.5e-9), row("b", 0.5e-9), row("c", -2e-9)])
    assert sum(r.value_nano for r in rows) == -2
    assert rows[2].value_nano == -2


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 10**20),
    st.dictionaries(st.text(max_size=3), st.integers(0, 10**18), min_size=1, max_size=12),
)
def test_apportion_is_exact_and_fair(total, weights):
    """Shares sum to the total, differ from the exact quota by less than one, and zero gets zero."""
    whole = sum(weights.values())
    if not whole:
        with pytest.raises(ResultError, match="positive sum"):
            apportion(total, weights)
        return
    shares = apportion(total, weights)
    assert sum(shares.values()) == total
    for subject, weight in weights.items():
        assert abs(shares[subject] - Fraction(total * weight, whole)) < 1
        assert weight or shares[subject] == 0


def test_apportion_by_hand():
    """Golden values: 10 by 6 : 3 : 2 is 5, 3, 2 (quotas 5.45, 2.73, 1.82)."""
    assert apportion(10, {"a": 6, "b": 3, "c": 2}) == {"a": 5, "b": 3, "c": 2}
    assert apportion(1, {"b": 1, "a": 1}) == {"a": 1, "b": 0}
    with pytest.raises(ResultError, match="at least 0, got -1"):
        apportion(-1, {"a": 1})
    with pytest.raises(ResultError, match="none below 0"):
        apportion(1, {"a": 2, "b": -1})


def test_the_frame_has_the_columns_of_the_file_format():
    """Names, types and order of ``values.parquet``; missing errors stay null."""
    import polars as pl

    rows = to_nano([row("a", 0.25, se=0.1), row("b", -0.25)])
    frame = values_frame(rows, plan_digest="p", corpus_version="v", checkpoint_root="none")
    assert dict(frame.schema) == {
        "subject_kind": pl.String, "subject_id": pl.String, "method": pl.String,
        "target": pl.String, "unit": pl.String, "value_nano": pl.Int64, "se_nano": pl.Int64,
        "ci_low_nano": pl.Int64, "ci_high_nano": pl.Int64, "n": pl.Int64,
        "plan_digest": pl.String, "corpus_version": pl.String, "checkpoint_root": pl.String,
    }  # fmt: skip
    assert frame["value_nano"].to_list() == [250_000_000, -250_000_000]
    assert frame["se_nano"].to_list() == [100_000_000, None]
    empty = values_frame((), plan_digest="p", corpus_version="v", checkpoint_root="none")
    assert empty.schema == frame.schema


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"value": float("nan")}, "finite number"),
        ({"value": 1e10}, "within ±9.2e"),
        ({"value": 0.0, "se": -1.0}, "se of a: expected at least 0"),
        ({"value": 0.0, "ci_low": 0.0}, "both ends or none"),
        ({"value": 0.0, "ci_low": 1.0, "ci_high": 0.0}, "low <= high"),
        ({"value": 0.0, "n": -1}, "n of a"),
        ({"value": 0.0, "unit": "dollar"}, "unit: expected one of"),
        ({"value": 0.0, "subject_kind": "person"}, "subject_kind: expected one of"),
    ],
)
def test_a_row_that_cannot_be_published_is_refused(more, message):
    """Numbers that are not finite or upside down stop here, with the subject's name."""
    data = COMMON | {"subject_kind": "group", "subject_id": "a"} | more
    with pytest.raises(ResultError, match=message):
        ValueRow(**data)


def test_a_subject_may_not_stand_twice_in_one_list():
    """Two values for one subject would make the sum ambiguous."""
    with pytest.raises(ResultError, match="'a' twice"):
        to_nano([row("a", 1.0), row("b", 2.0), row("a", 3.0)])
