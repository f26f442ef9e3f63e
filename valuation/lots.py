"""Lots: the players of the game that pays, cut so that nobody's names matter.

Shapley values of *owners* are not split-proof: three owners with u = log(1 + t/100) and 100 tokens each
earn 0.462 nats, and one that poses as eight earns 0.492 (shell companies, Faithful Group Shapley). So the players are
lots: the deduplicated records, in an order that doesn't know owners, cut into parts of equal tokens. Then

    φ_lot = Shapley value of the lot,   v_owner = Σ_lots φ_lot · (tokens of the owner in the lot) / (tokens of the lot)

and the values of all owners add up to V(all) - V(nobody), because the lots' values do. An owner who splits
into k names, merges, or takes another name changes no lot, so its total stays what it was, to the last
bit of the arithmetic; a copy stands in no lot, so it changes nothing and earns nothing.

The order is (personal?, undated?, date, content, fingerprint). Personal records get lots of their own, because
they may be erased and no other value should hang on them. *Content* orders undated records: the first principal
axis of their token counts (hashed to 256 columns, square roots, unit length), so that a lot holds
records that are alike. Everything is computed in the order of the fingerprints: the same records give the same lots, bit for bit.

What it costs: owners inside one lot are paid alike per token, however different their texts are; `purity`
says how large the share of each lot's largest owner is. Smaller lots tell owners apart better and cost more
retrainings. The alternative, owners as players (`valuation.groups`), tells honest owners apart and pays shells.

What it doesn't prevent: an owner who declares other dates, or pads texts, changes which lot they fall in.

Shapes: N records, T tokens, K lots, O owners, F = 256 columns, Q target records.

Source: Faithful Group Shapley, 2505.19013 (the attack and the axiom); notes of this project, lots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GroupError
from valuation.intervals import LEVEL, checked_tokens, group_values
from valuation.seeds import by_seed, over_seeds, seed_spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from valuation.intervals import GroupValues
    from valuation.orders import Orders

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

NUM_COLUMNS = 256
# Knuth's multiplier: spreads neighbouring token ids over the columns.
_MULTIPLIER = np.uint64(2654435761)
# The axis is rounded before it orders records, so that the last bits of a sum can't.
_DECIMALS = 9


@dataclass(frozen=True, slots=True)
class Lots:
    """A cut of the valued records; lot k is bit k of a coalition."""

    lot_N: Integers
    """Lot of each record; -1 for records that are not valued."""
    tokens_K: Integers
    """Tokens of each lot."""
    personal_K: NDArray[np.bool_]
    """Which lots hold personal records."""

    @property
    def ids(self) -> tuple[str, ...]:
        """``lot-00``, ``lot-01``, ... in order."""
        return tuple(f"lot-{number:02d}" for number in range(len(self.tokens_K)))


def cut_lots(
    fingerprints: Sequence[bytes],
    tokens_N: ArrayLike,
    dates: Sequence[object | None],
    personal_N: ArrayLike,
    valued_N: ArrayLike,
    content_N: ArrayLike,
    max_lots: int,
) -> Lots:
    """Cut the valued records into at most `max_lots` lots of about equal tokens.

    Args:
        fingerprints: digest of each record's content, without its owner; different for all valued records.
        tokens_N: tokens of each record, at least 0.
        dates: date of each record (ISO text or `date`), or None.
        personal_N: whether each record is personal data.
        valued_N: whether each record counts (see `valuation.pricing.first_in_cluster`).
        content_N: place of each record on the axis of contents (see `content_axis`).
        max_lots: most lots, at least 1, or 2 when there are personal and other records.

    Returns:
        The lots; none is empty. A record stands in one lot only, so sizes differ by up to one record.

    Raises:
        GroupError: columns of different lengths, no valued tokens, equal fingerprints, or too few lots.
    """
    tokens_N, content_N = np.asarray(tokens_N, np.int64), np.asarray(content_N, np.float64)
    personal_N, valued_N = np.asarray(personal_N, np.bool_), np.asarray(valued_N, np.bool_)
    lengths = {len(c) for c in (fingerprints, tokens_N, dates, personal_N, valued_N, content_N)}
    if len(lengths) != 1:
        raise GroupError(f"expected one entry per record in every column, got lengths {lengths}")
    rows = np.flatnonzero(valued_N & (tokens_N > 0)).tolist()
    if tokens_N.min(initial=0) < 0 or not rows:
        raise GroupError(
            "tokens_N: expected at least one valued record with tokens, and none negative"
        )
    if len({fingerprints[row] for row in rows}) < len(rows):
        raise GroupError("fingerprints: expected every valued record once; leave copies out first")

    def place(row: int) -> tuple[bool, str, float, bytes]:
        day = dates[row]
        return (
            day is None,
            "" if day is None else str(day),
            float(content_N[row]),
            fingerprints[row],
        )

    parts = [
        sorted((row for row in rows if personal_N[row] == flag), key=place)
        for flag in (False, True)
    ]
    kinds = [flag for flag, part in zip((False, True), parts, strict=True) if part]
    if max_lots < len(kinds):
        raise GroupError(
            f"max_lots: expected at least {len(kinds)} (personal records need a lot of their own), got {max_lots}"
        )
    counts = [max_lots, 1] if not kinds[0] and len(kinds) == 1 else [max_lots - 1, 1]
    if kinds == [True]:
        counts = [0, max_lots]
    lot_N = np.full(len(tokens_N), -1, np.int64)
    sizes: list[int] = []
    personal: list[bool] = []
    for flag, part, count in zip((False, True), parts, counts, strict=True):
        for members in _equal_parts(part, tokens_N, count):
            lot_N[members] = len(sizes)
            sizes.append(int(tokens_N[members].sum()))
            personal.append(flag)
    return Lots(lot_N, np.array(sizes, np.int64), np.array(personal, np.bool_))


def content_axis(
    tokens_T: NDArray[np.integer],
    offsets_N1: NDArray[np.integer],
    fingerprints: Sequence[bytes],
    valued_N: ArrayLike,
) -> Floats:
    """Place of each record on the first principal axis of token counts.

    Args:
        tokens_T: token ids of all records.
        offsets_N1: N + 1 record borders.
        fingerprints: digest of each record's content; sums run in this order, so that owners' names can't matter.
        valued_N: which records the axis is of; a copy that turned the axis would move other owners' lots.

    Returns:
        N numbers, rounded to 9 decimals; 0 for records without tokens.
    """
    offsets: Integers = np.asarray(offsets_N1, np.int64)
    lengths_N = offsets[1:] - offsets[:-1]
    column_T = (
        (np.asarray(tokens_T).astype(np.uint64) * _MULTIPLIER) >> np.uint64(16)
    ) % NUM_COLUMNS
    row_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    flat = np.bincount(
        row_T * NUM_COLUMNS + column_T.astype(np.int64), minlength=len(lengths_N) * NUM_COLUMNS
    )
    feature_NF = np.sqrt(flat.reshape(-1, NUM_COLUMNS).astype(np.float64))
    feature_NF /= np.maximum(np.linalg.norm(feature_NF, axis=1, keepdims=True), 1e-12)
    order_N = np.array(sorted(range(len(lengths_N)), key=lambda row: fingerprints[row]), np.int64)
    sorted_NF = feature_NF[
        order_N[np.asarray(valued_N, np.bool_)[order_N] & (lengths_N[order_N] > 0)]
    ]
    if not len(sorted_NF):
        return np.zeros(len(lengths_N))
    mean_F = sorted_NF.mean(axis=0)
    _, vectors_FF = np.linalg.eigh(np.cov(sorted_NF, rowvar=False, bias=True))
    axis_F = vectors_FF[:, -1]
    axis_F = axis_F * np.sign(axis_F[np.argmax(np.abs(axis_F))])
    return np.where(lengths_N > 0, np.round((feature_NF - mean_F) @ axis_F, _DECIMALS), 0.0)


def lot_shares(
    lots: Lots, owner_N: Sequence[str], tokens_N: ArrayLike
) -> tuple[tuple[str, ...], Integers]:
    """Who holds how much of each lot.

    Args:
        lots: the cut.
        owner_N: owner of each record.
        tokens_N: tokens of each record, as they were cut.

    Returns:
        Owner ids, sorted, those without a valued record included; and tokens [O, K].

    Raises:
        GroupError: another number of records, or tokens that the lots weren't cut from.
    """
    tokens_N = np.asarray(tokens_N, np.int64)
    if not len(owner_N) == len(tokens_N) == len(lots.lot_N):
        raise GroupError(
            f"expected {len(lots.lot_N)} owners and token counts, got {len(owner_N)} and {len(tokens_N)}"
        )
    names = tuple(sorted(set(owner_N)))
    code = {name: row for row, name in enumerate(names)}
    tokens_OK = np.zeros((len(names), len(lots.tokens_K)), np.int64)
    owner_code_N = np.array([code[owner] for owner in owner_N], np.int64)
    inside_N = lots.lot_N >= 0
    np.add.at(tokens_OK, (owner_code_N[inside_N], lots.lot_N[inside_N]), tokens_N[inside_N])
    if (tokens_OK.sum(axis=0) != lots.tokens_K).any():
        raise GroupError("tokens_N: expected the counts that the lots were cut from, got others")
    return names, tokens_OK


def purity(tokens_OK: Integers) -> Floats:
    """Share of each lot that its largest owner holds: 1 = the lot's value is that owner's alone.

    Args:
        tokens_OK: tokens of each owner in each lot.

    Returns:
        K shares.
    """
    return np.asarray(tokens_OK.max(axis=0) / tokens_OK.sum(axis=0), np.float64)


def lot_gains(
    nll: Mapping[int, ArrayLike], num_lots: int, orders: Orders | None, tokens_Q: ArrayLike
) -> tuple[Floats, Floats]:
    """What each lot gains on each target record, and how much the draw of orders blurs it.

    Args:
        nll: bitmask → summed nats per target record, [Q] or of several seeds [S, Q], for all of `coalitions_needed`.
        num_lots: K.
        orders: the sampled orders, or None for all coalitions.
        tokens_Q: scored tokens of each target record.

    Returns:
        Shapley values [K, Q] in nats, of several seeds [S, K, Q], and the variance over orders of each lot's (mean) value per target token, [K].

    Raises:
        UtilityError: a coalition is missing or not finite.
    """
    from valuation.orders import sampled_shapley
    from valuation.shapley import exact_shapley

    tables = by_seed(nll)
    several = any(np.ndim(loss) == 2 for loss in nll.values())
    if orders is None:
        gains_SKQ = np.stack([-exact_shapley(table, num_lots) for table in tables])
        return gains_SKQ if several else gains_SKQ[0], np.zeros(num_lots)
    gains_SKQ = np.stack([-sampled_shapley(table, orders)[0] for table in tables])
    total = len(tables) * np.asarray(tokens_Q, np.float64).sum()
    means = {mask: float(np.sum(loss) / total) for mask, loss in nll.items()}
    return gains_SKQ if several else gains_SKQ[0], sampled_shapley(means, orders)[1] ** 2


def owner_intervals(
    gains: ArrayLike,
    tokens_OK: Integers,
    tokens_Q: ArrayLike,
    *,
    order_variance_K: ArrayLike | None = None,
    level: float = LEVEL,
    method: str = "shapley.lots",
) -> GroupValues:
    """Values of owners from those of the lots, with errors over target records and seeds.

    Args:
        gains: gain of each lot on each target record, in nats: [K, Q], or of several seeds [S, K, Q] (`valuation.seeds`).
        tokens_OK: tokens of each owner in each lot (see `lot_shares`).
        tokens_Q: scored tokens of each target record.
        order_variance_K: variance of each lot's value over sampled orders; None = exact.
        level: coverage of the intervals.
        method: what the values are called.

    Returns:
        O values in nats per target token; they sum to what the lots sum to.

    Raises:
        UtilityError: shapes that don't fit, or a level out of range.
    """
    gains_KQ = over_seeds(gains)
    tokens_Q = checked_tokens(tokens_Q, gains_KQ.shape[1])
    spread = seed_spread(gains, tokens_Q) if np.ndim(gains) == 3 else None
    share_OK = tokens_OK / tokens_OK.sum(axis=0)
    variance_K = (
        np.zeros(len(gains_KQ)) if order_variance_K is None else np.asarray(order_variance_K)
    )
    # Lots of one sampled order are not independent: by Cauchy and Schwarz the deviations add up at worst.
    variance_O = (share_OK @ np.sqrt(variance_K)) ** 2
    return group_values(
        share_OK @ gains_KQ, gains_KQ.sum(axis=0), tokens_Q, variance_O, level=level, bootstrap=None, method=method,
        spread=None if spread is None else (spread, share_OK),
    )  # fmt: skip


def _equal_parts(rows: list[int], tokens_N: Integers, count: int) -> list[list[int]]:
    """Contiguous parts; a record goes where its middle token falls, in integers."""
    total = int(tokens_N[rows].sum()) if rows else 0
    parts: dict[int, list[int]] = {}
    before = 0
    for row in rows:
        size = int(tokens_N[row])
        parts.setdefault((2 * before + size) * count // (2 * total), []).append(row)
        before += size
    return [parts[number] for number in sorted(parts)]
