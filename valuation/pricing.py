"""Prices: integers that follow from committed values by one fixed rule.

From groups to owners. Inside a cluster only the record that was committed first earns; the others
are copies (the other rule, by legal entity, is in `valuation.entities`). The value of a group goes to its owners by their share of first-committed tokens,

    v_owner = v_group · (tokens of the owner's first-committed records) / (tokens valued in group).

If the coalitions were trained on first-committed records only (`first_in_cluster` says which, and
they should be), copies stand in no group's value and change nothing. If copies were trained on,
they are in the denominator and their part of the value is nobody's: it goes to the reserve.

From owners to prices: by a `PriceRule` (`valuation.rules`), in integers and by the largest remainder, so that
prices, what is held back and the reserve sum to the pool to the last micro-unit. If no owner has a positive value,
nothing is paid and the pool stays in the reserve, with the reason. Payouts never change; what later values differ by
is a correction (`corrections`).

So a copier earns nothing, and the names under which one group's records stand make no difference
beyond rounding (less than one micro-unit per name). What the rule does not do: it can't tell who
wrote a text, only who committed it first; and it pays for *this* target, corpus and proxy.

Shapes: N records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from valuation.errors import PricingError
from valuation.result import NANO, NanoRow, apportion
from valuation.rules import PriceRule, rule_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from valuation.groups import OwnerGroup
    from valuation.intervals import GroupValues

    Integers = NDArray[np.integer]

# The row that takes what nobody is paid. No owner may have this name.
RESERVE = "(reserve)"
# The row of what is owed but not due yet; each owner's part stands in its own row.
HELD = "(held)"


@dataclass(frozen=True, slots=True)
class OwnerValues:
    """Values of owners, derived from the values of their groups."""

    rows: tuple[NanoRow, ...]
    """One row per owner, sorted by owner; no interval of its own."""
    unattributed_nano: Mapping[str, int] = field(default_factory=dict)
    """Group id → value that belongs to copies and so to nobody. With the rows of the group's
    owners it sums to the group's value exactly."""
    entities: tuple[NanoRow, ...] = ()
    """One row per declared legal entity, the sum of its owners' (see `valuation.entities`)."""
    member_of: Mapping[str, str] = field(default_factory=dict)
    """Owner → subject id of its entity; owners of their own are left out."""


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What one subject is paid now, and what is held back for it."""

    subject: str
    price_microunits: int
    currency: str
    rule_digest: str
    held_microunits: int = 0


@dataclass(frozen=True, slots=True)
class PriceList:
    """All prices of one pool; they, what is held back and the reserve sum to the pool exactly."""

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

    @property
    def held_microunits(self) -> int:
        """What is owed but not due yet, all owners together."""
        return sum(row.held_microunits for row in self.rows)


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
                **error_columns(errors, place, total[owner]),
            )
            for place, owner in sorted(enumerate(owners), key=lambda pair: pair[1])
        )
    )


def error_columns(errors: GroupValues | None, place: int, value_nano: int) -> dict[str, Any]:
    """Error columns of one owner, rounded outwards; an interval always holds the rounded value.

    Args:
        errors: of all owners, or None.
        place: which of them.
        value_nano: its published value.

    Returns:
        Columns of a `NanoRow`; none without errors.
    """
    if errors is None:
        return {}
    return {
        "se_nano": math.ceil(errors.se_n[place] * NANO),
        "ci_low_nano": min(math.floor(errors.ci_low_n[place] * NANO), value_nano),
        "ci_high_nano": max(math.ceil(errors.ci_high_n[place] * NANO), value_nano),
    }


def price(values: OwnerValues, rule: PriceRule) -> PriceList:
    """Turn the values of owners into prices by a rule (see `valuation.rules`).

    Args:
        values: values of owners (see `values_of_lots`); rows made elsewhere work as well.
        rule: pool, currency, reserve, and how to share.

    Returns:
        Prices, amounts held back and reserve, which sum to the pool exactly.

    Raises:
        PricingError: if an owner stands twice or bears the name of a reserved row, or has no interval where the rule needs one.
    """
    if rule.split == "entity":
        return _inside_entities(
            values, price(_players(values), replace(rule, split="first", entities="")), rule
        )
    weights: dict[str, int] = {}
    for row in values.rows:
        if row.subject_id in (RESERVE, HELD) or row.subject_id in weights:
            raise PricingError(
                f"expected each owner once and none called {RESERVE!r} or {HELD!r}, got {row.subject_id!r}"
            )
        weights[row.subject_id] = max(0, row.value_nano)
    reasons = []
    if rule.reserve_microunits:
        reasons.append(f"{rule.reserve_microunits} micro-units are held back by the rule")
    payable = rule.pool_microunits - rule.reserve_microunits
    shares = dict.fromkeys(weights, 0)
    if any(weights.values()):
        shares = _shares(values, weights, payable, rule, reasons)
    elif payable:
        reasons.append(
            f"no owner has a positive value, so nothing is paid and the pool's {payable} micro-units are kept"
        )
    small = {owner for owner, share in shares.items() if 0 < share < rule.floor_microunits}
    if small:
        kept = sum(shares[owner] for owner in small)
        reasons.append(
            f"{kept} micro-units of {len(small)} owners are below the floor of {rule.floor_microunits}"
        )
        shares |= dict.fromkeys(small, 0)
    digest = rule_digest(rule)
    rows = []
    for row in sorted(values.rows, key=lambda row: row.subject_id):
        share = shares[row.subject_id]
        due = share if rule.basis == "value" else _due(row, share)
        rows.append(PriceRow(row.subject_id, due, rule.currency, digest, share - due))
    return PriceList(
        rows=tuple(rows),
        reserve_microunits=rule.pool_microunits - sum(shares.values()),
        reserve_reasons=tuple(reasons),
        currency=rule.currency,
        rule_digest=digest,
    )


def _players(values: OwnerValues) -> OwnerValues:
    """Entities in place of their owners."""
    known = {row.subject_id for row in values.entities}
    if missing := sorted(set(values.member_of.values()) - known):
        raise PricingError(
            f"entities: expected a value of each, got none of {missing[0]!r}; use values_of_entities"
        )
    alone = tuple(row for row in values.rows if row.subject_id not in values.member_of)
    return OwnerValues((*alone, *values.entities), values.unattributed_nano)


def _inside_entities(values: OwnerValues, found: PriceList, rule: PriceRule) -> PriceList:
    """Each entity's amounts among its owners, by what is positive of their values."""
    digest = rule_digest(rule)
    due = {row.subject: row.price_microunits for row in found.rows}
    held = {row.subject: row.held_microunits for row in found.rows}
    for entity in sorted(set(values.member_of.values())):
        weights = {
            row.subject_id: max(0, row.value_nano)
            for row in values.rows
            if values.member_of.get(row.subject_id) == entity
        }
        for amounts in (due, held):
            amount = amounts.pop(entity)
            amounts.update(apportion(amount, weights) if amount else dict.fromkeys(weights, 0))
    rows = tuple(
        PriceRow(name, due[name], rule.currency, digest, held[name]) for name in sorted(due)
    )
    assert len(rows) == len(values.rows), "every owner has a row"
    return replace(found, rows=rows, rule_digest=digest)


