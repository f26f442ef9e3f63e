"""Receipts and tlog-proofs: golden files, one fact per field, and every forgery refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from provenance import (
    CorpusState,
    FormatError,
    Ledger,
    ReceiptOwner,
    ReceiptRecord,
    SigningKey,
    SparseTree,
    SumTree,
    VerifyError,
    absence_proof,
    build_receipt,
    canonical_bytes,
    commit,
    issue_receipts,
    leaf_data,
    leaf_hash,
    parse_tlog_proof,
    prices_body,
    receipt_digest,
    sha256,
    sum_path_of,
    tlog_proof,
    verify_inclusion,
    verify_receipt,
    verify_standalone,
    verify_text,
)
from provenance.merkle import MerkleTree
from provenance.signing import open_checkpoint
from tests.provenance.vectors import generate

FOLDER = Path(generate.__file__).parent
VKEY = (FOLDER / "vkey.txt").read_text().strip()
GOOD = sorted(path.name.removesuffix(".receipt.json") for path in FOLDER.glob("good/*.json"))
# Two bad receipts are faults of the file and not of its content: test_standalone has them.
REASONS = {
    name: reason
    for name, reason in json.loads((FOLDER / "bad" / "reasons.json").read_text()).items()
    if name not in {"white-space", "duplicate-key"}
}
TIME = generate.TIME


def load(name: str) -> tuple[dict, str]:
    receipt = json.loads((FOLDER / f"{name}.receipt.json").read_bytes())
    return receipt, (FOLDER / f"{name}.tlog-proof").read_bytes().decode()


def test_the_golden_files_come_out_byte_for_byte():
    """The formats are frozen: trees, commitments, notes and receipts of issued files never change."""
    made = generate.files()
    stored = {
        str(path.relative_to(FOLDER)): path.read_bytes()
        for path in FOLDER.rglob("*")
        if path.is_file() and path.suffix in {".json", ".txt", ".tlog-proof"}
    }
    assert sorted(made) == sorted(stored)
    assert [name for name in made if made[name] != stored[name]] == []


@pytest.mark.parametrize("name", GOOD)
def test_a_good_receipt_is_accepted_with_its_facts(name):
    """Every record, absence, price and window of a golden receipt is one proven fact."""
    receipt, proof = load(f"good/{name}")
    facts = verify_receipt(receipt, proof, VKEY)
    size = open_checkpoint(parse_tlog_proof(proof).checkpoint, VKEY).size
    assert f"signed {size} entries" in facts[0]
    names = ("records", "absences", "windows", "values", "erasures")
    parts = [part for part_name in names for part in receipt[part_name]]
    # With a price come its rule and the checkpoint that the windows end in.
    assert len(facts) == 3 + len(parts) + 3 * bool(receipt["price"])
    for row in receipt["records"]:
        assert any(row["record_id"] in fact for fact in facts)
    assert sum(fact.endswith(": in the log") for fact in facts) == len(receipt["windows"])


@pytest.mark.parametrize("name", REASONS)
def test_a_bad_receipt_is_refused_for_its_reason(name):
    """Each golden forgery, also those signed by a lying operator, is refused for what is wrong."""
    text = (FOLDER / "bad" / f"{name}.receipt.json").read_text()
    proof = (FOLDER / "bad" / f"{name}.tlog-proof").read_text()
    with pytest.raises(VerifyError, match=REASONS[name]):
        verify_receipt(json.loads(text), proof, VKEY)


def test_the_stand_alone_verifier_and_the_package_agree():
    """The golden proof is valid for the package's own, separate functions as well."""
    receipt, text = load("good/ada")
    proof = parse_tlog_proof(text)
    log = open_checkpoint(proof.checkpoint, VKEY)
    verify_inclusion(leaf_hash(proof.extra), proof.index, log.size, proof.path, log.root)
    assert receipt_digest(receipt).hex() in proof.extra.decode()
    root = bytes.fromhex(receipt["record_root"])
    for row in receipt["records"]:
        inner = commit(
            bytes.fromhex(row["salt"]), canonical_bytes(generate.TEXTS["ada"][row["index"]])
        )
        leaf = leaf_data(inner, bytes.fromhex(receipt["owner_pseudonym"]), 1, row["licence"])
        path = [bytes.fromhex(digest) for digest in row["path"]]
        verify_inclusion(leaf_hash(leaf), row["index"], receipt["size"], path, root)


