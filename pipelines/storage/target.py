"""The target: held-out records, split once into what measures, what tests and what confirms.

=================  ======  ===============================================================
part               share   for
=================  ======  ===============================================================
target_value       1/2     utilities: the loss that values and prices are measured on
target_test        1/4     evaluation, removal curves, claims
target_confirm     1/4     sealed; opened once per evaluation plan
=================  ======  ===============================================================

Contents are ordered by a keyed digest, so nobody can aim a record at a part, and equal contents never
stand in two parts. The split is made once and frozen: a target that grows would make yesterday's values
incomparable with today's. Later held-out records stay out of training and are counted as unused.

No content of the target may be in the corpus; that is checked by fingerprint, each time.

When it is wrong: paragraphs of one document fall into all three parts, so the parts are not independent
samples of documents; and a near-copy in the corpus has another fingerprint.
"""

import io
import os
import shutil
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipelines.storage.errors import TargetError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.records import SCHEMA
from pipelines.storage.tokens import Tokenizer
from provenance.canonical import (
    canonical_bytes,
    fingerprint,
    jcs,
    keyed,
    parse_json,
    write_atomic,
)
from provenance.errors import SealError
from provenance.hashing import leaf_hash, sha256
from provenance.merkle import MerkleTree
from provenance.sealing import seal, unseal

FORMAT: Final = 1
VALUE: Final = "target_value"
TEST: Final = "target_test"
CONFIRM: Final = "target_confirm"

