"""Make the golden receipts, good and bad: ``python tests/provenance/vectors/generate.py``.

A small market in a ledger signed by the demo key: two owners, one corpus version before and one
after an erasure, payouts, two training windows. Everything is derived from names, so the files come
out byte for byte the same everywhere; a test makes them anew and compares. Verifiers in other
languages can be tested on the files alone. ``bad/reasons.json`` says what each bad pair must be
refused for. Pairs called ``operator-…`` are signed by the log's own key: the operator lies.
"""

from __future__ import annotations

import json
import tempfile
from hashlib import sha256
from pathlib import Path

from provenance import (
    CorpusState,
    Ledger,
    MerkleTree,
    ReceiptOwner,
    ReceiptRecord,
    SigningKey,
    SparseTree,
    SumTree,
    absence_proof,
    build_receipt,
    canonical_bytes,
    checkpoint_text,
    commit,
    fingerprint,
    issue_receipts,
    jcs,
    keyed,
    leaf_data,
    leaf_hash,
    ledger_entry_proof,
    parse_checkpoint,
    prices_body,
    receipt_digest,
    record_id,
    sign_note,
    sum_path_of,
    tlog_proof,
    tombstone_leaf,
)

FOLDER = Path(__file__).parent
ORIGIN = "dataworth.example/demo"
TIME = "2025-01-31T12:00:00Z"
TEXTS = {
    "ada": ["The loom weaves.", "Caf\u00e9 notes"],
    "bob": ["One\r\ntwo", "Call 555-0199.", "x"],
}
ERASED = ("bob", 1)
WINDOWS = [
    {"run": "run-1", "first_step": 0, "last_step": 99, "shards": [0]},
    {"run": "run-1", "first_step": 100, "last_step": 199, "shards": [0]},
]


def secret(name: str) -> bytes:
    """A fixed "random" value: demo material, public by construction."""
    return sha256(b"demo vector " + name.encode()).digest()


class Market:
    """The corpus, its trees and its ledger."""

    def __init__(self, folder: Path) -> None:
        """Write the ledger up to the point where receipts can be issued."""
        self.ledger = Ledger.open(folder, ORIGIN, SigningKey.demo())
        self.rows = [
            (owner, position) for owner, texts in TEXTS.items() for position in range(len(texts))
        ]
        self.marks = {
            row: fingerprint(secret("K_fp"), canonical_bytes(TEXTS[row[0]][row[1]]))
            for row in self.rows
        }
        leaves = [
            leaf_data(self.commitment(row), self.pseudonym(row[0]), 1, "CC0-1.0")
            for row in self.rows
        ]
        self.tree = MerkleTree.from_data(leaves)
        self.sparse = SparseTree(self.marks.values())
        self.state = CorpusState("version-1", self.tree.root(), len(leaves), self.sparse.root)
        gone = self.rows.index(ERASED)
        leaves[gone] = tombstone_leaf(gone)
        self.later_tree = MerkleTree.from_data(leaves)
        self.later_sparse = SparseTree(mark for row, mark in self.marks.items() if row != ERASED)
        self.later = CorpusState(
            "version-2", self.later_tree.root(), len(leaves), self.later_sparse.root
        )
        self.payouts = SumTree(
            [(self.pseudonym("ada"), 700_001), (self.pseudonym("bob"), 299_999), (b"reserve", 5)]
        )
        bodies = [("corpus", self.state.body()), ("windows", {"windows": WINDOWS})]
        bodies += [
            ("prices", prices_body("version-1", self.payouts)),
            ("corpus", self.later.body()),
        ]
        self.ledger.append_many(bodies, TIME)

    def pseudonym(self, owner: str) -> bytes:
        """The owner's pseudonym."""
        return keyed(secret("K_owner"), owner.encode())

    def salt(self, row: tuple[str, int]) -> bytes:
        """The record's salt."""
        return secret(f"salt {row[0]} {row[1]}")

    def commitment(self, row: tuple[str, int]) -> bytes:
        """The record's commitment."""
        return commit(self.salt(row), canonical_bytes(TEXTS[row[0]][row[1]]))

    def record(
        self, row: tuple[str, int], tree: MerkleTree, licence: str = "CC0-1.0"
    ) -> ReceiptRecord:
        """The record, opened, in one of the two trees."""
        owner, position = row
        index = self.rows.index(row)
        return ReceiptRecord(
            record_id(secret("K_id"), owner, "book.txt", position, self.marks[row]),
            index,
            self.salt(row),
            sha256(canonical_bytes(TEXTS[owner][position])).digest(),
            licence,
            tree.inclusion_path(index),
        )

    def owner(self, owner: str) -> ReceiptOwner:
        """Whose receipt it is."""
        return ReceiptOwner(owner, self.pseudonym(owner), secret(f"receipt {owner}"))

    def before(self, owner: str, amount: int | None = None, licence: str = "CC0-1.0") -> dict:
        """The receipt of an owner for the first version."""
        index = list(TEXTS).index(owner)
        records = [self.record(row, self.tree, licence) for row in self.rows if row[0] == owner]
        paid = (700_001, 299_999)[index] if amount is None else amount
        return build_receipt(
            self.owner(owner),
            self.state,
            records,
            values=[{"method": "shapley", "unit": "nat", "value_nano": 12_345_678, "n": 24}],
            price={"price_microunits": paid, "currency": "EUR", "rule_digest": "aa" * 32},
            sum_path=sum_path_of(self.payouts, index),
            windows=WINDOWS,
        )

    def after(self, absence: dict) -> dict:
        """Bob's receipt for the second version: the erased record is absent."""
        rows = [row for row in self.rows if row[0] == "bob" and row != ERASED]
        records = [self.record(row, self.later_tree) for row in rows]
        return build_receipt(self.owner("bob"), self.later, records, absences=[absence])

    def lie(self, receipt: dict, entries: list[int], kind: str = "receipt") -> tuple[bytes, str]:
        """Issue a receipt without checking it, as a dishonest operator would."""
        index = self.ledger.append(kind, {"receipt_sha256": receipt_digest(receipt).hex()}, TIME)
        attached = [ledger_entry_proof(self.ledger, entry) for entry in entries]
        path, line = self.ledger.inclusion_path(index), self.ledger.entry_bytes(index)
        return jcs({**receipt, "entries": attached}), tlog_proof(
            index, path, self.ledger.checkpoint, line
        )