def test_the_text_of_a_record_is_checked_in_canonical_form():
    """The owner's own copy proves itself, in any spelling of the same text; another one does not."""
    receipt, _ = load("good/ada")
    record_id = receipt["records"][1]["record_id"]
    for text in ("Caf\u00e9 notes", "Cafe\u0301 notes"):
        assert record_id in verify_text(receipt, record_id, text)
    for wrong in ("Cafe notes", "", "\ud800"):
        with pytest.raises(VerifyError, match="digests of the text"):
            verify_text(receipt, record_id, wrong)
    with pytest.raises(VerifyError, match=r"expected \[\]"):
        verify_text(receipt, "00" * 32, "Caf\u00e9 notes")


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GOOD)
def test_attack_flipped_bits_of_both_files_are_noticed(name, step):
    """One bit in each byte (every 11th in the short run) of both files: no parse, or VerifyError; never a yes."""
    receipt = (FOLDER / f"good/{name}.receipt.json").read_bytes()
    proof = (FOLDER / f"good/{name}.tlog-proof").read_bytes()
    for position in range(0, len(receipt) + len(proof), step):
        forged = bytearray(receipt + proof)
        forged[position] ^= 1 << (position * 5) % 8
        first, second = bytes(forged[: len(receipt)]), bytes(forged[len(receipt) :])
        try:
            parsed, text = json.loads(first), second.decode()
        except ValueError:
            continue
        with pytest.raises(VerifyError):
            verify_receipt(parsed, text, VKEY)


