"""The threat table, one test a row: what somebody with a motive would try, and why it does not work.

Where a row cannot be closed by cryptography the test shows the limit itself, so that nobody believes
more than is true. The flaws of other trees stand in ``test_trees`` and ``test_merkletools``.
"""

from __future__ import annotations

import io
import json
import unicodedata
from hashlib import sha256
from pathlib import Path

import pytest

from provenance import (
    CorpusState,
    FormatError,
    HistoryError,
    Ledger,
    MerkleTree,
    ReceiptOwner,
    RootMismatchError,
    SignatureError,
    SigningKey,
    SparseTree,
    SumTree,
    VerificationError,
    VerifyError,
    Witness,
    absence_proof,
    build_receipt,
    canonical_bytes,
    checkpoint_text,
    commit,
    commit_digest,
    cosign,
    fingerprint,
    issue_receipts,
    jcs,
    leaf_data,
    leaf_hash,
    open_checkpoint,
    parse_json,
    record_id,
    sign_note,
    tombstone_leaf,
    verify_absence,
    verify_consistency,
    verify_cosignature,
    verify_inclusion,
    verify_receipt,
    verify_sum,
    vkey,
)
from provenance.errors import ProofShapeError

KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
VKEY = vkey(ORIGIN, KEY.public)
TIME = "2025-01-31T12:00:00Z"
K_FP = b"f" * 32
SALT = sha256(b"salt").digest()
VECTORS = Path(__file__).parents[1] / "vectors"


def mark(text: str) -> bytes:
    return fingerprint(K_FP, canonical_bytes(text))


def test_guessing_a_low_entropy_record():
    """10,000 phone numbers against an unsalted digest: found. Against the commitment: not without its salt."""
    secret = canonical_bytes("555-0134")
    guesses = [canonical_bytes(f"555-{number:04d}") for number in range(10_000)]
    assert sha256(secret).digest() in {sha256(guess).digest() for guess in guesses}
    published = commit(SALT, secret)
    for salt in (bytes(32), sha256(b"another").digest()):
        assert published not in {commit(salt, guess) for guess in guesses}
    assert published in {commit(SALT, guess) for guess in guesses}  # the owner, who has the salt


def test_erasure_against_the_immutable_log():
    """After text and salt are gone, 32 bytes are left that fit every text equally badly; the tombstone is public."""
    texts = [b"one", b"two", b"three"]
    published = commit(SALT, texts[1])
    assert all(
        commit(sha256(b"%d" % n).digest(), text) != published for n in range(500) for text in texts
    )
    leaves = [leaf_hash(leaf_data(published, bytes(32), 1, "CC0-1.0")), leaf_hash(b"other")]
    later = [leaf_hash(tombstone_leaf(0)), leaves[1]]
    tree = MerkleTree(later)
    verify_inclusion(later[0], 0, 2, tree.inclusion_path(0), tree.root())
    with pytest.raises(RootMismatchError):
        verify_inclusion(leaves[0], 0, 2, tree.inclusion_path(0), tree.root())


def test_readding_an_erased_text_under_a_new_salt():
    """Its commitment is new, its fingerprint is not: the old absence proof fails, and no new one can be made."""
    before = SparseTree([mark("kept")])
    proof = before.prove(mark("erased"))
    verify_absence(before.root, mark("erased"), proof)
    assert commit(SALT, b"erased") != commit(bytes(32), b"erased")
    after = SparseTree([mark("kept"), mark("erased")])
    with pytest.raises(RootMismatchError):
        verify_absence(after.root, mark("erased"), proof)
    with pytest.raises(FormatError, match="there is no absence"):
        absence_proof(after, mark("erased"))


def test_erased_by_one_owner_and_delivered_by_another():
    """The same text of two owners is one fingerprint: while the other's copy stays, absence is refused."""
    shared = mark("shared line")
    assert record_id(K_FP, "ada", "a.txt", 0, shared) != record_id(K_FP, "bob", "b.txt", 0, shared)
    still_bobs = SparseTree([shared, mark("bob's own")])
    with pytest.raises(FormatError, match="is in the corpus"):
        absence_proof(still_bobs, shared)


