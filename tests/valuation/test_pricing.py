"""Prices: exact sums, copies earn nothing, names make no difference, and what is unpaid has a reason."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from math import log1p

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import (
    NanoRow,
    OwnerGroup,
    OwnerValues,
    PriceRule,
    PricingError,
    ValueRow,
    exact_shapley,
    first_in_cluster,
    owner_values,
    price,
    prices_frame,
    rule_digest,
    rule_document,
    to_nano,
)
from valuation.pricing import RESERVE

COMMON = {"method": "shapley.exact", "target": "target_value", "unit": "nat"}
RULE = PriceRule(pool_microunits=1_000_000, currency="EUR")


def group_row(group_id, nano):
    """A published value of a group."""
    return NanoRow(subject_kind="group", subject_id=group_id, value_nano=nano, n=10, **COMMON)


def owner_row(owner, nano):
    """A value of an owner, as `owner_values` makes it."""
    return NanoRow(subject_kind="owner", subject_id=owner, value_nano=nano, **COMMON)


def derive(values, groups, records, *, copies_valued=False):
    """Records are (owner, tokens, cluster), in commit order."""
    owner_N = [record[0] for record in records]
    tokens_N, cluster_N = (
        np.array([record[k] for record in records], dtype=np.int64) for k in (1, 2)
    )
    order_N = np.arange(len(records))
    valued_N = (
        np.ones(len(records), bool) if copies_valued else first_in_cluster(cluster_N, order_N)
    )
    return owner_values(
        [group_row(group_id, nano) for group_id, nano in values.items()],
        [OwnerGroup(group_id, tuple(owners), 0) for group_id, owners in groups.items()],
        owner_N=owner_N, tokens_N=tokens_N, cluster_N=cluster_N, order_N=order_N, valued_N=valued_N,
    )  # fmt: skip


def by_owner(values):
    """Owner -> nano value."""
    return {row.subject_id: row.value_nano for row in values.rows}


def paid(prices):
    """Owner -> price."""
    return {row.subject: row.price_microunits for row in prices.rows}


# --- from groups to owners -------------------------------------------------------------------


def test_a_group_is_shared_by_first_committed_tokens():
    """By hand: 60 and 30 fresh tokens of a value of 9 are 6 and 3; a copy of 100 tokens is none."""
    values = derive(
        {"g": 9},
        {"g": ["ann", "bob", "cid"]},
        [("ann", 60, 0), ("bob", 30, 1), ("cid", 60, 0), ("bob", 100, 0)],
    )
    assert by_owner(values) == {"ann": 6, "bob": 3, "cid": 0}
    assert values.unattributed_nano == {"g": 0}
    assert [row.n for row in values.rows] == [1, 1, 0]
    assert all(row.method == "shapley.exact.derived" for row in values.rows)
    assert all(row.se_nano is None and row.ci_low_nano is None for row in values.rows)


def test_the_first_commit_wins_and_not_the_first_row():
    """Inside a cluster across owners the lowest commit order earns, wherever its row stands."""
    assert first_in_cluster(np.array([7, 7, 3, 7]), np.array([5, 2, 9, 3])).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert first_in_cluster(np.zeros(0, int), np.zeros(0, int)).tolist() == []


@st.composite
def corpora(draw):
    """Groups with any value, owners with any records, clusters across owners."""
    num_groups = draw(st.integers(1, 3))
    groups = {
        f"g{k}": [f"o{k}{i}" for i in range(draw(st.integers(1, 3)))] for k in range(num_groups)
    }
    owners = [owner for members in groups.values() for owner in members]
    record = st.tuples(st.sampled_from(owners), st.integers(0, 50), st.integers(0, 6))
    records = draw(st.lists(record, max_size=14))
    values = {group: draw(st.integers(-(10**9), 10**9)) for group in groups}
    return values, groups, records


@settings(deadline=None, max_examples=150)
@given(corpora(), st.booleans())
def test_owner_values_and_what_is_nobodys_sum_to_the_group(corpus, copies_valued):
    """Nothing is lost on the way from a group to its owners, to the last nano unit."""
    values, groups, records = corpus
    got = derive(values, groups, records, copies_valued=copies_valued)
    nano = by_owner(got)
    assert sorted(nano) == sorted(owner for members in groups.values() for owner in members)
    for group, members in groups.items():
        assert sum(nano[o] for o in members) + got.unattributed_nano[group] == values[group]
        assert all(nano[o] * values[group] >= 0 for o in members)


@settings(deadline=None, max_examples=150)
@given(corpora(), st.integers(0, 10**9), st.integers(0, 100))
def test_prices_and_reserve_sum_to_the_pool_exactly(corpus, pool, reserve):
    """For any values: integers, none negative, summing to the pool; below zero is paid nothing."""
    values = derive(*corpus, copies_valued=True)
    rule = PriceRule(pool_microunits=pool, currency="EUR", reserve_microunits=min(reserve, pool))
    prices = price(values, rule)
    amounts = paid(prices)
    assert all(isinstance(amount, int) and amount >= 0 for amount in amounts.values())
    assert sum(amounts.values()) + prices.reserve_microunits == pool
    assert prices.reserve_microunits >= rule.reserve_microunits
    assert bool(prices.reserve_reasons) == (prices.reserve_microunits > 0)
    for owner, nano in by_owner(values).items():
        assert nano > 0 or amounts[owner] == 0
    frame = prices_frame(prices, plan_digest="p")
    assert frame["price_microunits"].sum() == pool


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-1000, 10**9), min_size=1, max_size=8), st.integers(0, 10**12))
def test_a_price_is_the_share_of_positive_value_within_one_unit(nanos, pool):
    """Each price differs from (P · v⁺ / Σ v⁺) by less than one micro-unit."""
    values = OwnerValues(tuple(owner_row(f"o{i}", nano) for i, nano in enumerate(nanos)))
    total = sum(max(0, nano) for nano in nanos)
    prices = price(values, PriceRule(pool_microunits=pool, currency="EUR"))
    for row, nano in zip(prices.rows, nanos, strict=True):
        quota = Fraction(pool * max(0, nano), total) if total else 0
        assert abs(row.price_microunits - quota) < 1


# --- the attacks -----------------------------------------------------------------------------


def game(records, groups, *, skip_copies):
    """Toy utility of coalitions: log(1 + tokens), copies counted or left out like in training."""
    cluster_N = np.array([record[2] for record in records])
    valued_N = (
        first_in_cluster(cluster_N, np.arange(len(records)))
        if skip_copies
        else np.ones(len(records), bool)
    )
    names = list(groups)
    table = []
    for mask in range(2 ** len(names)):
        members = {o for k, name in enumerate(names) if mask >> k & 1 for o in groups[name]}
        mine = [
            r for r, valued in zip(records, valued_N, strict=True) if valued and r[0] in members
        ]
        # What a model learns from a text twice is little: a cluster counts once per coalition.
        once = {cluster: tokens for _, tokens, cluster in mine}
        table.append(log1p(sum(once.values()) / 100))
    shapley = exact_shapley(np.array(table), len(names))
    rows = [
        ValueRow(subject_kind="group", subject_id=name, value=float(value), **COMMON)
        for name, value in zip(names, shapley, strict=True)
    ]
    return {row.subject_id: row.value_nano for row in to_nano(rows)}


HONEST = [("ann", 400, 0), ("ann", 200, 1), ("bob", 300, 2), ("cid", 250, 3), ("dan", 50, 4)]
GROUPS = {"g0": ["ann"], "g1": ["bob", "cid"], "g2": ["dan"]}


@pytest.mark.parametrize("home", ["g0", "g1", "g2", "g3"])
def test_a_copier_earns_nothing_and_takes_nothing(home):
    """Attack: eve delivers everybody's texts again, in any group. Nobody's price moves, hers is 0."""
    groups = {name: list(owners) for name, owners in GROUPS.items()}
    before = price(derive(game(HONEST, groups, skip_copies=True), groups, HONEST), RULE)
    groups.setdefault(home, []).append("eve")
    records = HONEST + [("eve", tokens, cluster) for _, tokens, cluster in HONEST]
    after = price(derive(game(records, groups, skip_copies=True), groups, records), RULE)
    assert paid(after) == paid(before) | {"eve": 0}
    assert after.reserve_microunits == 0


def test_a_copier_with_one_text_of_her_own_earns_by_that_text_only():
    """Attack: copies beside a tiny original don't carry the value of what was copied."""
    groups = GROUPS | {"g3": ["eve"]}
    tiny = [*HONEST, ("eve", 5, 9)]
    copies = [*tiny, ("eve", 400, 0), ("eve", 300, 2)]
    honest = paid(price(derive(game(tiny, groups, skip_copies=True), groups, tiny), RULE))
    attack = paid(price(derive(game(copies, groups, skip_copies=True), groups, copies), RULE))
    assert attack == honest
    # Even if copies were trained on, their part of the inflated group value is nobody's.
    inflated = derive(game(copies, groups, skip_copies=False), groups, copies, copies_valued=True)
    assert inflated.unattributed_nano["g3"] > 100 * by_owner(inflated)["eve"]
    prices = price(inflated, RULE)
    assert paid(prices)["eve"] <= honest["eve"]
    assert "copies of records that others committed first" in prices.reserve_reasons[0]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(10, 10**7))
