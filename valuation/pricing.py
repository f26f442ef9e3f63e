"""Prices: integers that follow from committed values by one fixed rule.

From groups to owners. Inside a cluster only the record that was committed first earns; the others
are copies. The value of a group goes to its owners by their share of first-committed tokens,

    v_owner = v_group · (tokens of the owner's first-committed records) / (tokens valued in group).

If the coalitions were trained on first-committed records only (`first_in_cluster` says which, and
they should be), copies stand in no group's value and change nothing. If copies were trained on,
they are in the denominator and their part of the value is nobody's: it goes to the reserve.

From owners to prices. With pool P, reserve R and v⁺ = max(0, v),

    price_owner = (P - R) · v⁺_owner / (Σ v⁺ + unattributed),

rounded by the largest remainder, so that all prices and the reserve sum to P to the last
micro-unit. If no owner has a positive value, nothing is paid and P stays in the reserve, with the
reason.

So a copier earns nothing, and the names under which one group's records stand make no difference
beyond rounding (less than one micro-unit per name). What the rule does not do: it can't tell who
wrote a text, only who committed it first; and it pays for *this* target, corpus and proxy.

Shapes: N records.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from valuation.errors import PricingError
from valuation.result import NANO, NanoRow, apportion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from valuation.groups import OwnerGroup
    from valuation.intervals import GroupValues

    Integers = NDArray[np.integer]

# The row that takes what nobody is paid. No owner may have this name.
RESERVE = "(reserve)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRule:
    """What turns values into prices; its digest is committed before the values are known."""

    pool_microunits: int
    """What is shared out, in millionths of `currency`, at least 0."""
    currency: str
    """ISO 4217 code or another name of 1 to 16 characters."""
    reserve_microunits: int = 0
    """What is held back from the pool, between 0 and the pool."""

    def __post_init__(self) -> None:
        """Refuse a rule that can't be paid.

        Raises:
            PricingError: for amounts that aren't integers in range, or no currency.
        """
        for name in ("pool_microunits", "reserve_microunits"):
            amount = getattr(self, name)
            if not isinstance(amount, int) or isinstance(amount, bool) or not 0 <= amount < 2**63:
                raise PricingError(f"{name}: expected an integer in 0 .. 2^63 - 1, got {amount!r}")
        if self.reserve_microunits > self.pool_microunits:
            raise PricingError(
                f"reserve_microunits: expected at most the pool of {self.pool_microunits}, got "
                f"{self.reserve_microunits}"
            )
        if not 1 <= len(self.currency) <= 16:
            raise PricingError(f"currency: expected 1 to 16 characters, got {self.currency!r}")


@dataclass(frozen=True, slots=True)
class OwnerValues:
    """Values of owners, derived from the values of their groups."""

    rows: tuple[NanoRow, ...]
    """One row per owner, sorted by owner; no interval of its own."""
    unattributed_nano: Mapping[str, int] = field(default_factory=dict)
    """Group id → value that belongs to copies and so to nobody. With the rows of the group's
    owners it sums to the group's value exactly."""


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What one subject is paid."""

    subject: str
    price_microunits: int
    currency: str
    rule_digest: str


@dataclass(frozen=True, slots=True)
class PriceList:
    """All prices of one pool; they and the reserve sum to the pool exactly."""

    rows: tuple[PriceRow, ...]
    """One row per owner, sorted by owner, those who get nothing included."""
    reserve_microunits: int
    """What nobody is paid."""
    reserve_reasons: tuple[str, ...]
    """Why, one sentence per part of the reserve; empty if it is 0."""
    currency: str
    """Currency of all amounts."""
    rule_digest: str
    """Digest of the rule (see `rule_document`)."""


def first_in_cluster(cluster_N: Integers, order_N: Integers) -> NDArray[np.bool_]:
    """Which records were committed first in their cluster, and so are valued and paid.

    Args:
        cluster_N: cluster of each record (any integers).
        order_N: commit order of each record, all different; smaller is earlier.

    Returns:
        N flags, one True per cluster.

    Raises:
        PricingError: for arrays of different lengths or an order with ties.
    """
    cluster_N, order_N = np.asarray(cluster_N), np.asarray(order_N)
    if cluster_N.shape != order_N.shape or cluster_N.ndim != 1:
        raise PricingError(
            f"expected one cluster and one order per record, got {cluster_N.shape} and {order_N.shape}"
        )
    by_order = np.argsort(order_N, kind="stable")
    if (np.diff(order_N[by_order]) == 0).any():
        raise PricingError("order_N: expected a different place for every record, got a tie")
    # np.unique returns the first position of each cluster, here the earliest commit.
    _, position = np.unique(cluster_N[by_order], return_index=True)
    first_N = np.zeros(len(cluster_N), dtype=np.bool_)
    first_N[by_order[position]] = True
    return first_N


def owner_values(
    group_rows: Sequence[NanoRow],
    groups: Sequence[OwnerGroup],
    *,
    owner_N: Sequence[str],
    tokens_N: Integers,
    cluster_N: Integers,
    order_N: Integers,
    valued_N: NDArray[np.bool_],
) -> OwnerValues:
    """Derive the values of owners from those of their groups.

    Args:
        group_rows: one published row per group, all of one method, target and unit.
        groups: the groups that were valued.
        owner_N: owner of each record; every owner stands in exactly one group.
        tokens_N: tokens of each record, at least 0.
        cluster_N: cluster of each record.
        order_N: commit order of each record, all different.
        valued_N: whether each record took part in the coalitions. Pass what `first_in_cluster`
            said if they were trained without copies, all True if copies took part.

    Returns:
        Rows marked ``.derived``, and what is left to nobody. A group's rows and its unattributed
        part sum to the group's value exactly.

    Raises:
        PricingError: if groups, rows and records don't fit each other.
    """
    group_of = _group_of(group_rows, groups)
    tokens_N, valued_N = np.asarray(tokens_N), np.asarray(valued_N, dtype=np.bool_)
    if not len(owner_N) == len(tokens_N) == len(cluster_N) == len(valued_N):
        raise PricingError(
            f"expected one entry per record, got {len(owner_N)} owners, {len(tokens_N)} token "
            f"counts, {len(cluster_N)} clusters, {len(valued_N)} valued flags"
        )
    if len(tokens_N) and int(tokens_N.min()) < 0:
        raise PricingError(f"tokens_N: expected at least 0, got {int(tokens_N.min())}")
    unknown = sorted(set(owner_N) - set(group_of))
    if unknown:
        raise PricingError(f"owner_N: expected owners of the groups, got {unknown[0]!r} as well")

    earns_N = first_in_cluster(cluster_N, order_N) & valued_N
    earned: dict[str, int] = defaultdict(int)
    records: dict[str, int] = defaultdict(int)
    copied: dict[str, int] = defaultdict(int)
    for owner, count, earns, valued in zip(
        owner_N, tokens_N.tolist(), earns_N.tolist(), valued_N.tolist(), strict=True
    ):
        if earns:
            earned[owner] += count
            records[owner] += 1
        elif valued:
            copied[group_of[owner]] += count

    rows: list[NanoRow] = []
    unattributed: dict[str, int] = {}
    by_id = {row.subject_id: row for row in group_rows}
    for group in groups:
        row = by_id[group.id]
        weights = {owner: earned[owner] for owner in group.owners}
        # An owner may be called anything but RESERVE, so this key is free.
        weights[RESERVE] = copied[group.id] if any(weights.values()) else 1
        size = apportion(abs(row.value_nano), weights)
        sign = -1 if row.value_nano < 0 else 1
        unattributed[group.id] = sign * size.pop(RESERVE)
        rows.extend(
            NanoRow(
                subject_kind="owner",
                subject_id=owner,
                method=f"{row.method}.derived",
                target=row.target,
                unit=row.unit,
                value_nano=sign * share,
                n=records[owner],
            )
            for owner, share in size.items()
        )
    rows.sort(key=lambda row: row.subject_id)
    return OwnerValues(tuple(rows), unattributed)


def values_of_lots(
    lot_rows: Sequence[NanoRow],
    owners: Sequence[str],
    tokens_OK: Integers,
    *,
    records_O: Integers,
    errors: GroupValues | None = None,
) -> OwnerValues:
    """Values of owners from published values of lots: each lot's value by the owners' tokens in it.

    Args:
        lot_rows: one published row per lot, in the lots' order, all of one method, target and unit.
        owners: O owner ids, each once.
        tokens_OK: tokens of each owner in each lot (see `valuation.lots.lot_shares`).
        records_O: valued records of each owner.
        errors: standard errors and intervals of the same owners, or None for values without.

    Returns:
        Rows of owners that sum to the rows of the lots exactly; nothing is left to nobody.

    Raises:
        PricingError: if rows, owners and tokens don't fit each other, or an owner bears the reserve's name.
    """
    tokens_OK = np.asarray(tokens_OK)
    if tokens_OK.shape != (len(owners), len(lot_rows)) or len(records_O) != len(owners):
        raise PricingError(
            f"tokens_OK: expected [{len(owners)}, {len(lot_rows)}], got {list(tokens_OK.shape)}"
        )
    if len(set(owners)) != len(owners) or RESERVE in owners:
        raise PricingError(f"owners: expected each once and none called {RESERVE!r}")
    if len({(row.method, row.target, row.unit) for row in lot_rows}) != 1:
        raise PricingError(
            "lot_rows: expected one method, target and unit; price one list at a time"
        )
    total = dict.fromkeys(owners, 0)
    for row, tokens_O in zip(lot_rows, tokens_OK.T.tolist(), strict=True):
        sign = -1 if row.value_nano < 0 else 1
        weights = dict(zip(owners, tokens_O, strict=True))
        for owner, share in apportion(abs(row.value_nano), weights).items():
            total[owner] += sign * share
    first = lot_rows[0]
    return OwnerValues(
        tuple(
            NanoRow(
                subject_kind="owner",
                subject_id=owner,
                method=f"{first.method}.lots",
                target=first.target,
                unit=first.unit,
                value_nano=total[owner],
                n=int(records_O[place]),
                **_errors(errors, place, total[owner]),
            )
            for place, owner in sorted(enumerate(owners), key=lambda pair: pair[1])
        )
    )


def _errors(errors: GroupValues | None, place: int, value_nano: int) -> dict[str, int]:
    """Error columns of one owner, rounded outwards; an interval always holds the rounded value."""
    if errors is None:
        return {}
    return {
        "se_nano": math.ceil(errors.se_n[place] * NANO),
        "ci_low_nano": min(math.floor(errors.ci_low_n[place] * NANO), value_nano),
        "ci_high_nano": max(math.ceil(errors.ci_high_n[place] * NANO), value_nano),
    }


def price(values: OwnerValues, rule: PriceRule) -> PriceList:
    """Share the pool among owners by their positive values.

    Args:
        values: values of owners (see `owner_values`); rows made elsewhere work as well.
        rule: pool, currency and reserve.

    Returns:
        Prices and reserve, which sum to the pool exactly.

    Raises:
        PricingError: if an owner stands twice or bears the name of the reserve.
    """
    weights: dict[str, int] = {}
    for row in values.rows:
        if row.subject_id == RESERVE or row.subject_id in weights:
            raise PricingError(
                f"expected each owner once and none called {RESERVE!r}, got {row.subject_id!r}"
            )
        weights[row.subject_id] = max(0, row.value_nano)
    reasons = []
    if rule.reserve_microunits:
        reasons.append(f"{rule.reserve_microunits} micro-units are held back by the rule")
    payable = rule.pool_microunits - rule.reserve_microunits
    shares = dict.fromkeys(weights, 0)
    left = payable
    if any(weights.values()):
        nobody = sum(max(0, amount) for amount in values.unattributed_nano.values())
        shares = apportion(payable, weights | {RESERVE: nobody})
        left = shares.pop(RESERVE)
        if left:
            reasons.append(
                f"{left} micro-units belong to copies of records that others committed first"
            )
    elif payable:
        reasons.append(
            f"no owner has a positive value, so nothing is paid and the pool's {payable} micro-units are kept"
        )
    digest = rule_digest(rule)
    return PriceList(
        rows=tuple(
            PriceRow(owner, shares[owner], rule.currency, digest) for owner in sorted(shares)
        ),
        reserve_microunits=rule.reserve_microunits + left,
        reserve_reasons=tuple(reasons),
        currency=rule.currency,
        rule_digest=digest,
    )


def rule_document(rule: PriceRule) -> dict[str, Any]:
    """The rule as the document that is committed: integers and strings only.

    Args:
        rule: pool, currency and reserve.

    Returns:
        A dict that JCS can encode.
    """
    return {
        "format": 1,
        "kind": "price_rule",
        "pool_microunits": rule.pool_microunits,
        "currency": rule.currency,
        "reserve_microunits": rule.reserve_microunits,
        "lot_to_owner": "share of first-committed tokens in each lot, summed over lots",
        "inside_a_cluster": "the record with the lowest commit order is paid, copies are not",
        "negative_values": "paid nothing",
        "rounding": "largest remainder, ties to the smaller subject id",
        "unpaid": "kept in the reserve",
    }


def rule_digest(rule: PriceRule) -> str:
    """SHA-256 of the JCS bytes of the rule document.

    Args:
        rule: pool, currency and reserve.

    Returns:
        64 hex digits.
    """
    from provenance import jcs

    return hashlib.sha256(jcs(rule_document(rule))).hexdigest()


def prices_frame(prices: PriceList, *, plan_digest: str) -> pl.DataFrame:
    """The table that is stored as ``prices.parquet``; its amounts sum to the pool exactly.

    Args:
        prices: a price list.
        plan_digest: digest of the committed valuation plan.

    Returns:
        One line per owner, and one called ``(reserve)`` if anything is left there.
    """
    import polars as pl

    rows = [
        (row.subject, row.price_microunits, row.currency, row.rule_digest) for row in prices.rows
    ]
    if prices.reserve_microunits:
        rows.append((RESERVE, prices.reserve_microunits, prices.currency, prices.rule_digest))
    schema = {
        "subject": pl.String(),
        "price_microunits": pl.Int64(),
        "currency": pl.String(),
        "rule_digest": pl.String(),
    }
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        plan_digest=pl.lit(plan_digest)
    )


def _group_of(group_rows: Sequence[NanoRow], groups: Sequence[OwnerGroup]) -> dict[str, str]:
    """Group id of each owner, after checking that rows and groups are the same list."""
    ids = sorted(group.id for group in groups)
    if sorted(row.subject_id for row in group_rows) != ids or len(set(ids)) != len(ids):
        raise PricingError(
            f"group_rows: expected one row per group {ids}, got "
            f"{sorted(row.subject_id for row in group_rows)}"
        )
    if len({(row.method, row.target, row.unit) for row in group_rows}) > 1:
        raise PricingError(
            "group_rows: expected one method, target and unit; price one list at a time"
        )
    group_of: dict[str, str] = {}
    for group in groups:
        for owner in group.owners:
            if owner in group_of or owner == RESERVE:
                raise PricingError(
                    f"expected each owner in one group and none called {RESERVE!r}, got {owner!r}"
                )
            group_of[owner] = group.id
    return group_of