def test_attack_bits_of_every_byte_of_a_tlog_proof_is_noticed():
    """Bits of every byte, all eight places of them: header, extra, index, path, checkpoint, signature, padding."""
    receipt, text = load("good/ada")
    proof = text.encode()
    for bit in range(0, 8 * len(proof), 3):
        forged = bytearray(proof)
        forged[bit // 8] ^= 1 << bit % 8
        try:
            changed = forged.decode()
        except ValueError:
            continue
        with pytest.raises(VerifyError):
            verify_receipt(receipt, changed, VKEY)


@pytest.mark.parametrize(("index", "size"), [(2, 2), (-1, 1), (0, 0), (5, 3)])
def test_the_stand_alone_verifier_knows_no_index_outside_the_tree(index, size):
    """An index at or beyond the size, or below zero, has no shape to be proven by."""
    with pytest.raises(VerifyError, match="below size"):
        verify_standalone._sides(index, size)


@pytest.mark.parametrize("bad", [{}, [], "x", {"format": 1}, None, 5])
def test_a_receipt_of_any_shape_is_refused_with_a_reason(bad):
    """Whatever stands in the file, the answer is a VerifyError, never another exception."""
    _, proof = load("good/ada")
    for text in (proof, "", "c2sp.org/tlog-proof@v1\nindex 0\n\n", "\n\n\n"):
        with pytest.raises(VerifyError):
            verify_receipt(bad, text, VKEY)
    for vkey in ("", "a+b+c", VKEY.replace("+", "-"), VKEY[:-1]):
        with pytest.raises(VerifyError):
            verify_receipt(*load("good/ada"), vkey)


def test_a_large_window_list_outside_its_entry_is_checked(tmp_path):
    """A body above 32 KiB travels with the receipt and is bound by the digest in its entry."""
    ledger = Ledger.open(tmp_path, generate.ORIGIN, SigningKey.demo())
    rows = [
        {"run": "r", "first_step": i, "last_step": i, "shards": list(range(99))} for i in range(99)
    ]
    state = CorpusState("v", MerkleTree().root(), 0, SparseTree([]).root)
    ledger.append_many([("corpus", state.body()), ("windows", {"windows": rows})], TIME)
    owner = ReceiptOwner("ada", bytes(32), bytes(32))
    (issued,) = issue_receipts(
        ledger, [build_receipt(owner, state, [], windows=rows)], [0, 1], TIME
    )
    receipt = json.loads(issued.receipt)
    facts = verify_receipt(receipt, issued.tlog_proof, ledger.vkey)
    assert sum(fact.endswith(": in the log") for fact in facts) == 99
    receipt["entries"][1]["body"] = receipt["entries"][1]["body"].replace("98", "97", 1)
    with pytest.raises(VerifyError, match="digest of a body"):
        verify_receipt(receipt, issued.tlog_proof, ledger.vkey)
    receipt["entries"][1]["extra"] = 1
    with pytest.raises(VerifyError, match="fields of an attached entry"):
        verify_receipt(receipt, issued.tlog_proof, ledger.vkey)


def test_a_window_that_is_not_in_the_log_is_called_so(tmp_path):
    """A window nobody recorded is committed in the receipt only, and the fact says it."""
    ledger = Ledger.open(tmp_path, generate.ORIGIN, SigningKey.demo())
    state = CorpusState("v", MerkleTree().root(), 0, SparseTree([]).root)
    ledger.append("corpus", state.body(), TIME)
    window = {"run": "r", "first_step": 0, "last_step": 1, "shards": [0]}
    receipt = build_receipt(ReceiptOwner("a", bytes(32), bytes(32)), state, [], windows=[window])
    (issued,) = issue_receipts(ledger, [receipt], [0], TIME)
    facts = verify_receipt(json.loads(issued.receipt), issued.tlog_proof, ledger.vkey)
    assert facts[-1] == "run r, steps 0 to 1, shards [0]: stated in this receipt only"


def test_a_receipt_that_does_not_hold_is_never_handed_out(tmp_path):
    """issue_receipts runs the owner's verifier first: an unnamed version stops it."""
    ledger = Ledger.open(tmp_path, generate.ORIGIN, SigningKey.demo())
    state = CorpusState("v", MerkleTree().root(), 0, SparseTree([]).root)
    receipt = build_receipt(ReceiptOwner("ada", bytes(32), bytes(32)), state, [])
    with pytest.raises(VerifyError, match="corpus version named in the log"):
        issue_receipts(ledger, [receipt], [], TIME)


def test_the_public_entry_says_nothing_without_the_salt(tmp_path):
    """The log holds a salted digest only: the same receipt under two salts has two entries."""
    state = CorpusState("v", bytes(32), 0, bytes(32))
    first, second = (
        build_receipt(ReceiptOwner("ada", bytes(32), bytes([salt]) * 32), state, [])
        for salt in (1, 2)
    )
    assert receipt_digest(first) != receipt_digest(second)
    _, text = load("good/ada")
    assert re.search(r"ada|price|record", parse_tlog_proof(text).extra.decode()) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"price": {"price_microunits": 1, "currency": "EUR"}}, "come together"),
        ({"sum_path": {}}, "come together"),
        ({"price": {"currency": "EUR"}, "sum_path": {}}, "price_microunits"),
        ({"windows": [{"run": "r"}]}, "a window has"),
        ({"values": [{"value": 0.5}]}, "float"),
        ({"absences": [{"terminal": None}]}, "null"),
    ],
)
def test_an_incomplete_receipt_is_refused_when_it_is_built(change, reason):
    """The maker is told what is missing, before anything stands in the log."""
    state = CorpusState("v", bytes(32), 0, bytes(32))
    with pytest.raises(FormatError, match=reason):
        build_receipt(ReceiptOwner("ada", bytes(32), bytes(32)), state, [], **change)