def test_a_split_identity_earns_nothing_extra(names, pool):
    """Attack: ann delivers under up to five names in her group. Together they get what she got.

    Rounding gives a name less than one micro-unit, so the bound is the number of her names.
    """
    rule = PriceRule(pool_microunits=pool, currency="EUR")
    records = [("ann", 40 + k, k) for k in range(5)] + [("bob", 77, 5), ("cid", 91, 6)]
    values = {"g0": 700_000_001, "g1": 123_456_789}
    before = paid(price(derive(values, {"g0": ["ann", "bob"], "g1": ["cid"]}, records), rule))
    masks = [
        (f"ann{name}", tokens, k) for name, (_, tokens, k) in zip(names, records[:5], strict=True)
    ]
    split = sorted({record[0] for record in masks})
    after = paid(
        price(derive(values, {"g0": [*split, "bob"], "g1": ["cid"]}, [*masks, *records[5:]]), rule)
    )
    assert abs(sum(after[name] for name in split) - before["ann"]) < len(split) + 1
    assert abs(after["bob"] - before["bob"]) <= 1


def test_repeating_oneself_earns_nothing():
    """Attack: near copies of one's own texts have no tokens that count."""
    once = derive({"g": 1000}, {"g": ["ann", "bob"]}, [("ann", 10, 0), ("bob", 10, 1)])
    often = derive(
        {"g": 1000}, {"g": ["ann", "bob"]}, [("ann", 10, 0), ("bob", 10, 1)] + [("ann", 10, 0)] * 50
    )
    assert by_owner(often) == by_owner(once) == {"ann": 500, "bob": 500}


