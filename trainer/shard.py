"""One shard of a token folder as columns: read from Arrow without a copy, and its digest.

The digest is SHA-256 over: the ASCII tag, the JCS list of owners in row order ("" where none), then as little-endian
arrays the indices (u8), record ids (32 bytes, zero for a tombstone), lengths (u4) and tokens (u4). It is over what the
columns say, not over the file, so it doesn't depend on the version of the Arrow writer.
"""
# ruff: noqa: N802 - a property with a shape suffix in its name (STYLE 2)

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from provenance.canonical import jcs
from trainer.errors import DataError

SCHEMA = pa.schema(
    [
        ("index", pa.uint64()),
        ("record_id", pa.binary(32)),
        ("owner", pa.dictionary(pa.int32(), pa.string())),
        ("tokens", pa.list_(pa.uint32())),
    ],
)
_DIGEST_TAG = b"dataworth-token-shard-1\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """The columns of one shard as numpy views of the mapped file."""

    indices_N: np.ndarray
    """uint64 positions in the corpus."""
    ids_N32: np.ndarray
    """uint8 record ids, zero for a tombstone."""
    owners: list[str | None]
    """Distinct owners of this shard in dictionary order, then None if some row has no owner."""
    owner_codes_N: np.ndarray
    """int32 positions in `owners`."""
    offsets_N1: np.ndarray
    """int32 start of each row in `values_T`, and the end."""
    values_T: np.ndarray
    """uint32 tokens."""

    @property
    def lengths_N(self) -> np.ndarray:
        """Number of tokens per row."""
        return np.diff(self.offsets_N1)

    @classmethod
    def of(cls, table: pa.Table, name: str) -> Shard:
        """Views of a table of SCHEMA.

        Raises:
            DataError: other columns or types, or offsets that point outside the buffers.
        """
        if (
            table.schema != SCHEMA
        ):  # the names found are not shown: in a damaged file they may not be text
            raise DataError(
                f"{name}: expected the columns {SCHEMA.names} and their types, got others"
            )
        try:
            table.validate(full=True)  # before any raw view: bad offsets must not reach numpy
        except pa.ArrowException as error:
            raise DataError(f"{name}: not a readable token shard ({error})") from error
        if any(column.num_chunks != 1 for column in table.columns):
            raise DataError(f"{name}: expected one record batch")
        index, ids, owner, tokens = (column.chunk(0) for column in table.columns)
        names: list[str | None] = owner.dictionary.to_pylist()
        ids_N32 = np.frombuffer(ids.buffers()[1], dtype=np.uint8, count=32 * len(ids)).reshape(
            -1, 32
        )
        return cls(
            _view(index, "<u8"),
            np.where(_present(ids)[:, None], ids_N32, 0),
            [*names, None],
            np.where(_present(owner), _view(owner.indices, "<i4"), len(names)),
            _view(tokens.offsets, "<i4"),
            _view(tokens.values, "<u4"),
        )

    def digest(self) -> str:
        """Hex SHA-256 over the logical columns; see the module docstring."""
        state = hashlib.sha256(_DIGEST_TAG)
        state.update(jcs([self.owners[code] or "" for code in self.owner_codes_N]))
        state.update(np.ascontiguousarray(self.indices_N, dtype="<u8").tobytes())
        state.update(np.ascontiguousarray(self.ids_N32).tobytes())
        state.update(self.lengths_N.astype("<u4").tobytes())
        first, last = int(self.offsets_N1[0]), int(self.offsets_N1[-1])
        # On a little-endian machine this is a view: the largest column is hashed without a copy.
        state.update(
            np.ascontiguousarray(self.values_T[first:last], dtype="<u4").view(np.uint8).data
        )
        return state.hexdigest()


def _view(array: pa.Array, kind: str) -> np.ndarray:
    """A primitive Arrow array as numpy, without a copy.

    `array.to_numpy()` would do the same, but imports pandas, half a second for every process that starts.
    """
    data = array.buffers()[1]
    if data is None:
        return np.empty(0, dtype=kind)
    start = array.offset * np.dtype(kind).itemsize
    return np.frombuffer(data, dtype=kind, count=len(array), offset=start)


def _present(array: pa.Array) -> np.ndarray:
    """Which entries of an unsliced Arrow array are not null."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), dtype=bool)
    return np.unpackbits(
        np.frombuffer(bits, dtype=np.uint8), count=len(array), bitorder="little"
    ).astype(bool)