def test_near_duplicates_are_a_limit_that_is_stated():
    """One letter more is another fingerprint: absence of a text says nothing about its paraphrase."""
    tree = SparseTree([mark("The loom weaves.")])
    verify_absence(tree.root, mark("The loom weaves!"), tree.prove(mark("The loom weaves!")))
    readme = (Path(__file__).parents[3] / "provenance" / "README.md").read_text()
    assert "changed by one letter" in " ".join(readme.split())


@pytest.mark.parametrize("identities", [1, 2, 3, 5])
def test_sybil_owners_are_paid_no_more(identities):
    """A copies B's records under k names: the payout of each cluster stays with who committed it first."""
    from valuation import NanoRow, OwnerGroup, PriceRule, first_in_cluster, owner_values, price

    names = [f"sybil-{number}" for number in range(identities)]
    owners = ["honest"] * 4 + [names[number % identities] for number in range(12)]
    clusters = (
        [0, 1, 2, 3] + [0, 1, 2, 3] * 2 + [4, 5, 6, 7]
    )  # eight copies, four records of the sybil's own
    order = list(range(16))
    rows = [
        NanoRow(subject_kind="group", subject_id="all", method="shapley", target="t", unit="nat", value_nano=8000, n=1)
    ]  # fmt: skip
    groups = [OwnerGroup(id="all", owners=tuple(sorted({*owners})), tokens=8)]
    values = owner_values(
        rows, groups, owner_N=owners, tokens_N=[1] * 16, cluster_N=clusters, order_N=order,
        valued_N=first_in_cluster(clusters, order),
    )  # fmt: skip
    paid = price(values, PriceRule(pool_microunits=1_000_000, currency="EUR"))
    total = sum(row.price_microunits for row in paid.rows if row.subject != "honest")
    assert abs(total - 500_000) <= identities


def test_grinding_a_seed_after_seeing_the_data(tmp_path):
    """The plan's place in the log cannot move: an entry that comes later, or an exchanged one, is another root."""
    ledger = Ledger.open(tmp_path, ORIGIN, KEY)
    plan = ledger.append("plan", {"seed": 7}, TIME)
    anchor = ledger.checkpoint
    result = ledger.append("evaluation", {"loss": 1}, TIME)
    assert plan < result
    lines = [ledger.entry_bytes(index) for index in (plan, result)]
    better = lines[0].replace(b'"seed":7', b'"seed":8')
    for forged in ([better, lines[1]], lines[::-1], [lines[1]]):
        assert MerkleTree.from_data(forged).root() != ledger.root
    # A seed that is H(checkpoint || nonce) has nothing left to choose once both are written down.
    seeds = {
        sha256(sha256(note).digest() + b"nonce").digest() for note in (anchor, ledger.checkpoint)
    }
    assert len(seeds) == 2


def test_truncation_and_rollback(tmp_path):
    """The operator restores last month's ledger, validly signed: whoever kept a checkpoint refuses it."""
    new, old = MerkleTree.from_data([b"a", b"b", b"c"]), MerkleTree.from_data([b"a", b"b"])
    witness = Witness(tmp_path, "w.example", SigningKey.generate())
    witness.observe(note(new), VKEY, new.consistency_path, 1)
    with pytest.raises(HistoryError, match="3 entries were signed, got 2"):
        witness.observe(note(old), VKEY, old.consistency_path, 2)


def note(tree: MerkleTree, key: SigningKey = KEY) -> bytes:
    return sign_note(checkpoint_text(ORIGIN, tree.size, tree.root()), ORIGIN, key)


def test_split_view_between_two_buyers(tmp_path):
    """Each buyer is shown an ending of its own: one shared witness, or one exchanged receipt, shows it."""
    views = [MerkleTree.from_data([b"a", ending]) for ending in (b"for buyer 1", b"for buyer 2")]
    witness = Witness(tmp_path, "w.example", SigningKey.generate())
    witness.observe(note(views[0]), VKEY, views[0].consistency_path, 1)
    with pytest.raises(HistoryError, match="split view"):
        witness.observe(note(views[1]), VKEY, views[1].consistency_path, 1)
    notes = [path.read_bytes() for path in (tmp_path / "evidence").iterdir()]
    said = {open_checkpoint(evidence, VKEY).root for evidence in notes}
    assert (
        len(said) == 2
    )  # two signatures of one key over two roots of one size: proof for everybody
    with pytest.raises(VerificationError):
        verify_consistency(2, 2, views[0].root(), views[1].root(), [])


