"""Legal entities: names of one entity change nothing, a shared text is split to the last token, and rules say so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from valuation import (
    GroupValues,
    Lots,
    NanoRow,
    OwnerValues,
    PriceRule,
    PricingError,
    first_in_cluster,
    lot_shares,
    price,
    rule_digest,
    rule_document,
    rule_sentence,
    why_price,
)
from valuation.entities import Holdings, entity_holdings, merged, players, values_of_entities

RULE = PriceRule(pool_microunits=10**6, currency="EUR", split="entity", entities="ab" * 32)


def market(seed):
    """Records in clusters with owners a (of entity X), b, c; lots that know neither; values of lots of either sign."""
    rng = np.random.default_rng(seed)
    count, lots = int(rng.integers(4, 40)), int(rng.integers(1, 5))
    cluster_N = rng.integers(0, max(2, count // 2), count)
    sold_N = rng.random(count) < 0.9
    assume(sold_N.any())
    order_N = rng.permutation(count)
    first_N = sold_N.copy()
    first_N[sold_N] = first_in_cluster(cluster_N[sold_N], order_N[sold_N])
    tokens_N = np.where(first_N, rng.integers(1, 60, count), 7)
    lot_N = np.where(first_N, rng.integers(0, lots, count), -1)
    kept = sorted(set(lot_N[first_N].tolist()))
    lot_N = np.where(first_N, np.searchsorted(kept, lot_N), -1)
    sizes = np.bincount(lot_N[first_N], weights=tokens_N[first_N]).astype(np.int64)
    owner_N = [("a", "b", "c")[i] for i in rng.integers(0, 3, count)]
    lot_rows = [
        NanoRow(subject_kind="lot", subject_id=f"lot-{k:02d}", method="m", target="t", unit="nat", value_nano=int(v))
        for k, v in enumerate(rng.integers(-(10**9), 10**9, len(kept)))
    ]  # fmt: skip
    columns = {"cluster_N": cluster_N, "order_N": order_N, "sold_N": sold_N}
    return Lots(lot_N, sizes, np.zeros(len(kept), bool)), owner_N, tokens_N, columns, lot_rows, rng


def errors(holdings, lot_rows):
    """Intervals of any shape that depend on the holdings only."""
    share_OK = holdings.tokens_OK / np.maximum(1, holdings.tokens_OK.sum(axis=0))
    value_O = share_OK @ np.array([row.value_nano for row in lot_rows]) / 1e9
    half_O = share_OK.sum(axis=1) / 3
    return GroupValues(value_O, half_O / 2, value_O - half_O, value_O + half_O, 0.0, 0.0, 9, 0.95, "m")  # fmt: skip


def valued(lots, owner_N, tokens_N, columns, lot_rows, entity_of):
    """Owners' and entities' values with intervals, the whole way."""
    held = entity_holdings(lots, owner_N, tokens_N, **columns, entity_of=entity_of)
    return held, values_of_entities(
        lot_rows, held, entity_of, errors=errors(held, lot_rows), player_errors=errors(merged(held, entity_of), lot_rows)
    )  # fmt: skip


rules = st.builds(
    lambda pool, rate, floor, negative, basis: PriceRule(
        pool_microunits=pool, currency="EUR", scheme="posted" if rate else "pool", rate_microunits=rate, floor_microunits=floor,
        negative=negative, basis=basis, split="entity", entities="ab" * 32,
    ),
    st.integers(0, 10**9), st.sampled_from([0, 10**6, 10**12]), st.sampled_from([0, 1000, 10**8]),
    st.sampled_from(["nothing", "offset"]), st.sampled_from(["value", "lower"]),
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 6), rules)
def test_an_entity_under_any_number_of_names_earns_the_same(seed, k, rule):
    """X's records under k names in any split: value, price, what is held and everybody else's amounts stay to the last unit."""
    lots, owner_N, tokens_N, columns, lot_rows, rng = market(seed)
    shells = [f"z{rng.integers(k)}" if owner == "a" else owner for owner in owner_N]
    mapping = {"a": "X"} | {f"z{i}": "X" for i in range(k)}
    held, one = valued(lots, owner_N, tokens_N, columns, lot_rows, mapping)
    held_again, many = valued(lots, shells, tokens_N, columns, lot_rows, mapping)
    assert one.entities == many.entities
    whole, whole_again = merged(held, mapping), merged(held_again, mapping)
    assert whole.owners == whole_again.owners
    np.testing.assert_array_equal(whole.tokens_OK, whole_again.tokens_OK)
    before, after = price(one, rule), price(many, rule)
    assert (before.reserve_microunits, before.reserve_reasons) == (
        after.reserve_microunits, after.reserve_reasons
    )  # fmt: skip
    sums = []
    for found in (before, after):
        amounts = {"others": {}, "X": [0, 0]}
        for row in found.rows:
            if row.subject in mapping:
                amounts["X"][0] += row.price_microunits
                amounts["X"][1] += row.held_microunits
            else:
                amounts["others"][row.subject] = (row.price_microunits, row.held_microunits)
        sums.append(amounts)
    assert sums[0] == sums[1]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), rules)
def test_every_token_nano_and_unit_has_an_owner(seed, rule):
    """Holdings add up to the lots' tokens, owners' values to the lots', an entity's to its owners', and prices to the pool."""
    lots, owner_N, tokens_N, columns, lot_rows, _ = market(seed)
    mapping = {"a": "X", "b": "X"}
    held, values = valued(lots, owner_N, tokens_N, columns, lot_rows, mapping)
    np.testing.assert_array_equal(held.tokens_OK.sum(axis=0), lots.tokens_K)
    assert held.tokens_OK.min() >= 0
    assert sum(row.value_nano for row in values.rows) == sum(row.value_nano for row in lot_rows)
    for entity in values.entities:
        inside = [row for row in values.rows if values.member_of.get(row.subject_id) == entity.subject_id]  # fmt: skip
        assert entity.value_nano == sum(row.value_nano for row in inside)
        assert entity.n == sum(row.n for row in inside)
    found = price(values, rule)
    assert (
        sum(row.price_microunits for row in found.rows)
        + found.held_microunits
        + found.reserve_microunits
        == rule.pool_microunits
    )
    worth = {row.subject_id: row.value_nano for row in values.rows}
    assert {row.subject for row in found.rows} == set(worth)
    for row in found.rows:
        assert min(row.price_microunits, row.held_microunits) >= 0
        assert worth[row.subject] > 0 or row.price_microunits == row.held_microunits == 0


