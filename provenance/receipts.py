"""Receipts: what one owner needs to check, offline and without us, what happened to the records.

Two files. ``OWNER.receipt.json`` (JCS) is the owner's secret, because it opens the salts: records
with their paths to the record root, values, price with its path to the total, training windows,
absences. ``OWNER.tlog-proof`` (C2SP tlog-proof) is public: it shows that the signed log holds an
entry with nothing but a salted digest of the first::

    entry  = JCS {format, kind: "receipt", time, body: {receipt_sha256}}
    digest = SHA256(tag || salt32 || SHA256(JCS(receipt without "entries")))

``entries`` are the log entries the receipt leans on (the corpus version, the payouts, the windows),
each with its own path to the same checkpoint. They are written *after* the receipt's entry, so its
digest cannot cover them, and need not: each is proven by itself.

What the verifier reads in the log, by kind of entry:

=========  =======================================================================================
corpus     ``corpus_version, record_root, size, sparse_root`` (:meth:`CorpusState.body`)
tokens     ``shard_leaves``: records in a token shard
values     ``table, sum_root, sum_size, sum_total`` (:func:`values_body`); where they are stated, ``proxy``
           and ``transfer``, in words: what the values were measured on, and how that compares with a
           larger model, or ``not measured``
prices     ``corpus_version, sum_root, sum_size, sum_total`` (:func:`prices_body`); with values
           ``values`` (the table they were made from), ``payable``, ``value_total``
run        ``run, versions``
windows    ``windows``: a list of objects with ``run, first_step, last_step, shards, state_digest``
erasure    ``request, state``
audit      ``audit, verdict``
receipt    ``receipt_sha256``
=========  =======================================================================================

Source: C2SP tlog-proof.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from provenance.canonical import CANONICALISATION, jcs
from provenance.errors import FormatError
from provenance.hashing import HASH_SIZE, sha256
from provenance.signing import decode_base64
from provenance.verify_standalone import verify_receipt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from provenance.ledger import Ledger
    from provenance.sparse import SparseTree
    from provenance.sumtree import SumTree

TAG_RECEIPT: Final = b"dataworth/receipt/v1\n"
PROOF_HEADER: Final = "c2sp.org/tlog-proof@v1"

_ERASURE_FIELDS: Final = {"identity", "state", "audit", "verdict"}
_WINDOW_FIELDS: Final = {"run", "first_step", "last_step", "shards"}


@dataclass(frozen=True, slots=True)
class ReceiptOwner:
    """Whose receipt it is."""

    owner: str
    """Owner id."""
    pseudonym: bytes
    """32 bytes, HMAC(K_owner, owner), as in the leaf data and in the sum tree."""
    salt: bytes
    """32 random bytes, for this receipt only: without them its digest says nothing."""


@dataclass(frozen=True, slots=True)
class CorpusState:
    """The corpus version a receipt is about."""

    corpus_version: str
    """ID of the version."""
    record_root: bytes
    """32 bytes, root of the record tree."""
    size: int
    """Number of leaves, tombstones included."""
    sparse_root: bytes
    """32 bytes, root of the sparse tree over the live fingerprints."""

    def body(self) -> dict[str, Any]:
        """The body of the ledger entry of kind ``corpus`` that names this version.

        Returns:
            The four fields that the verifier compares; more may be added beside them.
        """
        return {
            "corpus_version": self.corpus_version,
            "record_root": self.record_root.hex(),
            "size": self.size,
            "sparse_root": self.sparse_root.hex(),
        }


@dataclass(frozen=True, slots=True)
class ReceiptRecord:
    """One live record of the owner, opened for its owner."""

    record_id: bytes
    """32 bytes."""
    index: int
    """Index in the record tree."""
    salt: bytes
    """32 bytes, the salt of the commitment."""
    text_digest: bytes
    """32 bytes, SHA-256 of the canonical bytes."""
    licence: str
    """SPDX expression, as in the leaf data."""
    path: Sequence[bytes]
    """Inclusion path to the record root."""
    canonicalisation: int = CANONICALISATION
    """Profile of the canonical bytes."""


@dataclass(frozen=True, slots=True)
class TlogProof:
    """The content of a C2SP tlog-proof."""

    index: int
    """Index of the entry in the log."""
    path: tuple[bytes, ...]
    """Inclusion path to the root of the checkpoint."""
    checkpoint: str
    """Signed note."""
    extra: bytes
    """Here the JCS line of the entry; unauthenticated until its leaf hash has been checked."""


@dataclass(frozen=True, slots=True)
class IssuedReceipt:
    """The two files of one owner."""

    index: int
    """Index of the receipt's entry in the ledger."""
    receipt: bytes
    """Content of ``OWNER.receipt.json``: secret, write it with mode 0600."""
    tlog_proof: str
    """Content of ``OWNER.tlog-proof``."""