def test_proof_size_and_algorithm_confusion():
    """A proof has no field for size or algorithm: the verifier takes both from what was signed."""
    tree = MerkleTree.from_data([b"x", b"y"])
    verify_inclusion(tree.leaf(1), 1, 2, tree.inclusion_path(1), tree.root())
    with pytest.raises(ProofShapeError, match=r"index must be in \[0, 2\)"):
        verify_inclusion(tree.leaf(1), 2, 2, tree.inclusion_path(1), tree.root())
    good = json.loads((VECTORS / "good" / "ada.receipt.json").read_bytes())
    proof = (VECTORS / "good" / "ada.tlog-proof").read_text()
    for field, value in (("size", 6), ("algorithm", "md5"), ("security", False), ("format", 2)):
        with pytest.raises(VerifyError):
            verify_receipt(good | {field: value}, proof, trusted())


def trusted() -> str:
    return (VECTORS / "vkey.txt").read_text().strip()


def test_proof_of_the_current_tree_with_an_older_checkpoint():
    """The path leads to today's root, the signature is over yesterday's: refused, and the other way round."""
    old, new = (
        MerkleTree.from_data([b"a", b"b", b"c"]),
        MerkleTree.from_data([b"a", b"b", b"c", b"d"]),
    )
    for path_from, root_from in ((new, old), (old, new)):
        said = open_checkpoint(note(root_from), VKEY)
        with pytest.raises(VerificationError):
            verify_inclusion(old.leaf(0), 0, said.size, path_from.inclusion_path(0), said.root)


def test_unicode_twins():
    """One word in two forms and three line ends is one fingerprint; what only looks alike is not."""
    twins = [unicodedata.normalize(form, "Caf\u00e9\n") for form in ("NFC", "NFD")]
    twins += [twins[0].replace("\n", end) for end in ("\r\n", "\r")]
    assert len({mark(twin) for twin in twins}) == 1
    assert mark("Caf\u00e9\n") != mark("Cafe\n") != mark("C\u0430fe\n")
    with pytest.raises(FormatError, match="surrogate"):
        canonical_bytes("\ud800")


@pytest.mark.parametrize(
    "text", ['{"price":1,"price":100}', '{"price":1.0}', '{"price":NaN}', '{"price":9007199254740993}', '{"p":null}']
)  # fmt: skip
def test_json_that_two_readers_read_differently(text):
    """Duplicate keys, floats, NaN, integers beyond 2^53 and null are refused on reading, as on writing."""
    with pytest.raises(FormatError):
        parse_json(text.encode())
    value = json.loads(text)
    if '"price":1,' not in text:
        with pytest.raises(FormatError):
            jcs(value)


