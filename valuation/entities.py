"""Legal entities: who shares a text that several hold, and which owners are paid as one.

A price rule says how a cluster's value is split (`rules`, field `split`):

    first     to the record that was committed first; whose owner belongs to whom is not looked at
    entity    in equal parts to every legal entity that may sell a copy; inside an entity to its first record

With t tokens of the cluster's valued record and m entities in the order of their first commitment, entity i holds
⌊t / m⌋ + [i < t mod m] of them, so that shares add up to t. Owners of one entity are then priced as one: the entity's
value is the sum over its owners, *before* values below zero are cut to nothing,

    price_entity = (P - R) · (Σ_{owners} v)⁺ / Σ_entities (Σ v)⁺,       inside it by the owners' v⁺

because owner by owner an entity could put its harmful lots under one name, which is paid nothing, and its useful ones under
another. So an entity earns the same under one name as under any number of names, to the last unit: value, price and what is held.

When it is wrong: nobody can see that two owners are one entity unless it is declared (a contract, a register). With ``entity`` an
*undeclared* second name that copies a text takes half of it; with ``first`` it takes nothing. Choose ``entity`` where the same text
has several honest sellers and their names are checked.

Shapes: N records, K lots, O owners, E entities.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import PricingError
from valuation.lots import lot_shares
from valuation.pricing import OwnerValues, error_columns
from valuation.result import NanoRow, apportion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from valuation.intervals import GroupValues
    from valuation.lots import Lots

    Integers = NDArray[np.int64]

PREFIX = "entity:"
"""Of an entity's subject id; no owner id holds a colon."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds how much of each lot."""

    owners: tuple[str, ...]
    """Ids, sorted; those without a share included."""
    tokens_OK: Integers
    """Tokens of each owner in each lot; a column adds up to the lot's tokens."""
    records_O: Integers
    """Clusters that each owner has a share of."""


def players(owners: Sequence[str], entity_of: Mapping[str, str]) -> tuple[str, ...]:
    """Under which subject id each owner is priced.

    Args:
        owners: owner ids.
        entity_of: owner → name of its legal entity; who is missing is an entity of its own.

    Returns:
        ``entity:NAME``, or the owner's id.
    """
    return tuple(PREFIX + entity_of[owner] if owner in entity_of else owner for owner in owners)


def entity_holdings(
    lots: Lots,
    owner_N: Sequence[str],
    tokens_N: ArrayLike,
    *,
    cluster_N: ArrayLike,
    order_N: ArrayLike,
    sold_N: ArrayLike,
    entity_of: Mapping[str, str],
) -> Holdings:
    """Split every cluster by legal entity.

    Args:
        lots: the cut; one record of each cluster that is sold stands in a lot.
        owner_N: owner of each record.
        tokens_N: tokens of each record, as they were cut.
        cluster_N: cluster of each record.
        order_N: commit order of each record, all different; smaller is earlier.
        sold_N: which records may be sold; others hold nothing.
        entity_of: owner → name of its legal entity.

    Returns:
        The holdings.

    Raises:
        GroupError: another number of records, or tokens that the lots weren't cut from.
        PricingError: a valued record that may not be sold, or two valued records of one cluster.
    """
    tokens_N, cluster_N = np.asarray(tokens_N, np.int64), np.asarray(cluster_N)
    order_N, sold_N = np.asarray(order_N), np.asarray(sold_N, np.bool_)
    owners, tokens_OK = lot_shares(lots, owner_N, tokens_N)
    code = {owner: row for row, owner in enumerate(owners)}
    valued = np.flatnonzero(lots.lot_N >= 0)
    if not sold_N[valued].all():
        raise PricingError("sold_N: expected every valued record among those that may be sold")
    if len(np.unique(cluster_N[valued])) < len(valued):
        raise PricingError("cluster_N: expected one valued record per cluster; leave copies out")
    records_O = np.zeros(len(owners), np.int64)
    np.add.at(records_O, [code[owner_N[row]] for row in valued.tolist()], 1)
    holders: dict[int, list[int]] = defaultdict(list)
    for row in sorted(np.flatnonzero(sold_N).tolist(), key=lambda row: order_N[row]):
        holders[cluster_N[row]].append(row)
    for row in valued.tolist():
        # Of each entity its first record, in the order of commitment.
        first: dict[str, int] = {}
        for held in holders[cluster_N[row]]:
            first.setdefault(players([owner_N[held]], entity_of)[0], held)
        whole, rest = divmod(int(tokens_N[row]), len(first))
        tokens_OK[code[owner_N[row]], lots.lot_N[row]] -= tokens_N[row]
        records_O[code[owner_N[row]]] -= 1
        for place, held in enumerate(first.values()):
            tokens_OK[code[owner_N[held]], lots.lot_N[row]] += whole + (place < rest)
            records_O[code[owner_N[held]]] += 1
    return Holdings(owners, tokens_OK, records_O)