def build_receipt(  # noqa: PLR0913 - one argument per part of a receipt
    owner: ReceiptOwner,
    corpus: CorpusState,
    records: Iterable[ReceiptRecord],
    *,
    values: Sequence[Mapping[str, Any]] = (),
    erasures: Sequence[Mapping[str, Any]] = (),
    price: Mapping[str, Any] | None = None,
    sum_path: Mapping[str, Any] | None = None,
    windows: Sequence[Mapping[str, Any]] = (),
    absences: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The receipt of one owner, still without its log entries (:func:`issue_receipts` adds them).

    Args:
        owner: whose receipt.
        corpus: which version; a ledger entry of kind ``corpus`` must name it.
        records: the owner's live records; none after an erasure of all.
        values: from :func:`value_proof`, of the owner and of its group.
        erasures: objects with ``identity, state, audit, verdict``, one per request of this owner.
        price: at least ``price_microunits`` and ``currency``; None when there is no pool.
        sum_path: from :func:`sum_path_of`; needed with a price.
        windows: objects with ``run, first_step, last_step, shards``.
        absences: from :func:`absence_proof`.

    Returns:
        The fields listed in the README of this package; ``entries`` is empty.

    Raises:
        FormatError: a length is wrong, a field is missing, or a value is not in canonical form.
    """
    for name, value in (("pseudonym", owner.pseudonym), ("salt", owner.salt)):
        _check_hash(name, value)
    if (price is None) != (sum_path is None):
        raise FormatError("a price and its sum_path come together: give both or neither")
    if price is not None and not {"price_microunits", "currency"} <= set(price):
        raise FormatError("a price has at least price_microunits and currency")
    for erasure in erasures:
        if set(erasure) != _ERASURE_FIELDS:
            raise FormatError(f"an erasure has {sorted(_ERASURE_FIELDS)}, got {sorted(erasure)}")
    for window in windows:
        if set(window) != _WINDOW_FIELDS:
            raise FormatError(f"a window has {sorted(_WINDOW_FIELDS)}, got {sorted(window)}")
    receipt = {
        "format": 1,
        "owner": owner.owner,
        "owner_pseudonym": owner.pseudonym.hex(),
        "salt": owner.salt.hex(),
        **corpus.body(),
        "records": [_record_row(record) for record in records],
        "values": [dict(row) for row in values],
        "erasures": [dict(row) for row in erasures],
        "price": dict(price or {}),
        "sum_path": dict(sum_path or {}),
        "windows": [dict(window) for window in windows],
        "absences": [dict(absence) for absence in absences],
        "entries": [],
    }
    jcs(receipt)  # refuses floats and nulls here, where the caller still knows where they come from
    return receipt


def receipt_digest(receipt: Mapping[str, Any]) -> bytes:
    """The salted digest of a receipt that its ledger entry holds.

    Args:
        receipt: from :func:`build_receipt`.

    Returns:
        32 bytes, ``SHA256(tag || salt || SHA256(JCS(receipt without "entries")))``.

    Raises:
        FormatError: the receipt is not in canonical form.
    """
    rest = {name: value for name, value in receipt.items() if name != "entries"}
    return sha256(TAG_RECEIPT + bytes.fromhex(receipt["salt"]) + sha256(jcs(rest)))


def issue_receipts(
    ledger: Ledger, receipts: Sequence[Mapping[str, Any]], entries: Sequence[int], time: str
) -> list[IssuedReceipt]:
    """Record receipts in the ledger, all under one signature, and make their files.

    Every receipt is checked by the stand-alone verifier before it is handed out.

    Args:
        ledger: opened with its signing key.
        receipts: from :func:`build_receipt`, all about the same corpus version.
        entries: ledger indices the receipts lean on: one of kind ``corpus`` that names the version,
            one of kind ``prices`` if there are prices, those of kind ``windows``.
        time: ISO 8601 in UTC.

    Returns:
        The files, in the order of ``receipts``.

    Raises:
        FormatError: the time is not in the allowed form.
        LedgerError: the ledger is read-only, damaged or locked.
        VerifyError: a receipt does not hold, for instance because no entry names its version. Its
            digest then stands in the log, which does no harm: nobody holds a file for it.
    """
    rows = [("receipt", {"receipt_sha256": receipt_digest(receipt).hex()}) for receipt in receipts]
    indices = ledger.append_many(rows, time)
    attached = [ledger_entry_proof(ledger, index) for index in entries]
    checkpoint = ledger.checkpoint
    issued = []
    for receipt, index in zip(receipts, indices, strict=True):
        whole = {**receipt, "entries": attached}
        line = ledger.entry_bytes(index)
        proof = tlog_proof(index, ledger.inclusion_path(index), checkpoint, line)
        verify_receipt(whole, proof, ledger.vkey)
        issued.append(IssuedReceipt(index, jcs(whole), proof))
    return issued


def ledger_entry_proof(ledger: Ledger, index: int) -> dict[str, Any]:
    """An entry with its path to the ledger's current checkpoint, as it stands in a receipt.

    Args:
        ledger: the ledger.
        index: 0 <= index < ledger.size.

    Returns:
        ``{index, entry, path}``, plus ``body`` where the body stands in a file of its own.

    Raises:
        LedgerError: no such entry, or it was changed on disk.
    """
    path = [digest.hex() for digest in ledger.inclusion_path(index)]
    row: dict[str, Any] = {"index": index, "path": path}
    row["entry"] = ledger.entry_bytes(index).decode("utf-8")
    entry = ledger.entry(index)
    if "body_sha256" in entry:
        row["body"] = jcs(entry["body"]).decode("utf-8")
    return row


def absence_proof(tree: SparseTree, fingerprint: bytes) -> dict[str, Any]:
    """The proof that a fingerprint is not in the corpus, as it stands in a receipt.

    Args:
        tree: the sparse tree of the corpus version.
        fingerprint: 32 bytes, not in the tree.

    Returns:
        ``{fingerprint, terminal, siblings}`` in hex; ``terminal`` is empty for an empty place.

    Raises:
        FormatError: the fingerprint is in the tree, or has the wrong length.
    """
    proof = tree.prove(fingerprint)
    if proof.terminal == fingerprint:
        raise FormatError(f"fingerprint {fingerprint.hex()} is in the corpus: there is no absence")
    return {
        "fingerprint": fingerprint.hex(),
        "terminal": (proof.terminal or b"").hex(),
        "siblings": [digest.hex() for digest in proof.siblings],
    }


def sum_path_of(tree: SumTree, index: int) -> dict[str, Any]:
    """The proof that a price is part of the total, as it stands in a receipt.

    Args:
        tree: the sum tree of all payouts; its labels are the owner pseudonyms.
        index: 0 <= index < tree.size.

    Returns:
        ``{index, path}``; each step is hex of the sibling's sum (8 bytes) and hash (32 bytes).

    Raises:
        ProofShapeError: the index is out of range.
    """
    path = [(total.to_bytes(8, "big") + digest).hex() for digest, total in tree.path(index)]
    return {"index": index, "path": path}


def value_leaf(row: Mapping[str, Any], pseudonym: bytes) -> tuple[bytes, int]:
    """A value as a leaf of the sum tree of values: the tree adds up what owners are worth.

    Groups stand in the same tree with amount 0, so that their standard errors are committed as well.

    Args:
        row: ``subject_kind (owner|group), subject_id, method, target, unit, value_nano, n`` and,
            where there is one, ``se_nano``; integers and strings.
        pseudonym: 32 bytes, the owner's; not used for a group.

    Returns:
        Label and amount; a negative value counts as 0, as in the rule for prices.
    """
    owner = row["subject_kind"] == "owner"
    label = (pseudonym if owner else bytes(HASH_SIZE)) + sha256(jcs(dict(row)))
    return label, max(0, row["value_nano"]) if owner else 0


def value_proof(row: Mapping[str, Any], tree: SumTree, index: int) -> dict[str, Any]:
    """A value with its path to the committed total, as it stands in a receipt.

    Args:
        row: the row of :func:`value_leaf`.
        tree: the sum tree of all values.
        index: place of the row in it.

    Returns:
        ``{row, index, path}``.

    Raises:
        ProofShapeError: the index is out of range.
    """
    return {"row": dict(row), **sum_path_of(tree, index)}


def values_body(tree: SumTree) -> dict[str, Any]:
    """What a ledger entry of kind ``values`` holds so that single values can be proven.

    Args:
        tree: the sum tree over :func:`value_leaf` of every row.

    Returns:
        ``sum_root, sum_size, sum_total``; the digest of the ``table`` stands beside them.
    """
    digest, total = tree.root
    return {"sum_root": digest.hex(), "sum_size": tree.size, "sum_total": total}


def prices_body(corpus_version: str, tree: SumTree) -> dict[str, Any]:
    """The body of the ledger entry of kind ``prices`` that commits to all payouts.

    Args:
        corpus_version: ID of the version the prices are for.
        tree: the sum tree of all payouts.

    Returns:
        The four fields that the verifier compares; more may be added beside them.
    """
    digest, total = tree.root
    return {
        "corpus_version": corpus_version,
        "sum_root": digest.hex(),
        "sum_size": tree.size,
        "sum_total": total,
    }


def tlog_proof(index: int, path: Sequence[bytes], checkpoint: bytes, extra: bytes = b"") -> str:
    """A C2SP tlog-proof.

    Args:
        index: index of the entry in the log.
        path: its inclusion path, leaf first.
        checkpoint: the signed note with the root.
        extra: opaque data; empty leaves the line out.

    Returns:
        The text of a ``.tlog-proof`` file.

    Raises:
        FormatError: the index is negative or a hash is not 32 bytes long.

    Source: C2SP tlog-proof.
    """
    if index < 0:
        raise FormatError(f"index must not be negative, got {index}")
    for digest in path:
        _check_hash("path entry", digest)
    lines = [PROOF_HEADER]
    if extra:
        lines.append(f"extra {_encode(extra)}")
    lines.append(f"index {index}")
    lines += [_encode(digest) for digest in path]
    return "\n".join(lines) + "\n\n" + checkpoint.decode("utf-8")


def parse_tlog_proof(text: str) -> TlogProof:
    """The parts of a C2SP tlog-proof, none of them checked yet.

    Args:
        text: content of a ``.tlog-proof`` file.

    Returns:
        Index, path, checkpoint and extra data.

    Raises:
        FormatError: not a tlog-proof, or a second spelling of one.
    """
    head, blank, checkpoint = text.partition("\n\n")
    header, *lines = head.split("\n")
    if header != PROOF_HEADER or not blank or not lines:
        raise FormatError(
            f"expected a proof that begins with {PROOF_HEADER!r}, got {header[:40]!r}"
        )
    extra = b""
    if lines[0].startswith("extra "):
        extra = decode_base64(lines.pop(0).removeprefix("extra "))
    digits = lines.pop(0).removeprefix("index ") if lines and lines[0][:6] == "index " else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise FormatError("expected a line 'index N' with a decimal number")
    path = tuple(decode_base64(line) for line in lines)
    for digest in path:
        _check_hash("path entry", digest)
    proof = TlogProof(int(digits), path, checkpoint, extra)
    if tlog_proof(proof.index, path, checkpoint.encode("utf-8"), extra) != text:
        raise FormatError("the proof is not in its one canonical spelling")
    return proof


def _record_row(record: ReceiptRecord) -> dict[str, Any]:
    for name, value in (("salt", record.salt), ("text digest", record.text_digest)):
        _check_hash(name, value)
    return {
        "record_id": record.record_id.hex(),
        "index": record.index,
        "salt": record.salt.hex(),
        "text_digest": record.text_digest.hex(),
        "licence": record.licence,
        "canonicalisation": record.canonicalisation,
        "path": [digest.hex() for digest in record.path],
    }


def _check_hash(name: str, value: bytes) -> None:
    if len(value) != HASH_SIZE:
        raise FormatError(f"{name} has {HASH_SIZE} bytes, got {len(value)}")


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
