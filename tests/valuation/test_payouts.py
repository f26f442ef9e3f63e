"""Rules of payment: posted prices, floors, negative values, lower bounds; reasons, buyers, corrections, the gate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import (
    NanoRow,
    OwnerValues,
    PriceRule,
    PricingError,
    corrections,
    for_sale,
    price,
    price_buyers,
    prices_frame,
    rule_digest,
    rule_document,
    rule_sentence,
    why_price,
)

POOL = {"pool_microunits": 1000, "currency": "EUR"}


def owned(*values, target="target_value", spread=None):
    """Owners a, b, c, ... of these values in nano-nats, with an interval of ± spread."""
    return OwnerValues(
        tuple(
            NanoRow(
                subject_kind="owner", subject_id="abcdefgh"[i], method="shapley.exact.lots", target=target, unit="nat", value_nano=v,
                ci_low_nano=None if spread is None else v - spread, ci_high_nano=None if spread is None else v + spread, n=3,
            )
            for i, v in enumerate(values)
        )
    )  # fmt: skip


def paid(prices):
    """Owner → due."""
    return {row.subject: row.price_microunits for row in prices.rows}


rules = st.builds(
    lambda pool, kept, rate, floor, negative, basis: PriceRule(
        pool_microunits=pool, currency="EUR", reserve_microunits=pool * kept // 10, scheme="posted" if rate else "pool",
        rate_microunits=rate, floor_microunits=floor, negative=negative, basis=basis,
    ),
    st.integers(0, 10**9), st.integers(0, 10), st.sampled_from([0, 0, 1, 10**6, 10**15]), st.sampled_from([0, 0, 1, 1000]),
    st.sampled_from(["nothing", "offset"]), st.sampled_from(["value", "lower"]),
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    rules, st.lists(st.integers(-(10**10), 10**10), min_size=1, max_size=8), st.integers(0, 10**10)
)
def test_every_rule_accounts_for_the_last_unit(rule, values, spread):
    """Due, held back and reserve add up to the pool; nobody is paid for a negative value, nothing is negative, and the table says the same."""
    values = owned(*values, spread=spread)
    found = price(values, rule)
    assert (
        sum(paid(found).values()) + found.held_microunits + found.reserve_microunits
        == rule.pool_microunits
    )
    assert (
        min(
            found.reserve_microunits,
            *paid(found).values(),
            *(r.held_microunits for r in found.rows),
        )
        >= 0
    )
    for row, worth in zip(found.rows, values.rows, strict=True):
        assert worth.value_nano > 0 or row.price_microunits == row.held_microunits == 0
        assert row.price_microunits + row.held_microunits == 0 or (
            row.price_microunits + row.held_microunits >= rule.floor_microunits
        )
    assert prices_frame(found, plan_digest="p")["price_microunits"].sum() == rule.pool_microunits


def test_a_posted_price_is_the_rate_and_never_more_than_the_pool():
    """By hand: 0.2 and 0.3 nats at 1,000 per nat are 200 and 300; at 3,000 they'd be 1,500, so the pool of 1,000 is shared 2:3."""
    values = owned(200_000_000, 300_000_000, -1)
    posted = price(values, PriceRule(**POOL, scheme="posted", rate_microunits=1000))
    assert paid(posted) == {"a": 200, "b": 300, "c": 0}
    assert posted.reserve_microunits == 500
    assert "not asked for" in posted.reserve_reasons[0]
    capped = price(values, PriceRule(**POOL, scheme="posted", rate_microunits=3000))
    assert paid(capped) == {"a": 400, "b": 600, "c": 0}
    assert "in proportion" in capped.reserve_reasons[0]


def test_harm_is_paid_nothing_or_taken_off_the_pool():
    """Values 3, 2 and -1: the pool is shared 3:2; with offset only (3+2-1)/(3+2) = 80 % of it, and the reason says so."""
    values = owned(3, 2, -1)
    assert paid(price(values, PriceRule(**POOL))) == {"a": 600, "b": 400, "c": 0}
    offset = price(values, PriceRule(**POOL, negative="offset"))
    assert paid(offset) == {"a": 480, "b": 320, "c": 0}
    assert offset.reserve_reasons == (
        "200 micro-units stand for what owners of negative value undid",
    )
    assert paid(price(owned(3, -5), PriceRule(**POOL, negative="offset"))) == {"a": 0, "b": 0}


def test_the_lower_bound_is_due_and_the_rest_is_held_for_its_owner():
    """Values 6 ± 3 and 4 ± 3 of 1,000: 600 · 3/6 and 400 · 1/4 are due; an interval below zero makes nothing due."""
    found = price(owned(6, 4, spread=3), PriceRule(**POOL, basis="lower"))
    assert [(r.price_microunits, r.held_microunits) for r in found.rows] == [(300, 300), (100, 300)]
    wide = price(owned(6, 4, spread=7), PriceRule(**POOL, basis="lower"))
    assert (sum(paid(wide).values()), wide.held_microunits) == (0, 1000)
    with pytest.raises(PricingError, match="expected an interval"):
        price(owned(6, 4), PriceRule(**POOL, basis="lower"))


