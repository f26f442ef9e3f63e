"""Token folders: what the tokenizer wrote, checked again by whoever reads it.

    tokens.json            corpus version, tokenizer digest, vocabulary, and per shard: first, count, live, number of
                           tokens, subtree root, digest
    shard-00000.arrow      Arrow IPC file, memory-mapped: index uint64, record_id binary[32] or null,
                           owner dictionary<string> or null, tokens list<uint32>

A shard is 4,096 consecutive leaves of the corpus (2^12, so that it is a subtree of the record tree); the last may be
short. An erased record keeps its place as an empty list without record id. Each document ends with one end-of-text
token. `owner_key`, where it is there, is a secret of whoever wrote the folder: run.json names owners by pseudonyms under it (`pseudonym`), so that
it can be shown to people who may not know them. The name of a folder's content is the SHA-256 of tokens.json; the shard digests inside (`trainer.shard`) are over the *logical*
columns, not over the file, so they do not depend on the version of the Arrow writer. The reader recomputes all of
them: a changed token, id, owner or order is refused.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from provenance.canonical import jcs, keyed, parse_json, write_atomic
from trainer.errors import DataError
from trainer.shard import SCHEMA, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

FORMAT = 1
TOKENS_FILE = "tokens.json"
SHARD_LEAVES = 1 << 12
_FIELDS = {
    "format", "corpus_version", "tokenizer_digest", "vocab_size", "end_of_text", "size", "live", "tokens",
    "shard_leaves", "shards",
}  # fmt: skip
_OWNER_KEY = "owner_key"
_SHARD_FIELDS = {"file", "first", "count", "live", "tokens", "digest", "subtree_root"}
_NO_RECORD = bytes(32)

Record = tuple[int, bytes | None, str | None, "Sequence[int] | np.ndarray"]
"""(index, record_id or None, owner, tokens); a tombstone has no record_id and no tokens."""


def write_tokens(
    folder: Path,
    *,
    corpus_version: str,
    tokenizer_digest: str,
    vocab_size: int,
    end_of_text: int,
    records: Iterable[Record],
    subtree_roots: Sequence[bytes | str] | None = None,
    owner_key: bytes | None = None,
) -> str:
    """Write a token folder; the one writer of this format. tokens.json is written last.

    Args:
        folder: made if needed; files of the same name are replaced.
        corpus_version: hex identity of the corpus version, or a name for token sets outside a corpus.
        tokenizer_digest: hex SHA-256 of the tokenizer.
        vocab_size: number of token ids.
        end_of_text: the id that ends every document, < vocab_size.
        records: (index, record_id | None, owner | None, tokens) with indices 0, 1, 2, ... without gap.
        subtree_roots: one Merkle root (hex or 32 bytes) per shard, or None where no record tree exists.
        owner_key: secret of 32 bytes that pseudonyms of owners are made with (`pseudonym`), or None: run.json then names owners as they are.

    Returns:
        Hex SHA-256 of tokens.json.

    Raises:
        DataError: an index out of order, a token out of range, a live record without id or end-of-text, or a number
            of subtree roots that is not the number of shards.
    """
    if not 0 <= end_of_text < vocab_size:
        raise DataError(f"end_of_text: expected 0..{vocab_size - 1}, got {end_of_text}")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    for rows in _runs_of_leaves(records):
        number = len(shards)
        table = _table(rows, number * SHARD_LEAVES, vocab_size, end_of_text)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(table)
        name = f"shard-{number:05d}.arrow"
        write_atomic(folder / name, sink.getvalue().to_pybytes())
        columns = Shard.of(table, name)
        shards.append(
            {
                "file": name,
                "first": number * SHARD_LEAVES,
                "count": len(rows),
                "live": int((columns.lengths_N > 0).sum()),
                "tokens": len(columns.values_T),
                "digest": columns.digest(),
                "subtree_root": _root_at(subtree_roots, number),
            },
        )
    if subtree_roots is not None and len(subtree_roots) != len(shards):
        raise DataError(
            f"subtree_roots: expected one per shard ({len(shards)}), got {len(subtree_roots)}"
        )
    data = jcs(
        {
            "format": FORMAT,
            "corpus_version": corpus_version,
            "tokenizer_digest": tokenizer_digest,
            "vocab_size": vocab_size,
            "end_of_text": end_of_text,
            "size": sum(shard["count"] for shard in shards),
            "live": sum(shard["live"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "shard_leaves": SHARD_LEAVES,
            "shards": shards,
            **({_OWNER_KEY: owner_key.hex()} if owner_key else {}),
        },
    )
    write_atomic(folder / TOKENS_FILE, data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """Parse tokens.json.

    Args:
        folder: a token folder.

    Returns:
        The manifest and the hex SHA-256 of its bytes.

    Raises:
        DataError: missing, not canonical, of another format, or with other fields.
    """
    path = folder / TOKENS_FILE
    try:
        data = path.read_bytes()
        manifest = parse_json(data)
    except OSError as error:
        raise DataError(
            f"{TOKENS_FILE}: cannot be read ({error.strerror}) in the given token folder"
        ) from error
    except ValueError as error:
        raise DataError(f"{TOKENS_FILE}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(
            f"{TOKENS_FILE}: expected format {FORMAT}; written by another version of this program"
        )
    if set(manifest) - {_OWNER_KEY} != _FIELDS or any(
        set(shard) != _SHARD_FIELDS for shard in manifest["shards"]
    ):
        raise DataError(
            f"{TOKENS_FILE}: unknown or missing fields: {sorted((set(manifest) - {_OWNER_KEY}) ^ _FIELDS)}"
        )
    if manifest["shard_leaves"] != SHARD_LEAVES:
        raise DataError(
            f"{TOKENS_FILE}: expected shards of {SHARD_LEAVES} leaves, got {manifest['shard_leaves']}"
        )
    return manifest, hashlib.sha256(data).hexdigest()


def pseudonym(owner_key: str | None, owner: str) -> str:
    """What run.json calls an owner.

    Args:
        owner_key: the folder's key, hex, or None.
        owner: id as the shards have it.

    Returns:
        64 hex digits that nobody without the key can tell the owner from; the id itself where there is no key.
    """
    return owner if owner_key is None else keyed(bytes.fromhex(owner_key), owner.encode()).hex()


def read_shard(folder: Path, entry: dict[str, Any], *, verify: bool) -> Shard:
    """Map one shard and check it against its entry in tokens.json.

    Args:
        folder: the token folder.
        entry: the shard's entry.
        verify: recompute the digest over all tokens.

    Returns:
        The shard's columns.

    Raises:
        DataError: missing, unreadable, or other content than the entry says.
    """
    name, first, count = entry["file"], entry["first"], entry["count"]
    try:
        # The mapping lives as long as an array views it.
        table = pa.ipc.open_file(pa.memory_map(str(folder / name))).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable token shard ({type(error).__name__})") from error
    shard = Shard.of(table, name)
    if len(shard.indices_N) != count or not np.array_equal(
        shard.indices_N, np.arange(first, first + count)
    ):
        raise DataError(f"{name}: expected rows {first}..{first + count - 1} in order")
    if verify and (got := shard.digest()) != entry["digest"]:
        raise DataError(
            f"{name}: tokens were changed: expected digest {entry['digest']}, got {got}"
        )
    return shard


def _runs_of_leaves(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records in lists of SHARD_LEAVES; the last may be short. One list is in memory at a time."""
    rows: list[Record] = []
    for record in records:
        rows.append(record)
        if len(rows) == SHARD_LEAVES:
            yield rows
            rows = []
    if rows:
        yield rows