def merged(holdings: Holdings, entity_of: Mapping[str, str]) -> Holdings:
    """The holdings of players in place of owners.

    Args:
        holdings: of owners.
        entity_of: owner → name of its legal entity.

    Returns:
        The same with one row per player, sorted.
    """
    player_O = players(holdings.owners, entity_of)
    names = tuple(sorted(set(player_O)))
    member_EO = np.array([[player == name for player in player_O] for name in names], np.int64)
    return Holdings(names, member_EO @ holdings.tokens_OK, member_EO @ holdings.records_O)


def values_of_entities(
    lot_rows: Sequence[NanoRow],
    holdings: Holdings,
    entity_of: Mapping[str, str],
    *,
    errors: GroupValues | None = None,
    player_errors: GroupValues | None = None,
) -> OwnerValues:
    """Values of owners and of the entities they belong to, from published values of lots.

    Args:
        lot_rows: one published row per lot, all of one method, target and unit.
        holdings: of owners.
        entity_of: owner → name of its legal entity.
        errors: standard errors and intervals of the owners, or None.
        player_errors: the same of `merged` holdings.

    Returns:
        Rows of owners that sum to those of the lots exactly, and rows of the declared entities, each the
        exact sum of its owners and the same however many names it uses.

    Raises:
        PricingError: rows and holdings that don't fit each other.
    """
    if holdings.tokens_OK.shape[1] != len(lot_rows):
        raise PricingError(
            f"lot_rows: expected {holdings.tokens_OK.shape[1]} lots, got {len(lot_rows)}"
        )
    player_O = players(holdings.owners, entity_of)
    whole = merged(holdings, entity_of)
    nano_O = dict.fromkeys(holdings.owners, 0)
    nano_E = dict.fromkeys(whole.owners, 0)
    for lot, row in enumerate(lot_rows):
        sign = -1 if row.value_nano < 0 else 1
        shares = apportion(
            abs(row.value_nano), dict(zip(whole.owners, whole.tokens_OK[:, lot].tolist(), strict=True))
        )  # fmt: skip
        for player, share in shares.items():
            nano_E[player] += sign * share
            if share:
                weights = {
                    owner: int(holdings.tokens_OK[place, lot])
                    for place, owner in enumerate(holdings.owners)
                    if player_O[place] == player
                }
                for owner, part in apportion(share, weights).items():
                    nano_O[owner] += sign * part
    first = lot_rows[0]
    pattern = NanoRow(
        subject_kind="owner", subject_id="", method=f"{first.method}.lots", target=first.target, unit=first.unit, value_nano=0
    )  # fmt: skip
    rows = tuple(
        replace(
            pattern, subject_id=owner, value_nano=nano_O[owner], n=int(holdings.records_O[place]),
            **error_columns(errors, place, nano_O[owner]),
        )
        for place, owner in enumerate(holdings.owners)
    )  # fmt: skip
    entities = tuple(
        replace(
            pattern, subject_kind="entity", subject_id=player, value_nano=nano_E[player], n=int(whole.records_O[place]),
            **error_columns(player_errors, place, nano_E[player]),
        )
        for place, player in enumerate(whole.owners)
        if player.startswith(PREFIX)
    )  # fmt: skip
    member = {owner: player for owner, player in zip(holdings.owners, player_O, strict=True) if owner != player}  # fmt: skip
    return OwnerValues(rows, {}, entities, member)