def _shares(
    values: OwnerValues, weights: dict[str, int], payable: int, rule: PriceRule, reasons: list[str]
) -> dict[str, int]:
    """What each owner is owed; says in `reasons` what stays in the reserve."""
    nobody = sum(max(0, amount) for amount in values.unattributed_nano.values())
    gross = sum(weights.values()) + nobody
    if rule.scheme == "posted":
        posted = {owner: weight * rule.rate_microunits // NANO for owner, weight in weights.items()}
        asked = sum(posted.values())
        if asked <= payable:
            if asked < payable:
                reasons.append(
                    f"{payable - asked} micro-units of the pool are not asked for by the posted price"
                )
            return posted
        reasons.append(
            f"the posted price asks for {asked} micro-units, so the pool is shared in proportion"
        )
    if rule.negative == "offset":
        net = sum(row.value_nano for row in values.rows) + sum(values.unattributed_nano.values())
        offset = payable - payable * max(0, net) // gross
        if offset:
            reasons.append(f"{offset} micro-units stand for what owners of negative value undid")
        payable -= offset
    shares = apportion(payable, weights | {RESERVE: nobody})
    left = shares.pop(RESERVE)
    if left:
        reasons.append(
            f"{left} micro-units belong to copies of records that others committed first"
        )
    return shares


def _due(row: NanoRow, share: int) -> int:
    """The part of a share that the lower end of the interval vouches for."""
    if row.ci_low_nano is None:
        raise PricingError(
            f"{row.subject_id}: expected an interval, which basis 'lower' pays by, got none; use values of lots"
        )
    return share * max(0, min(row.ci_low_nano, row.value_nano)) // max(1, row.value_nano)


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