# --- nothing to pay, and the rule ------------------------------------------------------------


@pytest.mark.parametrize("nanos", [[-5, 0, -1], [0], []])
def test_without_a_positive_value_the_pool_is_kept(nanos):
    """All values at or below zero: nobody is paid and the reserve says why."""
    values = OwnerValues(tuple(owner_row(f"o{i}", nano) for i, nano in enumerate(nanos)))
    prices = price(values, PriceRule(pool_microunits=500, currency="EUR", reserve_microunits=20))
    assert set(paid(prices).values()) <= {0}
    assert prices.reserve_microunits == 500
    assert prices.reserve_reasons == (
        "20 micro-units are held back by the rule",
        "no owner has a positive value, so nothing is paid and the pool's 480 micro-units are kept",
    )
    frame = prices_frame(prices, plan_digest="p")
    assert frame["subject"].to_list()[-1] == RESERVE
    assert frame["price_microunits"].sum() == 500


def test_the_frame_has_the_columns_of_the_file_format():
    """Names, types and order of ``prices.parquet``; no reserve row without a reserve."""
    import polars as pl

    prices = price(OwnerValues((owner_row("b", 1), owner_row("a", 2))), RULE)
    frame = prices_frame(prices, plan_digest="plan")
    assert dict(frame.schema) == {
        "subject": pl.String, "price_microunits": pl.Int64, "currency": pl.String,
        "rule_digest": pl.String, "held_microunits": pl.Int64, "plan_digest": pl.String,
    }  # fmt: skip
    assert frame.select("subject", "price_microunits").rows() == [("a", 666_667), ("b", 333_333)]


