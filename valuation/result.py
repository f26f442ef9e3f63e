"""Value rows: floats with their uncertainty, and the integers that are committed.

A value is computed in float64 and published in *nano* units (one billionth of a nat or a bit),
because whatever is hashed or signed holds integers only. Rounding each value alone would break
efficiency, the law that the values of the players add up to the value of all of them together.
So rounding is done on the whole list by the largest remainder:

    q_i = 10^9 · value_i,   total = round(Σ q_i),   n_i = ⌊q_i⌋,
    and the total - Σ n_i rows with the largest q_i - ⌊q_i⌋ get one unit more.

Then ``Σ n_i == total`` exactly and no row is off by a full unit. Ties go to the smaller subject
id, so the result doesn't depend on the order of the rows. Interval bounds are rounded outwards:
a published interval is never narrower than the computed one.

Source: the largest-remainder (Hamilton) method of apportionment; Balinski and Young,
"Fair Representation", 1982.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from valuation.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

SubjectKind = Literal["record", "cluster", "lot", "owner", "group", "entity"]
Unit = Literal["nat", "bit"]

NANO = 10**9
SUBJECT_KINDS: tuple[str, ...] = ("record", "cluster", "lot", "owner", "group", "entity")
UNITS: tuple[str, ...] = ("nat", "bit")

# The largest float64 whose value in nano units surely fits an int64 column.
MAX_ABS_VALUE = 9.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One value as computed: positive means it lowers the buyer's loss."""

    subject_kind: SubjectKind
    """What is valued."""
    subject_id: str
    """Its id: record_id in hex, owner id, group id or cluster number."""
    method: str
    """How the number was made, such as ``shapley.exact``; ``.derived`` marks a share."""
    target: str
    """On which data the utility was measured, such as ``target_value``."""
    unit: Unit
    """``nat`` or ``bit``, per target token."""
    value: float
    """The value in `unit`."""
    se: float | None = None
    """Standard error in `unit`; None where the row has no uncertainty of its own."""
    ci_low: float | None = None
    """Lower end of the interval in `unit`."""
    ci_high: float | None = None
    """Upper end of the interval in `unit`."""
    n: int = 0
    """How many observations (target records, permutations, tokens) stand behind the value."""

    def __post_init__(self) -> None:
        """Refuse what could not be published.

        Raises:
            ResultError: for an unknown kind or unit, a value that is not finite or too large, a
                negative standard error or count, half an interval, or one that is upside down.
        """
        if self.subject_kind not in SUBJECT_KINDS:
            raise ResultError(
                f"subject_kind: expected one of {SUBJECT_KINDS}, got {self.subject_kind!r}"
            )
        if self.unit not in UNITS:
            raise ResultError(f"unit: expected one of {UNITS}, got {self.unit!r}")
        for name in ("value", "se", "ci_low", "ci_high"):
            number = getattr(self, name)
            if number is not None and not abs(number) <= MAX_ABS_VALUE:
                raise ResultError(
                    f"{name} of {self.subject_id}: expected a finite number within "
                    f"±{MAX_ABS_VALUE:g}, got {number}"
                )
        if self.se is not None and self.se < 0:
            raise ResultError(f"se of {self.subject_id}: expected at least 0, got {self.se}")
        if self.n < 0:
            raise ResultError(f"n of {self.subject_id}: expected at least 0, got {self.n}")
        if (self.ci_low is None) != (self.ci_high is None):
            raise ResultError(f"interval of {self.subject_id}: give both ends or none")
        if self.ci_low is not None and self.ci_high is not None and self.ci_low > self.ci_high:
            raise ResultError(
                f"interval of {self.subject_id}: expected low <= high, got "
                f"{self.ci_low} > {self.ci_high}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoRow:
    """One value as published: integers in billionths of `unit`."""

    subject_kind: SubjectKind
    subject_id: str
    method: str
    target: str
    unit: Unit
    value_nano: int
    se_nano: int | None = None
    ci_low_nano: int | None = None
    ci_high_nano: int | None = None
    n: int = 0


def to_nano(rows: Sequence[ValueRow]) -> tuple[NanoRow, ...]:
    """Round rows to nano units so that sums stay exact.

    Rows that share subject kind, method, target and unit are rounded together, because their sum
    has a meaning (V(all) - V(empty) for Shapley values); each such list sums to its rounded total.

    Args:
        rows: any number of rows; a subject may stand once per kind, method, target and unit.

    Returns:
        The rounded rows, in the order of the input.

    Raises:
        ResultError: if a subject stands twice in one list.
    """
    lists: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        lists[row.subject_kind, row.method, row.target, row.unit].append(position)
    nano = [0] * len(rows)
    for key, positions in lists.items():
        positions.sort(key=lambda position: rows[position].subject_id)
        for left, right in pairwise(positions):
            if rows[left].subject_id == rows[right].subject_id:
                raise ResultError(
                    f"expected each subject once per list {key}, got {rows[left].subject_id!r} twice"
                )
        units = _round_to_sum(np.array([rows[p].value for p in positions], dtype=np.float64))
        for position, amount in zip(positions, units.tolist(), strict=True):
            nano[position] = amount
    return tuple(
        NanoRow(
            subject_kind=row.subject_kind,
            subject_id=row.subject_id,
            method=row.method,
            target=row.target,
            unit=row.unit,
            value_nano=amount,
            se_nano=None if row.se is None else math.ceil(row.se * NANO),
            ci_low_nano=None if row.ci_low is None else math.floor(row.ci_low * NANO),
            ci_high_nano=None if row.ci_high is None else math.ceil(row.ci_high * NANO),
            n=row.n,
        )
        for row, amount in zip(rows, nano, strict=True)
    )


def apportion(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Split an integer by integer weights with the largest remainder, exactly.

    Args:
        total: what is split, at least 0.
        weights: subject → weight, at least 0, with a positive sum. Arbitrary precision, so that
            the split is exact and not a matter of floating point.

    Returns:
        subject → share, in sorted order of the subjects. The shares sum to `total`; each differs
        from ``total · weight / Σ weights`` by less than one unit; weight 0 gets 0. Ties go to the
        smaller subject id.

    Raises:
        ResultError: for a negative total or weight, or if nothing has a positive weight.
    """
    if total < 0:
        raise ResultError(f"total: expected at least 0, got {total}")
    whole = sum(weights.values())
    if any(weight < 0 for weight in weights.values()) or whole <= 0:
        raise ResultError(
            f"weights: expected none below 0 and a positive sum, got sum {whole}; "
            "leave out subjects that are paid nothing"
        )
    subjects = sorted(weights)
    shares = {subject: total * weights[subject] // whole for subject in subjects}
    left = total - sum(shares.values())
    # sorted() is stable, so among equal remainders the smaller subject id comes first.
    by_remainder = sorted(subjects, key=lambda subject: -(total * weights[subject] % whole))
    for subject in by_remainder[:left]:
        shares[subject] += 1
    return shares


def values_frame(
    rows: Sequence[NanoRow], *, plan_digest: str, corpus_version: str, checkpoint_root: str
) -> pl.DataFrame:
    """The table that is stored as ``values.parquet``.

    Args:
        rows: published rows.
        plan_digest: digest of the plan that was committed before the values were known.
        corpus_version: id of the corpus version that was valued.
        checkpoint_root: root of the checkpoint the values refer to, or "none".

    Returns:
        One line per row, columns in the order of the file format.
    """
    import polars as pl

    integers = ("value_nano", "se_nano", "ci_low_nano", "ci_high_nano", "n")
    texts = ("subject_kind", "subject_id", "method", "target", "unit")
    data: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in texts + integers
    }
    schema = dict.fromkeys(texts, pl.String()) | dict.fromkeys(integers, pl.Int64())
    return pl.DataFrame(data, schema=schema).with_columns(
        plan_digest=pl.lit(plan_digest),
        corpus_version=pl.lit(corpus_version),
        checkpoint_root=pl.lit(checkpoint_root),
    )


def _round_to_sum(values_N: np.ndarray) -> np.ndarray:
    """Largest-remainder rounding of float64 values to nano units; ties go to the first."""
    scaled_N = values_N * NANO
    floor_N = np.floor(scaled_N)
    rest_N = scaled_N - floor_N
    # Floors are integers below 2^63 and fsum adds the rests exactly, so the total is the rounding
    # of the true sum, whatever the order and the size of the values.
    units_N = floor_N.astype(np.int64)
    missing = round(math.fsum(rest_N.tolist()))
    units_N[np.argsort(-rest_N, kind="stable")[:missing]] += 1
    return units_N
