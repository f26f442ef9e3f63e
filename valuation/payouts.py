"""What follows from prices: the reason in words, prices for several buyers, corrections, and the gate of a sale.

Nothing here computes a value or a price; it says what one means, or what may be done with it. A payout that was made
stays: when values change (a delivery, an erasure, another target), the difference to what was paid is a correction with an
entry of its own. Nothing is sold without a licence on the buyer's list and the owner's consent: the gate is per record, and
says for every record it holds back why.

Shapes: N records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import PricingError
from valuation.intervals import zero_words
from valuation.pricing import HELD, RESERVE, price
from valuation.rules import rule_sentence

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from valuation.pricing import OwnerValues, PriceList
    from valuation.rules import PriceRule


def why_price(
    owner: str, values: OwnerValues, prices: PriceList, rule: PriceRule, errors: str = ""
) -> str:
    """Why an owner is paid what it is paid, in words that can be checked with the tables.

    Args:
        owner: whose price.
        values: the values behind it.
        prices: what `price` made of them.
        rule: by which rule.
        errors: what the interval is over (`valuation.seeds.spread_words`).

    Returns:
        Sentences.

    Raises:
        PricingError: the owner has no value or no price.
    """
    row = next((row for row in values.rows if row.subject_id == owner), None)
    paid = next((row for row in prices.rows if row.subject == owner), None)
    if row is None or paid is None:
        raise PricingError(f"owner: expected one with a value and a price, got {owner!r}")
    total = sum(max(0, other.value_nano) for other in values.rows)
    unclear = zero_words(row.ci_low_nano, row.ci_high_nano)
    amount = f"{row.value_nano} nano-{row.unit} per token"
    if unclear:
        said = [f"{owner}'s value on {row.target}, {amount}, is {unclear}"]
    elif row.value_nano > 0:
        said = [f"{owner} lowers the buyer's loss on {row.target} by {amount}"]
    else:
        said = [f"{owner} doesn't lower the buyer's loss on {row.target}: {amount}"]
    if row.ci_low_nano is not None:
        said[0] += (
            f" (between {row.ci_low_nano} and {row.ci_high_nano}{f', {errors}' * bool(errors)})"
        )
    if row.value_nano > 0:
        said.append(
            f"that is {row.value_nano / total:.1%} of all positive value, {total} nano-{row.unit}"
        )
    entity = values.member_of.get(owner) if rule.split == "entity" else None
    if entity is not None:
        whole = next(other for other in values.entities if other.subject_id == entity)
        said.append(
            f"it is priced as one with the other owners of {entity}, worth {whole.value_nano} nano-{row.unit} together"
        )
    said.append(f"by rule {prices.rule_digest[:16]} ({rule_sentence(rule)})")
    said.append(f"{paid.price_microunits} micro-units {prices.currency} are due")
    if unclear and paid.price_microunits and rule.basis == "value" and entity is None:
        said.append("the rule pays by the estimate, however wide its interval")
    if paid.held_microunits:
        said.append(
            f"{paid.held_microunits} are held back because the value may be as low as {row.ci_low_nano}"
        )
    if not paid.price_microunits + paid.held_microunits and row.value_nano > 0:
        said.append("which is nothing, because the amount is below the floor or the pool is empty")
    return "; ".join(said)


def price_buyers(
    values: Mapping[str, OwnerValues], rules: Mapping[str, PriceRule]
) -> dict[str, PriceList]:
    """Prices for several buyers, each with a target, a pool and a rule of its own.

    Args:
        values: buyer → values of the owners for that buyer's target.
        rules: buyer → rule.

    Returns:
        Buyer → prices; pools are not mixed, so each list sums to its own pool.

    Raises:
        PricingError: different buyers in the two, or two buyers who share a target's values of another target.
    """
    if set(values) != set(rules):
        raise PricingError(f"expected one rule per buyer, got {sorted(values)} and {sorted(rules)}")
    for buyer, found in values.items():
        if len({row.target for row in found.rows}) > 1:
            raise PricingError(f"{buyer}: expected values for one target, got several")
    return {buyer: price(values[buyer], rules[buyer]) for buyer in sorted(values)}


def prices_frame(prices: PriceList, *, plan_digest: str) -> pl.DataFrame:
    """The table that is stored as ``prices.parquet``; its amounts sum to the pool exactly.

    Args:
        prices: a price list.
        plan_digest: digest of the committed valuation plan.

    Returns:
        One line per owner, and lines ``(held)`` and ``(reserve)`` if anything stands there; owners' own
        parts of ``(held)`` are in `held_microunits`.
    """
    import polars as pl

    rows = [
        (row.subject, row.price_microunits, row.currency, row.rule_digest, row.held_microunits)
        for row in prices.rows
    ]
    for name, amount in ((HELD, prices.held_microunits), (RESERVE, prices.reserve_microunits)):
        if amount:
            rows.append((name, amount, prices.currency, prices.rule_digest, 0))
    schema = {
        "subject": pl.String(),
        "price_microunits": pl.Int64(),
        "currency": pl.String(),
        "rule_digest": pl.String(),
        "held_microunits": pl.Int64(),
    }
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        plan_digest=pl.lit(plan_digest)
    )


def corrections(before: PriceList, after: PriceList) -> dict[str, int]:
    """What must be added to earlier payouts, which themselves never change.

    Args:
        before: prices as they were paid.
        after: prices as they are now, in the same currency.

    Returns:
        Owner → micro-units due (positive) or owed back (negative), for owners with a difference.

    Raises:
        PricingError: another currency.
    """
    if before.currency != after.currency:
        raise PricingError(f"expected one currency, got {before.currency} and {after.currency}")
    paid = {row.subject: row.price_microunits for row in before.rows}
    now = {row.subject: row.price_microunits for row in after.rows}
    gaps = {owner: now.get(owner, 0) - paid.get(owner, 0) for owner in sorted(paid | now)}
    return {owner: gap for owner, gap in gaps.items() if gap}


def for_sale(
    licence_N: Sequence[str | None], consent_N: Sequence[bool | None], accepted: Collection[str]
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Which records may be sold; a licence or consent that is missing says no.

    Args:
        licence_N: SPDX licence of each record, or None.
        consent_N: whether the owner of each record consented to this kind of sale; None and missing count as no.
        accepted: licences that the buyer accepts.

    Returns:
        N flags, and reason → number of records that are held back by it.

    Raises:
        PricingError: columns of different lengths.
    """
    agreed_N = np.array([bool(value) for value in consent_N], dtype=np.bool_)
    if len(licence_N) != len(agreed_N):
        raise PricingError(
            f"expected one licence and one consent per record, got {len(licence_N)} and {len(agreed_N)}"
        )
    licensed_N = np.array([licence in accepted for licence in licence_N], dtype=np.bool_)
    reasons = {
        "licence not accepted": int((~licensed_N).sum()),
        "no consent": int((licensed_N & ~agreed_N).sum()),
    }
    return licensed_N & agreed_N, {reason: count for reason, count in reasons.items() if count}
