"""Groups of owners: decided by the data alone, contiguous in time, as equal as can be."""

from __future__ import annotations

from datetime import date
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import GroupError, owner_groups


def groups_of(rows, max_groups):
    """Rows are (owner, tokens, date, personal)."""
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return owner_groups(*(list(column) for column in columns), max_groups)


@st.composite
def row_lists(draw, *, personal=True):
    """Up to nine owners with up to three rows each."""
    rows = []
    for number in range(draw(st.integers(1, 9))):
        for _ in range(draw(st.integers(1, 3))):
            day = draw(st.none() | st.dates(date(1790, 1, 1), date(2026, 1, 1)))
            is_personal = personal and draw(st.integers(0, 5)) == 0
            rows.append((f"owner{number}", draw(st.integers(0, 500)), day, is_personal))
    return rows


def best_cut_by_trying(sizes, num_parts):
    """Least sum of squares over every contiguous cut."""
    best = None
    for borders in combinations(range(1, len(sizes)), num_parts - 1):
        edges = [0, *borders, len(sizes)]
        cost = sum(sum(sizes[a:b]) ** 2 for a, b in pairwise(edges))
        best = cost if best is None else min(best, cost)
    return best


def test_presidents_are_cut_in_order_of_time():
    """By hand: six owners of equal size in three groups are neighbours in time."""
    rows = [
        ("lincoln", 10, "1863-12-08", False), ("washington", 10, "1790-01-08", False),
        ("obama", 10, "2013-02-12", False), ("adams", 10, "1797-11-22", False),
        ("grant", 10, "1873-12-01", False), ("bush", 10, "1990-01-31", False),
    ]  # fmt: skip
    groups = groups_of(rows, 3)
    assert [(g.id, g.owners, g.tokens) for g in groups] == [
        ("group-00", ("washington", "adams"), 20),
        ("group-01", ("lincoln", "grant"), 20),
        ("group-02", ("bush", "obama"), 20),
    ]


def test_personal_owners_form_their_own_group():
    """One personal row is enough, all personal owners stand together, and they come last."""
    rows = [
        ("a", 5, "2000-01-01", False), ("registry", 9, None, True), ("b", 5, "2001-01-01", False),
        ("clinic", 1, "1999-01-01", False), ("clinic", 1, "1999-01-02", True),
    ]  # fmt: skip
    groups = groups_of(rows, 3)
    assert [(g.id, g.owners) for g in groups] == [
        ("group-00", ("a",)), ("group-01", ("b",)), ("personal", ("clinic", "registry")),
    ]  # fmt: skip
    only = groups_of([("registry", 9, None, True)], 1)
    assert [(g.id, g.owners) for g in only] == [("personal", ("registry",))]


def test_the_median_date_decides_and_undated_owners_come_last():
    """One early outlier doesn't move an owner; ties are broken by id."""
    rows = [
        ("late", 1, "1700-01-01", False), ("late", 1, "2000-01-01", False), ("late", 1, "2000-01-02", False),
        ("early", 1, "1900-01-01", False), ("z-tie", 1, "1900-01-01", False), ("undated", 1, None, False),
    ]  # fmt: skip
    order = [owner for group in groups_of(rows, 9) for owner in group.owners]
    assert order == ["early", "z-tie", "late", "undated"]


@settings(deadline=None, max_examples=80)
@given(row_lists(), st.integers(2, 7), st.randoms())
def test_the_order_of_the_rows_does_not_matter(rows, max_groups, random):
    """Nobody gets another group by delivering earlier."""
    shuffled = rows[:]
    random.shuffle(shuffled)
    assert groups_of(shuffled, max_groups) == groups_of(rows, max_groups)


@settings(deadline=None, max_examples=80)
@given(row_lists(), st.integers(2, 7))
def test_every_owner_stands_in_exactly_one_group(rows, max_groups):
    """Groups are a partition, none is empty, and there are no more than allowed."""
    groups = groups_of(rows, max_groups)
    owners = [owner for group in groups for owner in group.owners]
    assert sorted(owners) == sorted({row[0] for row in rows})
    assert all(group.owners for group in groups)
    assert len(groups) <= max_groups
    assert sum(group.tokens for group in groups) == sum(row[1] for row in rows)
    assert len({group.id for group in groups}) == len(groups)


@settings(deadline=None, max_examples=80)
@given(row_lists(personal=False), st.integers(1, 5))
def test_no_contiguous_cut_is_more_equal(rows, max_groups):
    """The sum of squared group sizes is the least over all cuts, tried one by one."""
    groups = groups_of(rows, max_groups)
    tokens = {owner: 0 for owner, *_ in rows}
    for owner, count, *_ in rows:
        tokens[owner] += count
    ordered = [owner for group in groups_of(rows, 99) for owner in group.owners]
    assert [owner for group in groups for owner in group.owners] == ordered
    best = best_cut_by_trying([tokens[o] for o in ordered], len(groups))
    assert sum(group.tokens**2 for group in groups) == best
    assert len(groups) == min(max_groups, len(ordered))


def test_rows_that_cannot_be_grouped_are_refused():
    """No rows, columns of different lengths, negative tokens and too few groups are errors."""
    with pytest.raises(GroupError, match="at least one row"):
        groups_of([], 3)
    with pytest.raises(GroupError, match="columns of one length"):
        owner_groups(["a"], [1, 2], [None], [False], 3)
    with pytest.raises(GroupError, match="got -1 for owner 'a'"):
        groups_of([("a", -1, None, False)], 3)
    with pytest.raises(GroupError, match=r"at least 1 .*got 0"):
        groups_of([("a", 1, None, False)], 0)
    with pytest.raises(GroupError, match=r"at least 2 .*need a group of their own.*got 1"):
        groups_of([("a", 1, None, False), ("b", 1, None, True)], 1)