def _table(rows: list[Record], first: int, vocab_size: int, end_of_text: int) -> pa.Table:
    """One shard as an Arrow table, every row checked."""
    lists = []
    for expected, (index, record_id, owner, tokens) in enumerate(rows, first):
        if index != expected:
            raise DataError(
                f"records: expected index {expected}, got {index}; give all leaves in order"
            )
        tokens_T = np.asarray(tokens, dtype=np.int64)
        if record_id is None and len(tokens_T):
            raise DataError(
                f"record {index}: a tombstone (no record_id) must have no tokens, got {len(tokens_T)}"
            )
        if record_id is not None:
            if len(record_id) != 32 or record_id == _NO_RECORD or not owner:
                raise DataError(f"record {index}: expected a record_id of 32 bytes and an owner")
            if not len(tokens_T) or tokens_T[-1] != end_of_text:
                raise DataError(
                    f"record {index}: expected tokens that end with end-of-text ({end_of_text})"
                )
        if len(tokens_T) and not (tokens_T.min() >= 0 and tokens_T.max() < vocab_size):
            raise DataError(f"record {index}: expected token ids in 0..{vocab_size - 1}")
        lists.append(tokens_T.astype(np.uint32))
    offsets = np.concatenate([[0], np.cumsum([len(tokens_T) for tokens_T in lists])])
    if offsets[-1] >= 2**31:
        raise DataError(
            f"shard at leaf {first}: expected fewer than 2**31 tokens, got {offsets[-1]}"
        )
    flat = np.concatenate(lists)
    return pa.table(
        [
            pa.array([index for index, *_ in rows], pa.uint64()),
            pa.array([record_id for _, record_id, _, _ in rows], pa.binary(32)),
            pa.array([owner for _, _, owner, _ in rows], pa.string()).dictionary_encode(),
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.uint32())),
        ],
        schema=SCHEMA,
    )


def _root_at(roots: Sequence[bytes | str] | None, number: int) -> str:
    if roots is None:
        return "none"
    if number >= len(roots):
        raise DataError(f"subtree_roots: expected one per shard, got {len(roots)}")
    root = roots[number]
    return root.hex() if isinstance(root, bytes) else root
