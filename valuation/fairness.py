"""Value and price by kind of text and of owner, with the worst case beside the mean.

Records fall into classes (language, era, length, size of their owner). A record's value is its token share of
its lot's, and an owner's price is spread over its records by what is positive of that,

    v_r = φ_lot(r) t_r / T_lot(r),          p_r = P_owner(r) v_r⁺ / Σ_{s of the owner} v_s⁺

so that values and prices of the classes of one kind add up to those of all records. Rates are per thousand
valued tokens. The *worst* of a class is the owner with the lowest rate in it: a mean hides whom it harms.

The interval of a class is that of an owner who held all of it (`valuation.lots.owner_intervals`). When it is wrong:
all tokens of a lot are worth the same here, so differences inside a lot do not show, and a class that stands in one lot with
others has that lot's rate. Small classes have wide intervals; they are printed, not left out.

Shapes: N records, K lots, Q target records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GroupError
from valuation.lots import owner_intervals
from valuation.seeds import over_seeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

LENGTHS = (64, 128, 256, 512)
OWNER_SHARES = (0.02, 0.1)
THOUSAND = 1000
MAX_ERAS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One class of one kind; rates are per thousand valued tokens."""

    kind: str
    name: str
    records: int
    """Valued records: copies and what may not be sold left out."""
    owners: int
    tokens: int
    value: float
    """Of the class, in nats per target token."""
    low: float
    high: float
    value_rate: float
    worst_value_rate: float
    """Of the owner with the lowest one in this class."""
    worst_value_owner: str
    price_rate: float
    """Micro-units."""
    worst_price_rate: float
    worst_price_owner: str


def class_table(  # noqa: PLR0913 - a column per fact of a record
    kind: str,
    class_N: Sequence[str],
    owner_N: Sequence[str],
    tokens_N: ArrayLike,
    lot_N: ArrayLike,
    gains: ArrayLike,
    tokens_Q: ArrayLike,
    prices: Mapping[str, int],
    *,
    order_variance_K: ArrayLike | None = None,
) -> list[ClassRow]:
    """Value and price of each class of one kind.

    Args:
        kind: what the classes are, such as ``era``.
        class_N: class of each record.
        owner_N: owner of each record.
        tokens_N: tokens of each record.
        lot_N: lot of each record, -1 for none.
        gains: gain of each lot on each target record, [K, Q] or of several seeds [S, K, Q] (see `valuation.lots.lot_gains`).
        tokens_Q: scored tokens of each target record.
        prices: owner → micro-units; empty where nothing is priced.
        order_variance_K: as for `owner_intervals`.

    Returns:
        One row per class with a valued record, by name.

    Raises:
        GroupError: columns of different lengths, or no valued record.
    """
    tokens_N, lot_N = np.asarray(tokens_N, np.int64), np.asarray(lot_N, np.int64)
    gains_KQ, tokens_Q = over_seeds(gains), np.asarray(tokens_Q, np.float64)
    if not len(class_N) == len(owner_N) == len(tokens_N) == len(lot_N):
        raise GroupError(
            f"expected one class, owner, count and lot per record, got {len(class_N)}, {len(owner_N)}, {len(tokens_N)}, {len(lot_N)}"
        )
    valued_N = (lot_N >= 0) & (tokens_N > 0)
    rows = np.flatnonzero(valued_N)
    if not len(rows):
        raise GroupError("lot_N: expected at least one valued record, got none")
    names, code_R = np.unique(np.array(class_N, dtype=object)[rows].astype(str), return_inverse=True)  # fmt: skip
    owners, owner_R = np.unique(np.array(owner_N, dtype=object)[rows].astype(str), return_inverse=True)  # fmt: skip
    size_R, lot_R = tokens_N[rows], lot_N[rows]
    tokens_CK = np.zeros((len(names), len(gains_KQ)), np.int64)
    np.add.at(tokens_CK, (code_R, lot_R), size_R)
    found = owner_intervals(gains, tokens_CK, tokens_Q, order_variance_K=order_variance_K)
    lot_value_K = gains_KQ.sum(axis=1) / tokens_Q.sum()
    value_R = lot_value_K[lot_R] * size_R / tokens_CK.sum(axis=0)[lot_R]
    price_R = _spread(value_R, owner_R, owners.tolist(), prices)
    made = []
    for code, name in enumerate(names.tolist()):
        inside = code_R == code
        rates = {
            what: _rates(amount_R[inside], size_R[inside], owner_R[inside], len(owners))
            for what, amount_R in (("value", value_R), ("price", price_R))
        }
        made.append(
            ClassRow(
                kind=kind, name=name, records=int(inside.sum()), owners=len(set(owner_R[inside].tolist())),
                tokens=int(size_R[inside].sum()), value=float(found.values_n[code]), low=float(found.ci_low_n[code]),
                high=float(found.ci_high_n[code]), value_rate=rates["value"][0], worst_value_rate=rates["value"][1],
                worst_value_owner=str(owners[rates["value"][2]]), price_rate=rates["price"][0],
                worst_price_rate=rates["price"][1], worst_price_owner=str(owners[rates["price"][2]]),
            )
        )  # fmt: skip
    return made