_FILE: Final = "target.json"
_SEALED: Final = "target_confirm.sealed"
_ROWS: Final = "rows.parquet"
_HELD: Final = ("record_id", "owner", "source", "fingerprint", "text")
_SHARD_LEAVES: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen split."""

    digest: str
    """Hex of HMAC-SHA256(K_file, sorted record ids): the name of this target."""
    tokenizer_digest: str
    num_records: dict[str, int]
    """Records per part."""
    token_digests: dict[str, str]
    """Hex digest of tokens.json of target_value and target_test."""
    fingerprints: frozenset[bytes]
    """Contents of all parts."""


def split_target(
    home: Home,
    keys: CorpusKeys,
    held_out: pl.DataFrame,
    tokenizer: Tokenizer,
    corpus_fingerprints: Iterable[bytes],
) -> Target:
    """Split the target at the first call; give the same split ever after.

    Args:
        home: a created home.
        keys: its keys.
        held_out: records of the target, columns of ``records.SCHEMA``.
        tokenizer: the frozen tokenizer.
        corpus_fingerprints: contents of the corpus version that will be trained on.

    Returns:
        The split. Token folders are HOME/target/target_value and HOME/target/target_test.

    Raises:
        TargetError: fewer than four contents, a content is in the corpus too, or the split was made
            with another tokenizer.
        OSError: the disk refused; the next call begins anew.
    """
    with home.lock("target"):
        target = _load(home) or _split(home, keys, held_out, tokenizer)
    if target.tokenizer_digest != tokenizer.digest:
        raise TargetError(
            "the target was tokenized with another tokenizer: the home's one is frozen"
        )
    common = len(target.fingerprints & set(corpus_fingerprints))
    if common:
        raise TargetError(
            f"{common} contents of the target are in the corpus too: what is trained on cannot measure. "
            "Set [target] since later, or take these records out of the deliveries"
        )
    return target


def load_target(home: Home) -> Target:
    """The split that was made.

    Args:
        home: a created home.

    Returns:
        The split.

    Raises:
        TargetError: there is none yet, or its file is damaged.
    """
    target = _load(home)
    if target is None:
        raise TargetError("the target was not split yet: publish a corpus first")
    return target


def open_confirm(
    home: Home, keys: CorpusKeys, plan_digest: str, *, unfinished: bool = False
) -> pl.DataFrame:
    """Open the sealed part for one evaluation plan; a second opening is refused.

    The caller writes the ledger entry; the mark that is left here only refuses.

    Args:
        home: a created home.
        keys: its keys.
        plan_digest: hex SHA-256 of the committed evaluation plan.
        unfinished: the caller was here before and died before it had a number; the same look may go on.

    Returns:
        The records of target_confirm.

    Raises:
        TargetError: opened for this plan already, no such part, or it was changed.
    """
    if len(plan_digest) != 64 or not set(plan_digest) <= set("0123456789abcdef"):
        raise TargetError("plan_digest: expected 64 lower-case hexadecimal digits")
    try:
        plain = unseal(
            keys.sealing_key(CONFIRM), (home.target / _SEALED).read_bytes(), CONFIRM.encode()
        )
    except FileNotFoundError:
        raise TargetError("the target was not split yet: publish a corpus first") from None
    except SealError as error:
        raise TargetError(f"{_SEALED}: {error}") from None
    openings = home.target / "openings"
    openings.mkdir(exist_ok=True)
    try:
        # O_EXCL: of two commands at once, one opens and one is refused.
        os.close(os.open(openings / plan_digest, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        if unfinished:
            return pl.read_parquet(io.BytesIO(plain))
        raise TargetError(
            f"target_confirm was opened for plan {plan_digest[:12]} already: a confirmation is looked at "
            "once; commit a new plan with a reason"
        ) from None
    return pl.read_parquet(io.BytesIO(plain))


def held_out(home: Home, keys: CorpusKeys, tokenizer: Tokenizer) -> pl.DataFrame:
    """The held-out records, for requests that name them; no measurement reads this.

    Args:
        home: a created home.
        keys: its keys.
        tokenizer: the frozen tokenizer, which gives back the text of the measuring parts.

    Returns:
        record_id, owner, source ("" where the home was made before sources were kept), fingerprint, text; no rows before
        the target was split.
    """
    empty = pl.DataFrame(schema={name: SCHEMA[name] for name in _HELD})
    if _load(home) is None:
        return empty
    path = home.target / _ROWS
    sources = dict(pl.read_parquet(path).iter_rows()) if path.exists() else {}
    rows = [
        (
            record,
            owner,
            sources.get(record, ""),
            fingerprint(keys.k_fp, canonical_bytes(text)),
            text,
        )
        for name in (VALUE, TEST)
        for record, owner, tokens in _rows_of(home.target / name)
        for text in [tokenizer.decode(tokens)]
    ]
    return pl.concat(
        [pl.DataFrame(rows, schema=empty.schema, orient="row"), _confirm(home, keys).select(_HELD)]
    )


def erase_held_out(
    home: Home, keys: CorpusKeys, record_ids: AbstractSet[bytes], contents: AbstractSet[bytes]
) -> int:
    """Take records out of every part of the target; what is left is a target with another name.

    Args:
        home: a created home.
        keys: its keys.
        record_ids: 32 bytes each; unknown ones are ignored, so an erasure can be repeated.
        contents: their fingerprints.

    Returns:
        Records removed. If a part would be empty the whole target goes, and the next run splits what is held out by then.

    Raises:
        OSError: the disk refused; run it again.
    """
    with home.lock("target"):
        target = _load(home)
        if target is None:
            return 0
        removed, ids, counts, digests = 0, [], {}, {}
        for name in (VALUE, TEST):
            folder = home.target / name
            rows = _rows_of(folder)
            kept = [row for row in rows if row[0] not in record_ids]
            if not kept:
                shutil.rmtree(home.target)
                home.target.mkdir()
                return removed + len(rows)
            if len(kept) < len(rows):
                removed += len(rows) - len(kept)
                _rewrite(folder, kept, keys)
            ids += [record for record, *_ in kept]
            counts[name] = len(kept)
            digests[name] = sha256((folder / "tokens.json").read_bytes()).hex()
        confirm = _confirm(home, keys)
        kept_confirm = confirm.filter(~confirm["record_id"].is_in(list(record_ids)))
        if len(kept_confirm) < len(confirm):
            removed += len(confirm) - len(kept_confirm)
            _seal_confirm(home, keys, kept_confirm)
        counts[CONFIRM] = len(kept_confirm)
        ids += kept_confirm["record_id"].to_list()
        path = home.target / _ROWS
        if path.exists():
            sources = pl.read_parquet(path)
            _write_rows(home, sources.filter(~sources["record_id"].is_in(list(record_ids))))
        left = Target(
            keyed(keys.k_file, b"".join(sorted(ids))).hex(), target.tokenizer_digest, counts, digests,
            target.fingerprints - contents,
        )  # fmt: skip
        if left != target:  # also after a crash between the parts and this file
            write_atomic(home.target / _FILE, jcs(_document(left)))
        return removed


def _rows_of(folder: Path) -> list[tuple[bytes, str, list[int]]]:
    """record_id, owner and tokens of a part."""
    from trainer.data import TokenStore

    store = TokenStore.open(folder)
    return [
        (store.record_id(index), store.owner_of(index) or "", store.tokens(index).tolist())
        for index in range(store.size)
    ]


def _rewrite(folder: Path, rows: list[tuple[bytes, str, list[int]]], keys: CorpusKeys) -> None:
    from trainer.data import TokenStore

    before = TokenStore.open(folder)
    fresh = folder.with_name(f"{folder.name}.next")
    shutil.rmtree(fresh, ignore_errors=True)
    _write_part(fresh, rows, keys, (before.tokenizer_digest, before.vocab_size, before.end_of_text))
    shutil.rmtree(folder)
    fresh.replace(folder)


def _confirm(home: Home, keys: CorpusKeys) -> pl.DataFrame:
    plain = unseal(
        keys.sealing_key(CONFIRM), (home.target / _SEALED).read_bytes(), CONFIRM.encode()
    )
    return pl.read_parquet(io.BytesIO(plain))


def _seal_confirm(home: Home, keys: CorpusKeys, records: pl.DataFrame) -> None:
    plain = io.BytesIO()
    records.write_parquet(plain, statistics=False)
    blob = seal(keys.sealing_key(CONFIRM), plain.getvalue(), CONFIRM.encode())
    write_atomic(home.target / _SEALED, blob, mode=0o600)


def _write_rows(home: Home, rows: pl.DataFrame) -> None:
    data = io.BytesIO()
    rows.write_parquet(data, statistics=False)
    write_atomic(home.target / _ROWS, data.getvalue(), mode=0o600)


def _split(home: Home, keys: CorpusKeys, held_out: pl.DataFrame, tokenizer: Tokenizer) -> Target:
    if held_out.schema != SCHEMA:
        raise TargetError("held_out: expected the columns of a record")
    order_key = keys.sealing_key("target_split")
    records = held_out.unique("fingerprint", keep="first", maintain_order=True)
    contents = records["fingerprint"].to_list()
    order = sorted(range(len(contents)), key=lambda row: keyed(order_key, contents[row]))
    if len(order) < 4:
        raise TargetError(
            f"the target has {len(order)} different contents, at least 4 are needed: set [target] since "
            "to an earlier day, or deliver more records"
        )
    half, most = len(order) // 2, len(order) * 3 // 4
    parts = {
        VALUE: records[order[:half]],
        TEST: records[order[half:most]],
        CONFIRM: records[order[most:]],
    }
    _seal_confirm(home, keys, parts[CONFIRM])
    _write_rows(home, records.select("record_id", "source"))
    ids = sorted(records["record_id"].to_list())
    target = Target(
        digest=keyed(keys.k_file, b"".join(ids)).hex(),
        tokenizer_digest=tokenizer.digest,
        num_records={name: part.height for name, part in parts.items()},
        token_digests={
            name: write_target_tokens(home.target / name, parts[name], keys, tokenizer)
            for name in (VALUE, TEST)
        },
        fingerprints=frozenset(contents),
    )
    write_atomic(home.target / _FILE, jcs(_document(target)))
    return target


def write_target_tokens(
    folder: Path, records: pl.DataFrame, keys: CorpusKeys, tokenizer: Tokenizer
) -> str:
    """Write held-out records as a token folder.

    Args:
        folder: where.
        records: columns of ``records.SCHEMA``.
        keys: the corpus keys.
        tokenizer: the frozen tokenizer.

    Returns:
        Hex digest of its tokens.json.
    """
    tokens = tokenizer.encode(records["text"].to_list())
    rows = [
        (record, owner, [*text, tokenizer.end_of_text])
        for record, owner, text in zip(records["record_id"], records["owner"], tokens, strict=True)
    ]
    return _write_part(
        folder, rows, keys, (tokenizer.digest, tokenizer.vocab_size, tokenizer.end_of_text)
    )


def _write_part(
    folder: Path,
    rows: list[tuple[bytes, str, list[int]]],
    keys: CorpusKeys,
    tokenizer: tuple[str, int, int],
) -> str:
    from trainer.data import write_tokens

    ids = [record for record, *_ in rows]
    # A target has no commitments; its tree stands over the record ids.
    tree = MerkleTree(leaf_hash(record) for record in ids)
    return write_tokens(
        folder,
        corpus_version=keyed(keys.k_file, b"".join(ids)).hex(),
        tokenizer_digest=tokenizer[0],
        vocab_size=tokenizer[1],
        end_of_text=tokenizer[2],
        records=((index, *row) for index, row in enumerate(rows)),
        subtree_roots=[
            tree.subtree_root(first, min(_SHARD_LEAVES, tree.size - first))
            for first in range(0, tree.size, _SHARD_LEAVES)
        ],
    )


def _document(target: Target) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "digest": target.digest,
        "tokenizer_digest": target.tokenizer_digest,
        "num_records": target.num_records,
        "token_digests": target.token_digests,
        "fingerprints": sorted(content.hex() for content in target.fingerprints),
    }


def _load(home: Home) -> Target | None:
    fields = read_fields(home.target / _FILE, Target.__slots__)
    return None if fields is None else Target(**fields)


def read_fields(path: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """What a file says of a target, its fingerprints as a set of bytes; None where there is no file.

    Args:
        path: the file.
        names: fields that it must have, no others.

    Raises:
        TargetError: it is damaged, or of another format.
    """
    try:
        document = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TargetError(f"{path.name}: {error}") from None
    if (
        not isinstance(document, dict)
        or document.pop("format", None) != FORMAT
        or document.keys() != set(names)
    ):
        raise TargetError(f"{path.name}: unknown format or fields; use a newer dataworth")
    contents = frozenset(bytes.fromhex(content) for content in document["fingerprints"])
    return {**document, "fingerprints": contents}
