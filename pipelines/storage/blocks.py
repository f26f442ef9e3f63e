"""Blocks: the Parquet files of the archive, and the leaves that their rows stand for.

A block is a run of leaves of about 64 MB of text that begins and ends at a multiple of 4,096 leaves
(the size of a token shard), the last one of a version excepted. Its file is named by its keyed digest,
so equal content is stored once and a version that changes one block shares all others with its parent.

A row's leaf is ``leaf_hash(leaf_data(commit(salt, canonical text), HMAC(K_owner, owner), licence))``; the
leaf of an index without a row is a tombstone. The file's own bytes depend on the Parquet writer and
prove nothing; they are checked for integrity only.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import polars as pl

from pipelines.storage.deliveries import file_digest
from pipelines.storage.manifest import StoredBlock
from pipelines.storage.records import SCHEMA
from provenance.canonical import CANONICALISATION, canonical_bytes, keyed, sync_folder
from provenance.commitment import commit, leaf_data, tombstone_leaf
from provenance.hashing import leaf_hash

SHARD_LEAVES: Final = 1 << 12
"""Leaves of a token shard (INTERFACES 3); blocks are cut at its multiples."""

BLOCK_BYTES: Final = 64 << 20
"""Text of a full block in bytes."""

BLOCK_SCHEMA: Final = pl.Schema({"index": pl.UInt64(), **SCHEMA})


def block_counts(first: int, sizes_N: Sequence[int], block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Cut a run of leaves into blocks.

    The cuts up to a leaf do not depend on the leaves behind it, so appending changes no full block.

    Args:
        first: index of the first leaf, where a block begins.
        sizes_N: bytes of text of each leaf, 0 for a tombstone.
        block_bytes: text of a full block.

    Returns:
        Leaves per block; the last block may still be open.
    """
    counts: list[int] = []
    count = held = 0
    for size in sizes_N:
        count, held = count + 1, held + size
        if held >= block_bytes and (first + sum(counts) + count) % SHARD_LEAVES == 0:
            counts.append(count)
            count = held = 0
    return [*counts, count] if count else counts


def is_full(first: int, count: int, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> bool:
    """Whether nothing is appended to a block any more.

    Args:
        first: index of its first leaf.
        count: its leaves.
        num_bytes: its text.
        block_bytes: text of a full block.

    Returns:
        True if the next leaf begins a new block.
    """
    return num_bytes >= block_bytes and (first + count) % SHARD_LEAVES == 0


def write_block(folder: Path, rows: pl.DataFrame, k_file: bytes) -> StoredBlock:
    """Write the file of a block under its digest.

    Args:
        folder: HOME/blocks.
        rows: columns of BLOCK_SCHEMA, by index.
        k_file: key of file digests.

    Returns:
        Digest and number of rows.

    Raises:
        OSError: the disk refused; no file was left.
    """
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            # No statistics: they would repeat pieces of texts in the footer.
            rows.write_parquet(
                file, compression="zstd", statistics=False, row_group_size=SHARD_LEAVES
            )
            file.flush()
            os.fsync(file.fileno())
        digest = file_digest(temporary, k_file).hex()
        block = StoredBlock(rows.height, digest)
        temporary.replace(folder / block.file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)
    return block


def read_block(
    folder: Path, block: StoredBlock, columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """The rows of a block, without checking them.

    Args:
        folder: HOME/blocks.
        block: which file.
        columns: names of BLOCK_SCHEMA, all if None.

    Returns:
        Rows by index.

    Raises:
        OSError: the file is missing or cannot be read.
        polars.exceptions.PolarsError: it is not a Parquet file any more.
    """
    return pl.read_parquet(
        folder / block.file, columns=list(columns) if columns else None, memory_map=False
    )


def salvage_block(folder: Path, block: StoredBlock) -> pl.DataFrame | None:
    """The rows of a damaged block as far as it still is Parquet, to see which of them changed.

    Args:
        folder: HOME/blocks.
        block: which file.

    Returns:
        Rows, or None if nothing can be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Arrow reports damage as an error, where polars trusts the file and panics.
    try:
        table = pq.read_table(
            pa.BufferReader((folder / block.file).read_bytes()), use_threads=False
        )
        table.validate(full=True)
        rows = pl.DataFrame(table)
    except (OSError, ValueError, pa.ArrowException, pl.exceptions.PolarsError):
        return None
    return rows if rows.schema == BLOCK_SCHEMA else None


def leaf_of(salt: bytes, text: str, pseudonym: bytes, licence: str) -> bytes:
    """The leaf hash of a record.

    Args:
        salt: its 32-byte salt.
        text: its text as delivered.
        pseudonym: 32 bytes, HMAC(K_owner, owner).
        licence: its SPDX licence.

    Returns:
        32 bytes.

    Raises:
        FormatError: a value that no record can have.
    """
    commitment = commit(salt, canonical_bytes(text))
    return leaf_hash(leaf_data(commitment, pseudonym, CANONICALISATION, licence))


def leaves_of(
    rows: pl.DataFrame, salts: Callable[[bytes], bytes], k_owner: bytes
) -> Iterator[bytes]:
    """The leaf hash of each row.

    Args:
        rows: records, with at least record_id, owner, text and licence.
        salts: gives the 32-byte salt of a record id.
        k_owner: key of owner pseudonyms.

    Yields:
        32 bytes per row.
    """
    pseudonyms = {owner: keyed(k_owner, owner.encode()) for owner in rows["owner"].unique()}
    columns = rows.select("record_id", "owner", "text", "licence")
    for record, owner, text, licence in columns.iter_rows():
        yield leaf_of(salts(record), text, pseudonyms[owner], licence)


def tombstone_hash(index: int) -> bytes:
    """The leaf hash that an erased or withdrawn record leaves.

    Args:
        index: its position in the record tree.

    Returns:
        32 bytes.
    """
    return leaf_hash(tombstone_leaf(index))


def remove_leftovers(folder: Path, pattern: str = ".*.tmp") -> None:
    """Remove temporary files of a writer that died; the caller holds the lock, so none is alive.

    Args:
        folder: a folder of that writer.
        pattern: glob of its temporary names.
    """
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)