def test_parquet_reencoding_changes_no_root():
    """The same table in four encodings: four file digests, one record root."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [f"line {number}" for number in range(200)]})
    files, roots = set(), set()
    for options in ({}, {"compression": "zstd"}, {"row_group_size": 7}, {"version": "1.0"}):
        buffer = io.BytesIO()
        pq.write_table(table, buffer, **options)
        files.add(sha256(buffer.getvalue()).digest())
        buffer.seek(0)
        texts = pq.read_table(buffer)["text"].to_pylist()
        roots.add(
            MerkleTree.from_data([commit(SALT, canonical_bytes(text)) for text in texts]).root()
        )
    assert len(files) == 4
    assert len(roots) == 1


def test_one_key_for_two_purposes():
    """A log's signature is no cosignature, another key's checkpoint is no checkpoint: type and name are in the id."""
    tree = MerkleTree.from_data([b"a"])
    other = SigningKey.generate()
    with pytest.raises(SignatureError):
        open_checkpoint(note(tree, other), VKEY)
    with pytest.raises(SignatureError):
        verify_cosignature(note(tree), vkey(ORIGIN, KEY.public, b"\x04"))
    both = cosign(note(tree), ORIGIN, KEY, 9)
    assert verify_cosignature(both, vkey(ORIGIN, KEY.public, b"\x04")) == 9


@pytest.mark.parametrize(
    "name",
    [
        "value-not-in-the-total",
        "value-of-another-owner",
        "price-against-the-rule",
        "prices-from-other-values",
    ],
)
def test_a_value_oracle_that_changes_its_mind(name):
    """A value, or a price, other than the committed one is refused, although the operator signs the receipt."""
    receipt = json.loads((VECTORS / "bad" / f"operator-{name}.receipt.json").read_bytes())
    proof = (VECTORS / "bad" / f"operator-{name}.tlog-proof").read_text()
    with pytest.raises(VerifyError, match=r"value|price"):
        verify_receipt(receipt, proof, trusted())


def test_training_on_more_than_the_ledger_says_is_a_limit_that_is_stated(tmp_path):
    """A window that nobody entered is told as the receipt's own word; extra data itself leaves no trace here."""
    ledger = Ledger.open(tmp_path, ORIGIN, KEY)
    state = CorpusState("v", MerkleTree().root(), 0, SparseTree([]).root)
    ledger.append("corpus", state.body(), TIME)
    window = {"run": "secret", "first_step": 0, "last_step": 9, "shards": [0]}
    receipt = build_receipt(ReceiptOwner("ada", bytes(32), SALT), state, [], windows=[window])
    (issued,) = issue_receipts(ledger, [receipt], [0], TIME)
    facts = verify_receipt(json.loads(issued.receipt), issued.tlog_proof, ledger.vkey)
    assert facts[-1].endswith("stated in this receipt only")
    readme = " ".join((Path(__file__).parents[3] / "provenance" / "README.md").read_text().split())
    assert "nothing else was trained on" in readme


def test_hiding_a_debt_in_the_sum_tree():
    """Textbook form H(sum || l || r): two owners are each shown a sibling of 0 and both verify. Ours binds both sums."""

    def textbook(left: tuple[bytes, int], right: tuple[bytes, int]) -> bytes:
        return sha256((left[1] + right[1]).to_bytes(8, "big") + left[0] + right[0]).digest()

    ada, bob = (b"a" * 32, 100), (b"b" * 32, 100)
    shown = textbook(ada, (bob[0], 0)), textbook((ada[0], 0), bob)
    assert (
        shown[0] == shown[1]
    )  # 200 are owed, the published total is 100, and both owners are content
    tree = SumTree([(b"ada", 100), (b"bob", 100)])
    digest, total = tree.root
    for index, label in enumerate((b"ada", b"bob")):
        verify_sum(label, 100, index, 2, tree.path(index), tree.root)
        ((sibling, _),) = tree.path(index)
        for root in ((digest, 100), (digest, total)):
            with pytest.raises(VerificationError):
                verify_sum(label, 100, index, 2, [(sibling, 0)], root)


def test_unsorted_neighbours():
    """One leaf out of order makes "absent" provable by two neighbours; the sparse tree has one place per key."""
    keys = sorted(mark(f"text {number}") for number in range(7))
    victim = keys[3]
    unsorted = MerkleTree.from_data([*keys[:3], *keys[4:], victim])
    for index in (2, 3):  # adjacent, proven, and around the victim, which is a member all the same
        leaf = unsorted.leaf(index)
        verify_inclusion(leaf, index, 7, unsorted.inclusion_path(index), unsorted.root())
    assert unsorted.leaf(2) == leaf_hash(keys[2])
    assert unsorted.leaf(3) == leaf_hash(keys[4])
    tree = SparseTree(keys)
    with pytest.raises(VerificationError):
        verify_absence(tree.root, victim, tree.prove(victim))


def test_opening_a_commitment_to_another_text():
    """The operator shows the owner another text for the committed leaf: one salt opens one text."""
    published = commit(SALT, canonical_bytes("what was delivered"))
    assert commit_digest(SALT, sha256(canonical_bytes("what was delivered")).digest()) == published
    assert commit(SALT, canonical_bytes("what is shown")) != published
    assert leaf_data(published, bytes(32), 1, "MIT") != leaf_data(
        published, bytes(32), 1, "CC0-1.0"
    )
