"""Receipts after an erasure: the records are absent from the new version, the request is answered, the audit says what.

One file per owner of a suspended record, under the id of the version in force. It proves membership of what is left,
absence of each erased fingerprint, the request's entry in the ledger, and the verdict's digest. A text that another owner
delivered too is still in the corpus, so for it there is no absence to prove.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.requests import load
from pipelines.steps.ledger import corpus_keys, enter, now, open_ledger
from pipelines.steps.provenance import corpus_state
from pipelines.steps.tables import records
from provenance import (
    MerkleTree,
    ReceiptOwner,
    ReceiptRecord,
    SparseTree,
    absence_proof,
    build_receipt,
    canonical_bytes,
    issue_receipts,
    keyed,
    write_atomic,
)

if TYPE_CHECKING:
    from pipelines.requests import Request
    from pipelines.results import Result
    from pipelines.site import Site


def erasure_receipts(
    site: "Site",
    corpus: "Result",
    erasure: "Result",
    audit: Mapping[str, Any],
    entries: Mapping[str, int],
) -> list[str]:
    """Write the receipts of one batch of requests.

    Args:
        site: The open home.
        corpus: The version that held the records.
        erasure: The batch.
        audit: `audit` (digest) and `verdict` of its audit, as entered in the ledger.
        entries: Ledger entry of each request's present state, by request, and of the audit under `audit`.

    Returns:
        The files, relative to the home.
    """
    from pipelines.storage.salts import SaltStore
    from pipelines.storage.versions import Versions

    keys, version = corpus_keys(site), erasure["head"]
    versions, salts = Versions(site.home, keys), SaltStore(site.home.salts_path, keys)
    tree = MerkleTree(versions.leaves(version))
    left = records(site, version, "record_id", "owner", "licence", "text", "fingerprint")
    live = SparseTree(left["fingerprint"].to_list())
    still = set(left["fingerprint"].to_list())
    listed = (site.home.path / erasure["excluded"]).read_text().split()
    before = records(site, corpus["version"], "record_id", "owner", "fingerprint")
    gone = before.filter(before["record_id"].is_in([bytes.fromhex(line) for line in listed]))
    requests = [request for request in load(site.home) if request.id in entries]
    built, owners = [], sorted(set(gone["owner"]))
    for owner in owners:
        mine = left.filter(left["owner"] == owner)
        opened = [
            ReceiptRecord(
                record_id=row["record_id"], index=row["index"], salt=salts.get(row["record_id"]),
                text_digest=sha256(canonical_bytes(row["text"])).digest(), licence=row["licence"],
                path=tree.inclusion_path(row["index"]),
            )
            for row in mine.iter_rows(named=True)
        ]  # fmt: skip
        erased = gone.filter(gone["owner"] == owner)["fingerprint"].to_list()
        salt = keyed(keys.sealing_key("receipts"), f"{version}|{owner}|erasure".encode())
        built.append(
            build_receipt(
                ReceiptOwner(owner, keyed(keys.k_owner, owner.encode()), salt),
                corpus_state(site, version),
                opened,
                absences=[absence_proof(live, mark) for mark in erased if mark not in still],
                erasures=_answers(requests, owner, audit),
            )
        )
    corpus_entry = enter(site, "corpus", corpus_state(site, version).body())
    with site.home.lock("ledger-enter"):
        ledger = open_ledger(site)
        issued = issue_receipts(ledger, built, [corpus_entry, *entries.values()], now())
    folder = site.home.receipts / version
    folder.mkdir(exist_ok=True, mode=0o700)
    for owner, made in zip(owners, issued, strict=True):
        write_atomic(folder / f"{owner}.receipt.json", made.receipt, 0o600)
        write_atomic(folder / f"{owner}.tlog-proof", made.tlog_proof.encode())
    kinds = ("receipt.json", "tlog-proof")
    return [f"receipts/{version}/{owner}.{kind}" for owner in owners for kind in kinds]


def _answers(
    requests: "Sequence[Request]", owner: str, audit: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the receipt says about each request that names the owner."""
    return [
        {"identity": request.identity(), "state": request.state, "audit": audit["audit"], "verdict": audit["verdict"]}
        for request in requests
        if request.owner in ("", owner)
    ]  # fmt: skip