def eras(dates: Sequence[object | None]) -> list[str]:
    """Era of each date: years, decades, half centuries or centuries, whichever gives at most eight.

    Args:
        dates: ISO text or `date`, or None.

    Returns:
        Names such as ``1900-1949``; ``undated``.
    """
    years = [None if date is None else int(str(date)[:4]) for date in dates]
    known = {year for year in years if year is not None}
    span = next(
        (size for size in (1, 10, 50, 100, 500) if len({year // size for year in known}) <= MAX_ERAS), 1000
    )  # fmt: skip

    def name(year: int | None) -> str:
        if year is None:
            return "undated"
        first = year // span * span
        return str(first) if span == 1 else f"{first:04d}-{first + span - 1:04d}"

    return [name(year) for year in years]


def length_classes(tokens_N: ArrayLike) -> list[str]:
    """Length class of each record, by tokens.

    Args:
        tokens_N: tokens of each record.

    Returns:
        Names that sort by size.
    """
    return _cut(np.asarray(tokens_N).tolist(), LENGTHS, "tokens")


def owner_sizes(owner_N: Sequence[str], tokens_N: ArrayLike) -> list[str]:
    """Size class of each record's owner, by its share of all tokens.

    Args:
        owner_N: owner of each record.
        tokens_N: tokens of each record; 0 for what isn't valued.

    Returns:
        ``small``, ``middle`` or ``large`` with their bounds.
    """
    total: dict[str, int] = {}
    for owner, count in zip(owner_N, np.asarray(tokens_N).tolist(), strict=True):
        total[owner] = total.get(owner, 0) + count
    everything = max(1, sum(total.values()))
    small, large = OWNER_SHARES

    def name(owner: str) -> str:
        share = total[owner] / everything
        if share < small:
            return f"small: under {small:.0%} of the tokens"
        if share < large:
            return f"middle: {small:.0%} to {large:.0%}"
        return f"large: {large:.0%} or more"

    return [name(owner) for owner in owner_N]


def _cut(counts: list[int], bounds: tuple[int, ...], unit: str) -> list[str]:
    width = len(str(bounds[-1]))

    def name(count: int) -> str:
        place = int(np.searchsorted(bounds, count, side="left"))
        if place == len(bounds):
            return f"over {bounds[-1]} {unit}"
        return f"{bounds[place - 1] + 1 if place else 0:{width}d} to {bounds[place]} {unit}".strip()

    return [name(count) for count in counts]


def _spread(
    value_R: Floats, owner_R: Integers, owners: list[str], prices: Mapping[str, int]
) -> Floats:
    """Each owner's price over its records, by what is positive of their values."""
    positive_R = np.maximum(value_R, 0.0)
    total_O = np.bincount(owner_R, weights=positive_R, minlength=len(owners))
    price_O = np.array([prices.get(owner, 0) for owner in owners], np.float64)
    return np.asarray(
        price_O[owner_R] * positive_R / np.where(total_O > 0, total_O, 1.0)[owner_R], np.float64
    )


def _rates(
    amount_R: Floats, size_R: Integers, owner_R: Integers, num_owners: int
) -> tuple[float, float, int]:
    """Rate of a class, and the lowest rate of an owner in it with the owner's place."""
    tokens_O = np.bincount(owner_R, weights=size_R, minlength=num_owners)
    amount_O = np.bincount(owner_R, weights=amount_R, minlength=num_owners)
    rate_O = np.where(tokens_O > 0, THOUSAND * amount_O / np.maximum(tokens_O, 1), np.inf)
    worst = int(np.argmin(rate_O))
    return (THOUSAND * float(amount_R.sum()) / int(size_R.sum()), float(rate_O[worst]), worst)
