"""Rows of numbers per record on disk: memory-mapped, resumable after `kill -9`, shared by several processes.

    NAME.part/   while it is written           NAME/   once it is whole: the rename is the last act
        store.json      canonical JSON: format, identity, shape, type, blocks; digest of values when whole
        ids.npy         record ids, uint8 [N, 32];  index.npy: corpus indices, int64 [N]
        values.npy      one row per record, memory-mapped
        done-RANK       one line per block that a process has written: number and SHA-256 of its rows

A process writes the rows of a block, forces them to the disk, and only then the block's line. After a crash
at any point a block counts as done if its line is there *and* its rows have the line's digest, so rows that
were torn are computed again. Since a block's content does not depend on who computes it or when, the result
has the bits of an unbroken run. A `.part` folder of another identity (other weights, data, settings) is never
continued, and a `.part` folder is never read as a result.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from provenance.canonical import jcs, parse_json, sync_folder, write_atomic
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT = 1
STORE_FILE, VALUES_FILE = "store.json", "values.npy"
_TYPES = {"float32": np.float32, "float64": np.float64}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a store will hold."""

    identity: dict[str, Any]
    """Everything the values depend on: digests and settings, JSON without floats."""
    index: tuple[int, ...]
    """Corpus index of each record."""
    ids: tuple[bytes, ...]
    """Id of each record, 32 bytes."""
    width: int
    """Numbers per record."""
    dtype: str
    """"float32" or "float64"."""
    blocks: tuple[tuple[int, int], ...]
    """(first, past the last) row of each block; together all rows."""

    def document(self) -> dict[str, Any]:
        """The content of store.json while the store is written."""
        return {
            "format": FORMAT, "identity": self.identity, "rows": len(self.index), "width": self.width,
            "dtype": self.dtype, "blocks": [list(block) for block in self.blocks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole store, read."""

    values: NDArray[Any]
    """[N, width], memory-mapped, read-only."""
    index: NDArray[np.int64]
    """Corpus index of each record."""
    ids: tuple[bytes, ...]
    """Id of each record."""
    identity: dict[str, Any]
    """What the values depend on."""
    digest: str
    """Hex SHA-256 of the values."""

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any] | None = None) -> Stored:
        """Read a store; every value is checked against the digest.

        Args:
            folder: the store.
            identity: what it must be of; None takes its word.

        Raises:
            GradientError: missing, unfinished, altered, or of another identity.
        """
        if not (folder / STORE_FILE).is_file() or folder.suffix == ".part":
            part = folder.with_name(folder.name + ".part").is_dir() or folder.suffix == ".part"
            raise GradientError(
                f"store {folder.name}: expected a whole store, got {'an unfinished one' if part else 'none'}; "
                "run the pass to its end"
            )
        document = parse_json((folder / STORE_FILE).read_bytes())
        if document.get("format") != FORMAT or "digest" not in document:
            raise GradientError(f"store {folder.name}: expected format {FORMAT} with a digest")
        if identity is not None and document["identity"] != identity:
            odd = sorted(k for k in identity if document["identity"].get(k) != identity[k])
            first = odd[0] if odd else "identity"
            raise GradientError(
                f"store {folder.name}: {first}: expected {identity.get(first)!r}, got {document['identity'].get(first)!r}; "
                "run the pass again"
            )
        values = np.load(folder / VALUES_FILE, mmap_mode="r")
        if (got := _digest(values)) != document["digest"]:
            raise GradientError(
                f"store {folder.name}: expected values of digest {document['digest']}, got {got}; they were altered"
            )
        ids = tuple(row.tobytes() for row in np.load(folder / "ids.npy"))
        return cls(values, np.load(folder / "index.npy"), ids, document["identity"], got)


class StoreWriter:
    """One process's part in writing a store."""

    def __init__(self, folder: Path, layout: Layout, rank: int, found: dict[int, str]) -> None:
        """Use `open`."""
        self.folder, self.layout, self.rank = folder, layout, rank
        self.part = folder.with_name(folder.name + ".part")
        self.values = np.load(self.part / VALUES_FILE, mmap_mode="r+")
        self.done = {
            number
            for number, digest in found.items()
            if number < len(layout.blocks) and _digest(self._rows(number)) == digest
        }

    @classmethod
    def open(cls, folder: Path, layout: Layout, rank: int) -> Self:
        """Join, after `prepare` made the folder."""
        part, found = folder.with_name(folder.name + ".part"), {}
        for journal in sorted(part.glob("done-*")):
            for line in journal.read_text("ascii", errors="replace").splitlines():
                words = line.split()
                if len(words) == 2 and words[0].isdigit():  # the last line may be torn
                    found[int(words[0])] = words[1]
        return cls(folder, layout, rank, found)

    def missing(self, world_size: int) -> list[int]:
        """Blocks that this process has to compute, of those that nobody has written."""
        todo = [number for number in range(len(self.layout.blocks)) if number not in self.done]
        return todo[self.rank :: world_size]

    def write(self, number: int, rows: NDArray[Any]) -> None:
        """Store the rows of a block, then say so.

        Args:
            number: of the block.
            rows: [records of the block, width].
        """
        place = self._rows(number)
        assert rows.shape == place.shape, (rows.shape, place.shape)
        place[:] = rows
        assert isinstance(self.values, np.memmap)
        self.values.flush()
        line = f"\n{number} {_digest(place)}\n".encode("ascii")  # a torn line before it stays apart
        descriptor = os.open(
            self.part / f"done-{self.rank}",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.done.add(number)

    def finish(self) -> str:
        """Give the store its name; by one process, after all have written.

        Returns:
            Hex digest of the values.

        Raises:
            GradientError: a block is missing.
        """
        whole = type(self).open(self.folder, self.layout, self.rank)
        if lacking := sorted(set(range(len(self.layout.blocks))) - whole.done):
            raise GradientError(
                f"store {self.folder.name}: expected {len(self.layout.blocks)} blocks, got none of {lacking[:5]}"
            )
        digest = _digest(self.values)
        write_atomic(self.part / STORE_FILE, jcs({**self.layout.document(), "digest": digest}))
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.part.rename(self.folder)
        sync_folder(self.folder.parent)
        return digest

    def _rows(self, number: int) -> NDArray[Any]:
        first, last = self.layout.blocks[number]
        return self.values[first:last]


def prepare(folder: Path, layout: Layout) -> bool:
    """Make the `.part` folder, or keep the one of an interrupted pass of the same identity; by one process.

    Args:
        folder: name that the whole store will have.
        layout: what it will hold.

    Returns:
        Whether there was one to go on with.

    Raises:
        GradientError: a type that stores don't have, or blocks that aren't all rows.
    """
    if layout.dtype not in _TYPES:
        raise GradientError(f"store: expected a type of {sorted(_TYPES)}, got {layout.dtype!r}")
    _check_blocks(layout.blocks, len(layout.index))
    part, document = folder.with_name(folder.name + ".part"), jcs(layout.document())
    if (part / STORE_FILE).is_file():
        if (part / STORE_FILE).read_bytes() == document:
            return True
        finished = parse_json((part / STORE_FILE).read_bytes())
        finished.pop("digest", None)
        if jcs(finished) == document:  # it died between the digest and the rename
            return True
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    ids = np.frombuffer(b"".join(layout.ids), dtype=np.uint8).reshape(len(layout.ids), 32)
    np.save(part / "ids.npy", ids)
    np.save(part / "index.npy", np.array(layout.index, dtype=np.int64))
    shape = (len(layout.index), layout.width)
    values = np.lib.format.open_memmap(
        part / VALUES_FILE, mode="w+", dtype=_TYPES[layout.dtype], shape=shape
    )
    values.flush()
    write_atomic(part / STORE_FILE, document)  # last: without it the folder is made anew
    return False


def _check_blocks(blocks: Sequence[tuple[int, int]], rows: int) -> None:
    ends = [0, *(last for _, last in blocks)]
    if ends[-1] != rows or any(first != end for (first, _), end in zip(blocks, ends, strict=False)):
        raise GradientError(
            f"store: expected blocks that are all {rows} rows in order, got {list(blocks)[:4]}"
        )


def _digest(values: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
