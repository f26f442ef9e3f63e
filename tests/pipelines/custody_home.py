"""A small home without the graph: a user's keys, one corpus version, a receipt for every owner, and an erasure of one record."""

import dataclasses
import json
from pathlib import Path

import polars as pl

from pipelines import requests
from pipelines.requests import Request
from pipelines.site import Site, open_site
from pipelines.steps.ledger import enter, key_of, now, open_ledger
from pipelines.storage import keys as key_file
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.records import SCHEMA
from pipelines.storage.salts import SaltStore
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.versions import Versions
from provenance import (
    CorpusState,
    MerkleTree,
    ReceiptOwner,
    ReceiptRecord,
    build_receipt,
    canonical_bytes,
    fingerprint,
    issue_receipts,
    keyed,
    record_id,
    sha256,
    verify_receipt,
)

PLANTED = "Call the tenant at 555-0134 after dusk."
TEXTS = {"ada": ["The loom weaves.", "Cloth is counted."], "bob": [PLANTED, "Rain again."]}
PASSPHRASE = "a long enough passphrase"
COLUMNS = ["record_id", "owner", "source", "fingerprint"]


def user_site(tmp_path: Path) -> Site:
    """A user's home with keys of its own, one corpus version, and a receipt for every owner."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    made = open_site(tmp_path / "home", inbox, "tiny", "1")
    keys = key_file.load_or_create(made.home.keys_path, demo=False)
    rows = [
        row(keys, owner, place, text)
        for owner, texts in TEXTS.items()
        for place, text in enumerate(texts)
    ]
    version = Versions(made.home, keys).publish(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    write_receipts(made, keys, version)
    return made


def row(keys: CorpusKeys, owner: str, place: int, text: str) -> tuple:
    content = fingerprint(keys.k_fp, canonical_bytes(text))
    identity = record_id(keys.k_id, owner, "book.txt", place, content)
    rights = ("CC0-1.0", True, False, False, None, False)
    return (
        identity,
        content,
        owner,
        "book.txt",
        place,
        text,
        *rights,
        keyed(keys.k_file, text.encode()),
    )


def write_receipts(site: Site, keys: CorpusKeys, version: str) -> None:
    versions, salts = Versions(site.home, keys), SaltStore(site.home.salts_path, keys)
    manifest, tree = versions.manifest(version), MerkleTree(versions.leaves(version))
    roots = (
        bytes.fromhex(manifest.record_root),
        manifest.size,
        bytes.fromhex(manifest.sparse_root),
    )
    state = CorpusState(version, *roots)
    entry = enter(site, "corpus", state.body())
    built = []
    for owner in TEXTS:
        rows = versions.read(version).filter(pl.col("owner") == owner).iter_rows(named=True)
        opened = [
            ReceiptRecord(
                one["record_id"], one["index"], salts.get(one["record_id"]), sha256(canonical_bytes(one["text"])),
                one["licence"], tree.inclusion_path(one["index"]),
            )
            for one in rows
        ]  # fmt: skip
        whose = ReceiptOwner(owner, keyed(keys.k_owner, owner.encode()), sha256(owner.encode()))
        built.append(build_receipt(whose, state, opened))
    folder = site.home.receipts / version
    folder.mkdir()
    for owner, made in zip(
        TEXTS, issue_receipts(open_ledger(site), built, [entry], now()), strict=True
    ):
        (folder / f"{owner}.receipt.json").write_bytes(made.receipt)
        (folder / f"{owner}.tlog-proof").write_text(made.tlog_proof)


def verified(home: Path) -> int:
    """Check every receipt of a home with the key its ledger names; their number."""
    found = sorted(home.glob("receipts/*/*.receipt.json"))
    for path in found:
        proof = path.with_name(path.name.replace(".receipt.json", ".tlog-proof")).read_text()
        verify_receipt(json.loads(path.read_bytes()), proof, key_of(home / "ledger", proof))
    return len(found)


def holding(folder: Path, text: str) -> list[str]:
    """Files in which a text stands: raw bytes, and decoded Parquet."""
    found = [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]
    for path in folder.rglob("*.parquet"):
        if text in pl.read_parquet(path)["text"].to_list():
            found.append(path.name)  # noqa: PERF401 - two kinds of search, one list
    return found


def erased(site: Site, state: str = "shredded") -> Request:
    """Bob's planted record is erased as the graph and its last step do it."""
    keys = key_file.load(site.home.keys_path)
    request = Request(
        kind="erase", owner="bob", record_ids=(row(keys, "bob", 0, PLANTED)[0].hex(),)
    )
    versions = Versions(site.home, keys)
    gone = [bytes.fromhex(request.record_ids[0])]
    head = versions.head()
    versions.move_head(versions.tombstone(head, gone), expected=head)
    if state == "shredded":
        SuppressionList(site.home.suppression_path, keys).add_erased(
            [row(keys, "bob", 0, PLANTED)[1]]
        )
        versions.purge(gone)
        SaltStore(site.home.salts_path, keys).shred(gone)
    requests.save(site.home, dataclasses.replace(request, state=state))
    enter(site, "erasure", {"request": request.id, "state": state})
    return request


def all_bytes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