def test_the_rule_digest_is_that_of_the_canonical_document():
    """Any change of pool, currency or reserve is another rule; the document holds no float."""
    from provenance import jcs

    document = rule_document(RULE)
    assert rule_digest(RULE) == hashlib.sha256(jcs(document)).hexdigest()
    others = [
        PriceRule(pool_microunits=999_999, currency="EUR"),
        PriceRule(pool_microunits=1_000_000, currency="USD"),
        PriceRule(pool_microunits=1_000_000, currency="EUR", reserve_microunits=1),
    ]
    assert len({rule_digest(rule) for rule in [RULE, *others]}) == 4
    assert all(isinstance(value, int | str) for value in document.values())


@pytest.mark.parametrize(
    ("pool", "currency", "reserve", "message"),
    [
        (-1, "EUR", 0, "pool_microunits: expected an integer"),
        (1.5, "EUR", 0, "pool_microunits: expected an integer"),
        (True, "EUR", 0, "pool_microunits: expected an integer"),
        (10, "EUR", 11, "at most the pool of 10, got 11"),
        (10, "", 0, "currency"),
    ],
)
def test_a_rule_that_cannot_be_paid_is_refused(pool, currency, reserve, message):
    """Amounts are integers in range, and the reserve is a part of the pool."""
    with pytest.raises(PricingError, match=message):
        PriceRule(pool_microunits=pool, currency=currency, reserve_microunits=reserve)


def test_groups_rows_and_records_that_do_not_fit_are_refused():
    """Every mismatch that could pay the wrong owner has its own message."""
    with pytest.raises(PricingError, match="expected one row per group"):
        derive({"g": 1, "h": 2}, {"g": ["ann"]}, [("ann", 1, 0)])
    with pytest.raises(PricingError, match="each owner in one group"):
        derive({"g": 1, "h": 2}, {"g": ["ann"], "h": ["ann"]}, [("ann", 1, 0)])
    with pytest.raises(PricingError, match="got 'eve' as well"):
        derive({"g": 1}, {"g": ["ann"]}, [("eve", 1, 0)])
    with pytest.raises(PricingError, match="tokens_N: expected at least 0, got -1"):
        derive({"g": 1}, {"g": ["ann"]}, [("ann", -1, 0)])
    with pytest.raises(PricingError, match="none called"):
        derive({"g": 1}, {"g": [RESERVE]}, [])
    with pytest.raises(PricingError, match="got a tie"):
        first_in_cluster(np.array([0, 1]), np.array([3, 3]))
    with pytest.raises(PricingError, match="one cluster and one order"):
        first_in_cluster(np.array([0, 1]), np.array([3]))
    with pytest.raises(PricingError, match="each owner once"):
        price(OwnerValues((owner_row("a", 1), owner_row("a", 1))), RULE)
    mixed = [
        group_row("g", 1),
        NanoRow(
            subject_kind="group", subject_id="h", value_nano=1, method="x", target="t", unit="bit"
        ),
    ]
    groups = [OwnerGroup("g", ("a",), 0), OwnerGroup("h", ("b",), 0)]
    empty = np.zeros(0, dtype=np.int64)
    with pytest.raises(PricingError, match="one method, target and unit"):
        owner_values(
            mixed,
            groups,
            owner_N=[],
            tokens_N=empty,
            cluster_N=empty,
            order_N=empty,
            valued_N=empty,
        )
    with pytest.raises(PricingError, match="expected one entry per record"):
        owner_values(
            [group_row("g", 1)], groups[:1],
            owner_N=["a"], tokens_N=empty, cluster_N=empty, order_N=empty, valued_N=empty,
        )  # fmt: skip