def test_hashes_of_another_length_are_refused_when_a_receipt_is_built():
    """Salts, pseudonyms, digests and path entries have 32 bytes."""
    state = CorpusState("v", bytes(32), 0, bytes(32))
    record = ReceiptRecord(bytes(32), 0, b"short", bytes(32), "MIT", [])
    for call in (
        lambda: build_receipt(ReceiptOwner("ada", b"short", bytes(32)), state, []),
        lambda: build_receipt(ReceiptOwner("ada", bytes(32), b"short"), state, []),
        lambda: build_receipt(ReceiptOwner("ada", bytes(32), bytes(32)), state, [record]),
        lambda: tlog_proof(0, [b"short"], b""),
        lambda: tlog_proof(-1, [], b""),
    ):
        with pytest.raises(FormatError):
            call()


def test_absence_of_a_present_key_cannot_be_written():
    """The honest maker notices before the verifier does."""
    tree = SparseTree([sha256(b"x")])
    with pytest.raises(FormatError, match="is in the corpus"):
        absence_proof(tree, sha256(b"x"))


def test_payout_proof_and_entry_have_their_written_form():
    """Steps are 8 bytes of sum and 32 of hash in hex; the entry names root, size and total."""
    tree = SumTree([(b"a", 1), (b"b", 2)])
    ((digest, total),) = tree.path(0)
    assert sum_path_of(tree, 0) == {"index": 0, "path": [f"{total:016x}{digest.hex()}"]}
    body = prices_body("v", tree)
    assert body == {
        "corpus_version": "v",
        "sum_root": tree.root[0].hex(),
        "sum_size": 2,
        "sum_total": 3,
    }


# The form of C2SP tlog-proof, with the index line after an optional extra line.
PROOF = "c2sp.org/tlog-proof@v1\nextra ZXh0cmE=\nindex 5\n" + "A" * 43 + "=\n\nexample.com/log\n"


def test_a_tlog_proof_is_read_and_written_in_its_one_spelling():
    """Parsing and writing are inverse; with and without the extra line and the path."""
    proof = parse_tlog_proof(PROOF)
    assert (proof.index, proof.path, proof.extra) == (5, (bytes(32),), b"extra")
    assert proof.checkpoint == "example.com/log\n"
    for index, path, extra in ((0, [], b""), (7, [sha256(b"x")] * 3, b"e")):
        text = tlog_proof(index, path, b"note\n", extra)
        again = parse_tlog_proof(text)
        assert (again.index, list(again.path), again.extra) == (index, path, extra)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@v1", "@v2"),
        ("index 5", "index 05"),
        ("index 5", "index -5"),
        ("index 5", "index \u0665"),
        ("index 5\n", ""),
        ("ZXh0cmE=", "ZXh0cmF="),
        ("A=\n", "B=\n"),
        ("=\n\n", "\n\n"),
        ("\n\n", "\n"),
        ("extra ", "extra  "),
    ],
)
def test_a_tlog_proof_in_another_spelling_is_refused(old, new):
    """Other versions, digits, base64 spellings and missing lines."""
    with pytest.raises(FormatError):
        parse_tlog_proof(PROOF.replace(old, new, 1))


def test_a_receipt_says_what_its_values_were_measured_on(tmp_path, monkeypatch):
    """Proxy and transfer stand in the log's entry of values and are one fact; entries without them, as all older ones, state none."""
    said = {"proxy": "of size tiny: settings ab", "transfer": "not measured"}
    body = generate.values_body
    monkeypatch.setattr(generate, "values_body", lambda tree: body(tree) | said)
    market = generate.Market(tmp_path)
    receipt = market.before("ada")
    (issued,) = issue_receipts(market.ledger, [receipt], generate.EVERYTHING, TIME)
    facts = verify_receipt(json.loads(issued.receipt), issued.tlog_proof, market.ledger.vkey)
    fact = "values were measured on the proxy of size tiny: settings ab; against a larger model: not measured"
    assert facts.count(fact) == 1
    older = verify_receipt(*load("good/ada"), VKEY)
    assert not [one for one in older if "larger model" in one]
