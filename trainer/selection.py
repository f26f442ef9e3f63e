"""How often each record stands in an epoch: weights by record id, from values or from any other rule.

    {"default":1000000,"format":1}        canonical JSON lines; first the weight of records that are not named
    ["<record id, 64 hex digits>",0]      then one line per record, by id: its weight in millionths of once per epoch

0 leaves a record out, 1,000,000 has it once per epoch, 2,500,000 two and a half times on average (`trainer.order`).
The file is named in run.json by the SHA-256 of its bytes, so which record was drawn how often is part of what a run
commits to. The trainer takes weights as they are; that they follow from values is the matter of who made them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from provenance.canonical import jcs, parse_json, write_atomic
from trainer.errors import DataError
from trainer.order import MAX_MICRO, MICRO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1
_LINE = re.compile(rb'\["([0-9a-f]{64})",(0|[1-9][0-9]{0,15})\]')


@dataclass(frozen=True, slots=True)
class RecordWeights:
    """Weights of records, in millionths."""

    ids_M: np.ndarray
    """Record ids, numpy type S32, ascending, each once."""
    micro_M: np.ndarray
    """int64 weight of each."""
    default: int = MICRO
    """Weight of every other record."""

    def of(self, ids_N32: np.ndarray) -> np.ndarray:
        """Weights of some records.

        Args:
            ids_N32: uint8 record ids [N, 32].

        Returns:
            int64 [N].
        """
        found_N, place_N = find(self.ids_M, ids_N32)
        if not len(self.ids_M):
            return np.full(len(found_N), self.default, dtype=np.int64)
        return np.where(found_N, self.micro_M[place_N], self.default)


def find(ids_M: np.ndarray, ids_N32: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Look record ids up.

    Args:
        ids_M: record ids of numpy type S32, ascending.
        ids_N32: uint8 record ids [N, 32] to look for.

    Returns:
        Whether each is there, and at which place (any place for one that isn't).
    """
    # S32 ignores trailing zero bytes, which tells no two ids of 32 bytes apart or together wrongly.
    wanted_N = np.ascontiguousarray(ids_N32).view("S32").reshape(-1)
    place_N = np.minimum(np.searchsorted(ids_M, wanted_N), max(len(ids_M) - 1, 0))
    if not len(ids_M):
        return np.zeros(len(wanted_N), dtype=bool), place_N
    return ids_M[place_N] == wanted_N, place_N


def sorted_ids(ids: Mapping[bytes, int] | frozenset[bytes]) -> np.ndarray:
    """Record ids as an ascending array of numpy type S32."""
    return np.array(sorted(ids), dtype="S32")


def write_selection(path: Path, micro: Mapping[bytes, int], default: int = MICRO) -> str:
    """Write a file of weights; the one writer of this format.

    Args:
        path: where; replaced atomically.
        micro: record id (32 bytes) -> weight in millionths, 0..1,000,000,000.
        default: weight of every other record.

    Returns:
        Hex SHA-256 of the file, for `Selection.digest`.

    Raises:
        DataError: an id of another size or a weight out of range.
    """
    lines = [jcs({"format": FORMAT, "default": _checked(default, "default")})]
    for record_id in sorted(micro):
        if len(record_id) != 32:
            raise DataError(f"selection: expected record ids of 32 bytes, got {len(record_id)}")
        weight = _checked(micro[record_id], record_id.hex())
        lines.append(b'["%b",%d]' % (record_id.hex().encode(), weight))
    data = b"".join(line + b"\n" for line in lines)
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def read_selection(path: Path, expected_digest: str) -> RecordWeights:
    """Read a file of weights.

    Args:
        path: the file.
        expected_digest: hex SHA-256 that it must have.

    Returns:
        The weights.

    Raises:
        DataError: missing, altered, or not of this format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"selection.file: cannot be read ({error.strerror})") from error
    if (got := hashlib.sha256(data).hexdigest()) != expected_digest:
        raise DataError(f"selection.file: expected digest {expected_digest}, got {got}")
    head, *lines = data.split(b"\n")
    try:
        header = parse_json(head)
    except ValueError as error:
        raise DataError(f"selection.file: line 1: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or len(header) != 2:
        raise DataError(f"selection.file: expected format {FORMAT} and default in line 1")
    if not lines or lines.pop():
        raise DataError("selection.file: expected a newline at its end")
    ids, weights = [], []
    for number, line in enumerate(lines, 2):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(f'selection.file: line {number}: expected ["record id",millionths]')
        ids.append(bytes.fromhex(match[1].decode()))
        weights.append(_checked(int(match[2]), f"line {number}"))
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise DataError("selection.file: expected ascending record ids, each once")
    return RecordWeights(
        np.array(ids, dtype="S32"),
        np.array(weights, dtype=np.int64),
        _checked(header.get("default"), "default"),
    )


def _checked(weight: object, where: str) -> int:
    if not isinstance(weight, int) or isinstance(weight, bool) or not 0 <= weight <= MAX_MICRO:
        raise DataError(
            f"selection: {where}: expected an integer weight of 0..{MAX_MICRO} millionths, got {weight!r}"
        )
    return weight
