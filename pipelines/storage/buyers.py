"""Targets of further buyers: files of held-out records, each a token folder of its own.

    HOME/target/buyers/NAME.json    which records, by digest; their contents, by fingerprint
    HOME/target/buyers/NAME/        their tokens

The home's own target is split and frozen, because claims are made on it. A buyer's target measures what its owners are worth to that
buyer and nothing else: all of it measures, and when its file changes it is written anew, which gives new values and
corrections of what was paid. No content of it may be in the corpus, as for any target.
"""

import shutil
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from pipelines.storage.errors import TargetError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.target import FORMAT, read_fields, write_target_tokens
from pipelines.storage.tokens import Tokenizer
from provenance.canonical import jcs, keyed, write_atomic

FEWEST: Final = 2
"""Records of a target: an interval over one record has no width."""


@dataclass(frozen=True, slots=True)
class BuyerTarget:
    """One buyer's held-out records."""

    digest: str
    """Hex of HMAC-SHA256(K_file, sorted record ids)."""
    tokenizer_digest: str
    tokens_digest: str
    """Hex digest of the folder's tokens.json."""
    num_records: int
    fingerprints: frozenset[bytes]


def write_buyer_target(
    home: Home,
    keys: CorpusKeys,
    name: str,
    held_out: pl.DataFrame,
    tokenizer: Tokenizer,
    corpus_fingerprints: Iterable[bytes],
) -> BuyerTarget:
    """Write a buyer's target, unless it is there; contents that were erased are left out.

    Args:
        home: a created home.
        keys: its keys.
        name: the buyer.
        held_out: records of the buyer's file, columns of ``records.SCHEMA``.
        tokenizer: the frozen tokenizer.
        corpus_fingerprints: contents of the corpus version that will be trained on.

    Returns:
        The target; its tokens lie in HOME/target/buyers/NAME.

    Raises:
        TargetError: fewer than two contents, or a content is in the corpus too.
        OSError: the disk refused; the next call begins anew.
    """
    erased = SuppressionList(home.suppression_path, keys)
    records = held_out.unique("fingerprint", keep="first", maintain_order=True)
    kept = [erased.reason("target", content) is None for content in records["fingerprint"]]
    records = records.filter(pl.Series(kept, dtype=pl.Boolean)).sort("fingerprint")
    if len(records) < FEWEST:
        raise TargetError(f"the target of buyer {name!r} has {len(records)} different contents, at least {FEWEST} are needed")  # fmt: skip
    contents = frozenset(records["fingerprint"].to_list())
    inside = len(contents & set(corpus_fingerprints))
    if inside:
        raise TargetError(
            f"{inside} contents of the target of buyer {name!r} are in the corpus too: what is trained on cannot measure. "
            "Take them out of the buyer's file, or out of the deliveries"
        )
    digest = keyed(keys.k_file, b"".join(sorted(records["record_id"].to_list()))).hex()
    with home.lock("target"):
        found = load_buyer_target(home, name)
        if found and (found.digest, found.tokenizer_digest) == (digest, tokenizer.digest):
            return found
        folder = home.target / "buyers" / name
        _remove(home, name)  # the note first: a folder without one is begun anew
        folder.parent.mkdir(exist_ok=True)
        tokens = write_target_tokens(folder, records, keys, tokenizer)
        made = BuyerTarget(digest, tokenizer.digest, tokens, len(records), contents)
        write_atomic(folder.with_name(f"{name}.json"), jcs(_document(made)))
    return made


def load_buyer_target(home: Home, name: str) -> BuyerTarget | None:
    """A buyer's target as it was written, or None.

    Args:
        home: a created home.
        name: the buyer.

    Returns:
        The target; None before its first writing and after an erasure.

    Raises:
        TargetError: its file is damaged.
    """
    path = home.target / "buyers" / f"{name}.json"
    fields = read_fields(path, BuyerTarget.__slots__)
    return None if fields is None else BuyerTarget(**fields)


def erase_from_buyers(
    home: Home, record_ids: AbstractSet[bytes], contents: AbstractSet[bytes]
) -> int:
    """Remove the targets that hold one of the records; the next run writes them anew without it.

    Args:
        home: a created home.
        record_ids: 32 bytes each.
        contents: their fingerprints, which stand on the suppression list by then.

    Returns:
        Targets removed.
    """
    from trainer.data import TokenStore

    removed = 0
    with home.lock("target"):
        for folder in (home.target / "buyers").glob("*/"):
            if not folder.with_name(f"{folder.name}.json").exists():  # of a writer that was killed
                shutil.rmtree(folder)
                removed += 1
        for path in sorted((home.target / "buyers").glob("*.json")):
            name = path.name.removesuffix(".json")
            found = load_buyer_target(home, name)
            assert found is not None, "its file was listed"
            store = TokenStore.open(path.with_name(name), found.tokens_digest)
            held = {store.record_id(index) for index in range(store.size)}
            if found.fingerprints & contents or held & record_ids:
                _remove(home, name)
                removed += 1
    return removed


def _remove(home: Home, name: str) -> None:
    (home.target / "buyers" / f"{name}.json").unlink(missing_ok=True)
    shutil.rmtree(home.target / "buyers" / name, ignore_errors=True)


def _document(target: BuyerTarget) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "digest": target.digest,
        "tokenizer_digest": target.tokenizer_digest,
        "tokens_digest": target.tokens_digest,
        "num_records": target.num_records,
        "fingerprints": sorted(content.hex() for content in target.fingerprints),
    }