def pairs(folder: Path) -> dict[str, tuple[bytes, str, str]]:
    """Receipt, tlog-proof and the reason for refusal ("" for good ones) by name."""
    market = Market(folder)
    ledger = market.ledger
    ada, bob = issue_receipts(ledger, [market.before("ada"), market.before("bob")], [0, 1, 2], TIME)
    absence = absence_proof(market.later_sparse, market.marks[ERASED])
    (erased,) = issue_receipts(ledger, [market.after(absence)], [3], TIME)
    out = {
        "good/ada": (ada.receipt, ada.tlog_proof, ""),
        "good/bob": (bob.receipt, bob.tlog_proof, ""),
        "good/bob-after-erasure": (erased.receipt, erased.tlog_proof, ""),
    }

    def edited(before: bytes, after: bytes) -> bytes:
        assert before in ada.receipt
        return ada.receipt.replace(before, after, 1)

    digest = "digest of the receipt"
    out["bad/price-raised"] = (edited(b":700001", b":800001"), ada.tlog_proof, digest)
    out["bad/licence-changed"] = (edited(b"CC0-1.0", b"MIT"), ada.tlog_proof, digest)
    out["bad/window-removed"] = (edited(jcs(WINDOWS), jcs(WINDOWS[:1])), ada.tlog_proof, digest)
    out["bad/unknown-field"] = (
        edited(b'{"absences"', b'{"a":1,"absences"'),
        ada.tlog_proof,
        "fields",
    )
    out["bad/white-space"] = (
        edited(b'{"absences":', b'{"absences": '),
        ada.tlog_proof,
        "canonical",
    )
    out["bad/duplicate-key"] = (
        edited(b'{"absences":[]', b'{"absences":[],"absences":[]'), ada.tlog_proof, "canonical",
    )  # fmt: skip
    out["bad/proof-of-another-owner"] = (ada.receipt, bob.tlog_proof, digest)
    out["bad/older-checkpoint"] = (
        ada.receipt,
        tlog_proof(
            ada.index, [], sign(ledger, ada.index + 1, market), ledger.entry_bytes(ada.index)
        ),
        "length of the path",
    )
    stranger = SigningKey.from_seed(secret("stranger"))
    text = ada.tlog_proof.partition("\n\n")[2].rpartition("\n\n")[0] + "\n"
    note = sign_note(text, ORIGIN, stranger).decode()
    forged = ada.tlog_proof.partition("\n\n")[0] + "\n\n" + note
    out["bad/signed-by-a-stranger"] = (ada.receipt, forged, "signature")
    log = parse_checkpoint(text)
    elsewhere = checkpoint_text("other.example/demo", log.size, log.root)
    note = sign_note(elsewhere, ORIGIN, SigningKey.demo()).decode()
    forged = ada.tlog_proof.partition("\n\n")[0] + "\n\n" + note
    out["bad/checkpoint-of-another-log"] = (ada.receipt, forged, "origin and size")
    no_extra = "\n".join(
        line for line in ada.tlog_proof.split("\n") if not line.startswith("extra")
    )
    out["bad/no-entry-in-the-proof"] = (ada.receipt, no_extra, "malformed")

    lies = {
        "operator-record-not-under-the-root": (
            market.before("ada", licence="MIT"),
            [0, 1, 2],
            "root",
        ),
        "operator-price-not-in-the-total": (
            market.before("ada", 700_002),
            [0, 1, 2],
            "payout: root",
        ),
        "operator-version-not-named": (market.before("ada"), [1, 2], "corpus version named"),
        "operator-other-version-named": (market.before("ada"), [3, 1, 2], "corpus version named"),
        "operator-payouts-not-named": (
            market.before("ada"),
            [0, 1],
            "payouts of the corpus version",
        ),
    }
    private = CorpusState("version-1", market.later.record_root, 5, market.sparse.root)
    split = build_receipt(market.owner("bob"), private, [])
    lies["operator-two-roots-for-one-version"] = (split, [0], "corpus version named")
    false = {**absence_proof(market.later_sparse, market.marks[ERASED])}
    hidden = build_receipt(market.owner("bob"), market.state, [], absences=[false])
    lies["operator-absence-of-a-present-text"] = (hidden, [0], "absence: root")
    empty = build_receipt(
        market.owner("bob"), market.state, [], absences=[false | {"terminal": ""}]
    )
    lies["operator-empty-place-for-a-present-text"] = (empty, [0], "absence: root")
    present = market.sparse.prove(market.marks[ERASED])
    own = {
        "fingerprint": market.marks[ERASED].hex(),
        "terminal": market.marks[ERASED].hex(),
        "siblings": [digest.hex() for digest in present.siblings],
    }
    shown = build_receipt(market.owner("bob"), market.state, [], absences=[own])
    lies["operator-presence-shown-as-absence"] = (shown, [0], "absence: another key")
    for name, (receipt, entries, reason) in lies.items():
        out[f"bad/{name}"] = (*market.lie(receipt, entries), reason)
    receipt = market.before("ada")
    out["bad/operator-entry-of-another-kind"] = (
        *market.lie(receipt, [0, 1, 2], "note"),
        "kind of the receipt",
    )
    return out


def sign(ledger: Ledger, size: int, market: Market) -> bytes:
    """A real earlier checkpoint of the log, made anew."""
    root = MerkleTree(leaf_hash(ledger.entry_bytes(index)) for index in range(size)).root()
    return sign_note(checkpoint_text(ORIGIN, size, root), ORIGIN, SigningKey.demo())


def files() -> dict[str, bytes]:
    """Content of every vector file by its path inside the folder."""
    with tempfile.TemporaryDirectory() as folder:
        made = pairs(Path(folder))
        vkey = Ledger.open(Path(folder), ORIGIN, SigningKey.demo()).vkey
    out = {"vkey.txt": f"{vkey}\n".encode()}
    for name, (receipt, proof, _) in made.items():
        out[f"{name}.receipt.json"] = receipt
        out[f"{name}.tlog-proof"] = proof.encode()
    reasons = {name.removeprefix("bad/"): reason for name, (*_, reason) in made.items() if reason}
    out["bad/reasons.json"] = json.dumps(reasons, indent=1, sort_keys=True).encode() + b"\n"
    return out


def main() -> None:
    """Write all vector files."""
    for name, data in files().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