def test_a_shared_text_goes_in_equal_parts_to_entities_in_the_order_of_commitment():
    """Seven tokens that X (twice), b and c hold: 3 to the first, 2 to each other; X's second copy, and one that may not be sold, get nothing."""
    lots = Lots(np.array([0, -1, -1, -1, -1]), np.array([7]), np.array([False]))
    held = entity_holdings(
        lots, ["a", "z", "c", "b", "d"], np.array([7, 7, 9, 7, 7]), cluster_N=[1, 1, 1, 1, 1], order_N=[0, 1, 3, 2, 4],
        sold_N=[True, True, True, True, False], entity_of={"a": "X", "z": "X"},
    )  # fmt: skip
    assert dict(zip(held.owners, held.tokens_OK[:, 0].tolist(), strict=True)) == {
        "a": 3, "b": 2, "c": 2, "d": 0, "z": 0
    }  # fmt: skip
    assert held.records_O.tolist() == [1, 1, 1, 0, 0]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_without_copies_and_entities_the_split_is_that_of_the_first(seed):
    """Where no text is held twice both rules give the same tokens."""
    lots, owner_N, tokens_N, columns, _, _ = market(seed)
    alone = {**columns, "cluster_N": np.arange(len(owner_N))}
    held = entity_holdings(lots, owner_N, tokens_N, **alone, entity_of={})
    owners, tokens_OK = lot_shares(lots, owner_N, tokens_N)
    assert held.owners == owners
    np.testing.assert_array_equal(held.tokens_OK, tokens_OK)
    assert players(owners, {}) == owners


def harm(split):
    """Owner a, worth 10 - 6, poses as one name worth 10 and one worth -6 beside b, worth 4."""
    rows = {"good": 10, "bad": -6, "b": 4}
    made = [
        NanoRow(subject_kind="owner", subject_id=name, method="m", target="t", unit="nat", value_nano=v)
        for name, v in rows.items()
    ]  # fmt: skip
    whole = dataclasses.replace(made[0], subject_kind="entity", subject_id="entity:X", value_nano=4)
    values = OwnerValues(tuple(made), {}, (whole,), {"good": "entity:X", "bad": "entity:X"})
    rule = dataclasses.replace(
        RULE, split=split, entities=RULE.entities if split == "entity" else ""
    )
    return price(values, rule), values, rule


def test_attack_harm_put_under_another_name():
    """Priced owner by owner the trick earns 10/14 of the pool; priced as one entity 4/8, as under one name."""
    paid = {split: {row.subject: row.price_microunits for row in harm(split)[0].rows} for split in ("first", "entity")}  # fmt: skip
    assert paid["first"] == {"good": 714_286, "bad": 0, "b": 285_714}
    assert paid["entity"] == {"good": 500_000, "bad": 0, "b": 500_000}


def test_the_rule_says_how_it_splits_and_older_rules_keep_their_digest():
    """Split and the digest of the entities change document, digest and sentence; the default's document is that of version 2."""
    plain = dataclasses.replace(RULE, split="first", entities="")
    other = dataclasses.replace(RULE, entities="cd" * 32)
    assert len({rule_digest(rule) for rule in (RULE, other, plain)}) == 3
    assert "split" not in rule_document(plain)
    assert (rule_document(plain)["version"], rule_document(RULE)["version"]) == (2, 3)
    assert "legal entity" in rule_sentence(RULE)
    assert plain.is_plain
    assert not RULE.is_plain
    found, values, rule = harm("entity")
    assert "priced as one with the other owners of entity:X, worth 4" in why_price("good", values, found, rule)  # fmt: skip


@pytest.mark.parametrize(
    ("split", "entities"),
    [("entity", ""), ("first", "ab" * 32), ("entity", "ab"), ("heads", "")],
)
def test_a_split_that_cannot_be_meant_is_refused(split, entities):
    """A split by entity without the entities, entities without it, and other words."""
    with pytest.raises(PricingError):
        dataclasses.replace(RULE, split=split, entities=entities)


def test_values_and_holdings_that_do_not_fit_are_refused():
    """Entities without a value, two valued copies, a valued record that may not be sold, other lots."""
    _, values, _ = harm("entity")
    with pytest.raises(PricingError, match="entity:X"):
        price(dataclasses.replace(values, entities=()), RULE)
    lots = Lots(np.array([0, 0]), np.array([4]), np.array([False]))
    twice = {"cluster_N": [1, 1], "order_N": [0, 1], "sold_N": [True, True], "entity_of": {}}
    with pytest.raises(PricingError, match="one valued record per cluster"):
        entity_holdings(lots, ["a", "b"], [2, 2], **twice)
    with pytest.raises(PricingError, match="may be sold"):
        entity_holdings(lots, ["a", "b"], [2, 2], **twice | {"sold_N": [True, False]})
    with pytest.raises(PricingError, match="expected 1 lots, got 0"):
        values_of_entities([], Holdings(("a",), np.array([[4]]), np.array([1])), {})