def test_amounts_below_the_floor_stay_in_the_reserve_with_a_reason():
    """990, 9 and 1 of 1,000 with a floor of 5: the last is kept."""
    found = price(owned(990, 9, 1), PriceRule(**POOL, floor_microunits=5))
    assert paid(found) == {"a": 990, "b": 9, "c": 0}
    assert found.reserve_reasons == ("1 micro-units of 1 owners are below the floor of 5",)


def test_every_word_of_a_rule_is_in_its_digest():
    """Two rules that pay differently have different documents, digests and sentences."""
    made = [
        PriceRule(**POOL), PriceRule(**POOL, reserve_microunits=1), PriceRule(**POOL, scheme="posted", rate_microunits=2),
        PriceRule(**POOL, floor_microunits=1), PriceRule(**POOL, negative="offset"), PriceRule(**POOL, basis="lower"),
    ]  # fmt: skip
    assert len({rule_digest(rule) for rule in made}) == len(made)
    assert {rule_document(rule)["version"] for rule in made} == {2}
    assert [rule.is_plain for rule in made] == [True, True, False, False, False, False]
    assert (
        len({rule_sentence(rule) for rule in made}) == len(made) - 1
    )  # the reserve is an amount, not a rule


def test_why_this_price_says_value_share_rule_and_what_is_held():
    """The sentence holds every number that leads to the price, and an owner of no value is told so."""
    rule = PriceRule(**POOL, basis="lower")
    values = owned(6, 4, -1, spread=3)
    found = price(values, rule)
    said = why_price("a", values, found, rule)
    for part in (
        "by 6 nano-nat",
        "between 3 and 9",
        "60.0% of all positive value, 10",
        "300 micro-units EUR are due",
        "300 are held back",
    ):
        assert part in said
    assert "doesn't lower" in why_price("b", owned(6, -9, spread=3), price(owned(6, -9, spread=3), rule), rule)  # fmt: skip
    with pytest.raises(PricingError, match="'z'"):
        why_price("z", values, found, rule)


@pytest.mark.parametrize(("value", "zero"), [(4, False), (3, True), (1, True), (-3, True), (-4, False)])  # fmt: skip
def test_a_price_never_claims_a_gain_that_isnt_distinguishable_from_zero(value, zero):
    """Of values ± 3 those within 3 of zero, the ends included, are told so, and that the rule pays them all the same."""
    values, rule = owned(20, value, spread=3), PriceRule(**POOL)
    said = why_price("b", values, price(values, rule), rule)
    assert ("not distinguishable from zero at the 95 % level" in said) is zero
    assert ("lower the buyer's loss" in said or "lowers the buyer's loss" in said) is not zero
    assert ("however wide its interval" in said) is (zero and value > 0)
    assert "distinguishable" not in why_price("a", owned(20, value), price(values, rule), rule)


def test_buyers_have_their_own_targets_pools_and_rules():
    """One owner is worth much to one buyer and nothing to the other; pools don't mix."""
    found = price_buyers(
        {"law": owned(9, 1, target="law"), "code": owned(-2, 5, target="code")},
        {"law": PriceRule(**POOL), "code": PriceRule(pool_microunits=50, currency="USD")},
    )
    assert paid(found["law"]) == {"a": 900, "b": 100}
    assert paid(found["code"]) == {"a": 0, "b": 50}
    with pytest.raises(PricingError, match="one rule per buyer"):
        price_buyers({"law": owned(1)}, {})
    mixed = OwnerValues((*owned(1).rows, *(r for r in owned(1, 2, target="x").rows[1:])))
    with pytest.raises(PricingError, match="one target"):
        price_buyers({"law": mixed}, {"law": PriceRule(**POOL)})


def test_a_correction_is_what_is_missing_and_adds_up():
    """Old payouts plus corrections are the new ones, for owners who came and went as well."""
    before, after = price(owned(6, 4), PriceRule(**POOL)), price(owned(5, 3, 2), PriceRule(**POOL))
    gaps = corrections(before, after)
    assert gaps == {"a": -100, "b": -100, "c": 200}
    assert {o: paid(before).get(o, 0) + gap for o, gap in gaps.items()} == paid(after)
    assert corrections(after, after) == {}
    with pytest.raises(PricingError, match="one currency"):
        corrections(before, price(owned(1), PriceRule(pool_microunits=1, currency="USD")))


def test_nothing_is_sold_without_licence_and_consent():
    """A licence off the list, none at all, a refused or missing consent: each is held back and counted under its reason."""
    flags, why = for_sale(
        ["CC0-1.0", "GPL-3.0", None, "CC0-1.0", "CC0-1.0"],
        [True, True, True, False, None],
        {"CC0-1.0"},
    )
    assert flags.tolist() == [True, False, False, False, False]
    assert why == {"licence not accepted": 2, "no consent": 2}
    with pytest.raises(PricingError, match="one licence and one consent"):
        for_sale(["CC0-1.0"], [], {"CC0-1.0"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"scheme": "auction"}, "scheme"),
        ({"negative": "fine"}, "negative"),
        ({"basis": "median"}, "basis"),
        ({"scheme": "posted"}, "rate_microunits: expected above 0"),
        ({"rate_microunits": 5}, "0 for a pool"),
        ({"floor_microunits": -1}, "floor_microunits"),
    ],
)
def test_a_rule_that_cannot_be_paid_is_refused(words, message):
    """Unknown words and a rate without a posted price are named."""
    with pytest.raises(PricingError, match=message):
        PriceRule(**POOL, **words)
