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
    value_leaf,
    value_proof,
    values_body,
)
from provenance.versions import ITEMS

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
VALUES = {"ada": 7_000_009, "bob": 2_999_991, "all": 10_000_000}
POOL = 1_000_000
EVERYTHING = [0, 1, 2, 4, 5, 6]
"""Ledger entries that a receipt of the first version leans on; 3, 7 and 8 are those of the erasure."""


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
        self.values = SumTree(
            value_leaf(self.value(owner), self.pseudonym(owner)) for owner in (*TEXTS, "all")
        )
        versions = {item: secret(item).hex() for item in ITEMS} | {"retrieval_index": "none"}
        state = {"state_digest": secret("checkpoint").hex()}
        prices = prices_body("version-1", self.payouts)
        self.request = {"kind": "erase", "owner": "bob", "record_ids": [], "sources": ["book.txt"]}
        request = sha256(jcs(self.request)).hexdigest()[:16]
        bodies = [
            ("corpus", self.state.body()),
            ("windows", {"windows": [window | state for window in WINDOWS]}),
            ("prices", prices | {"values": "77" * 32, "payable": POOL, "value_total": 10_000_000}),
            ("corpus", self.later.body()),
            ("values", values_body(self.values) | {"table": "77" * 32, "versions": versions}),
            ("run", {"run": "run-1", "versions": versions}),
            ("tokens", {"corpus_version": "version-1", "shard_leaves": 4096}),
            ("erasure", {"request": request, "state": "audited"}),
            ("audit", {"audit": "88" * 32, "verdict": "PASS", "versions": versions}),
        ]
        self.ledger.append_many(bodies, TIME)

    def value(self, owner: str) -> dict:
        """The value of an owner, or of the group of all."""
        kind = "group" if owner == "all" else "owner"
        row = {
            "subject_kind": kind,
            "subject_id": owner,
            "method": "shapley",
            "target": "target_value",
        }
        row |= {"unit": "nat", "value_nano": VALUES[owner], "n": 24}
        return row | ({"se_nano": 123_456} if kind == "group" else {})

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

    def before(
        self, owner: str, amount: int | None = None, licence: str = "CC0-1.0", *,
        values: dict | None = None, value_of: str = "", shards: list[int] | None = None,
    ) -> dict:  # fmt: skip
        """The receipt of an owner for the first version, and what a lying operator would bend in it."""
        index = list(TEXTS).index(owner)
        bent = {name: value for name, value in (values or {}).items() if name in self.value("ada")}
        group = {name: value for name, value in (values or {}).items() if name not in bent}
        records = [self.record(row, self.tree, licence) for row in self.rows if row[0] == owner]
        paid = (700_001, 299_999)[index] if amount is None else amount
        return build_receipt(
            self.owner(owner),
            self.state,
            records,
            values=[
                value_proof(self.value(value_of or owner) | bent, self.values, index),
                value_proof(self.value("all") | group, self.values, 2),
            ],
            price={"price_microunits": paid, "currency": "EUR", "rule_digest": "aa" * 32},
            sum_path=sum_path_of(self.payouts, index),
            windows=[window | ({"shards": shards} if shards else {}) for window in WINDOWS],
        )

    def after(self, absence: dict, **changes: object) -> dict:
        """Bob's receipt for the second version: the erased record is absent, the request answered."""
        rows = [row for row in self.rows if row[0] == "bob" and row != ERASED]
        records = [self.record(row, self.later_tree) for row in rows]
        erasure = {
            "identity": self.request,
            "state": "audited",
            "audit": "88" * 32,
            "verdict": "PASS",
        }
        return build_receipt(
            self.owner("bob"), self.later, records, absences=[absence], erasures=[erasure | changes]
        )

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
    ada, bob = issue_receipts(
        ledger, [market.before("ada"), market.before("bob")], EVERYTHING, TIME
    )
    absence = absence_proof(market.later_sparse, market.marks[ERASED])
    (erased,) = issue_receipts(ledger, [market.after(absence)], [3, 7, 8], TIME)
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

    lies = lies_of(market)
    for name, (receipt, entries, reason) in lies.items():
        out[f"bad/{name}"] = (*market.lie(receipt, entries), reason)
    receipt = market.before("ada")
    out["bad/operator-entry-of-another-kind"] = (
        *market.lie(receipt, EVERYTHING, "note"),
        "kind of the receipt",
    )
    return out


def lies_of(market: Market) -> dict[str, tuple[dict, list[int], str]]:
    """Receipts that a dishonest operator signs: content, attached entries, and why they are refused."""
    lies = {
        "operator-record-not-under-the-root": (
            market.before("ada", licence="MIT"),
            EVERYTHING,
            "root",
        ),
        "operator-price-not-in-the-total": (
            market.before("ada", 700_002),
            EVERYTHING,
            "payout: root",
        ),
        "operator-version-not-named": (
            market.before("ada"),
            [1, 2, 4, 5, 6],
            "corpus version named",
        ),
        "operator-other-version-named": (
            market.before("ada"),
            [3, 1, 2, 4, 5, 6],
            "corpus version named",
        ),
        "operator-payouts-not-named": (
            market.before("ada"),
            [0, 1, 4, 5, 6],
            "payouts of the corpus version",
        ),
    }
    lies["operator-value-not-in-the-total"] = (
        market.before("ada", values={"value_nano": 7_000_010}), EVERYTHING, "value: root",
    )  # fmt: skip
    lies["operator-standard-error-changed"] = (
        market.before("ada", values={"se_nano": 1}), EVERYTHING, "value: root",
    )  # fmt: skip
    lies["operator-value-of-another-owner"] = (
        market.before("bob", value_of="ada"), EVERYTHING, "value: root",
    )  # fmt: skip
    lies["operator-window-without-own-shards"] = (
        market.before("ada", shards=[7]), EVERYTHING, "a shard of this owner's records",
    )  # fmt: skip
    for name, change, reason in (
        ("price-against-the-rule", {"payable": 2 * POOL}, "price by the rule"),
        ("price-of-a-share-too-large", {"value_total": 5_000_000}, "price by the rule"),
        ("prices-from-other-values", {"values": "66" * 32}, "table of values"),
    ):
        body = market.ledger.entry(2)["body"] | change
        index = market.ledger.append("prices", body, TIME)
        lies[f"operator-{name}"] = (market.before("ada"), [0, 1, index, 4, 5, 6], reason)
    absent = absence_proof(market.later_sparse, market.marks[ERASED])
    for name, change, reason in (
        ("verdict-changed", {"verdict": "INCONCLUSIVE"}, "audit and verdict"),
        ("state-ahead", {"state": "shredded"}, "state of request"),
        ("request-of-another", {"identity": {"kind": "erase", "owner": "ada"}}, "state of request"),
    ):
        lies[f"operator-{name}"] = (market.after(absent, **change), [3, 7, 8], reason)
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
    return lies


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
