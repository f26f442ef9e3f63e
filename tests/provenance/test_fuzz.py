"""The parsers under fire: whatever bytes come, they answer or raise one of our errors, and nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from provenance import (
    CompactRange,
    KeyList,
    Ledger,
    ProvenanceError,
    SigningKey,
    VerifyError,
    Versions,
    open_checkpoint,
    open_key_list,
    parse_checkpoint,
    parse_json,
    parse_tlog_proof,
    parse_vkey,
    sign_key_list,
    split_bundle,
    unseal,
    verify_chainpoint_v2,
    verify_cosignature,
    verify_note,
    verify_receipt,
    vkey,
)
from provenance import verify_standalone as standalone
from provenance.entries import decode_entry
from provenance.journal import read_commits

VECTORS = Path(__file__).parent / "vectors"
VKEY = (VECTORS / "vkey.txt").read_text().strip()
KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
ROOT_VKEY = vkey("dataworth.example/demo/root", KEY.public)
WITNESS_VKEY = vkey(ORIGIN, KEY.public, b"\x04")
PROOF = (VECTORS / "good" / "ada.tlog-proof").read_bytes()
RECEIPT = (VECTORS / "good" / "ada.receipt.json").read_bytes()
NOTE = PROOF.partition(b"\n\n")[2]
ENTRY = json.loads(RECEIPT)["entries"][0]["entry"].encode()


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


PARSERS = {
    "json": (parse_json, ENTRY),
    "note": (lambda data: verify_note(data, VKEY), NOTE),
    "checkpoint": (lambda data: open_checkpoint(data, VKEY), NOTE),
    "checkpoint text": (
        lambda data: parse_checkpoint(text(data)),
        NOTE.partition(b"\n\n")[0] + b"\n",
    ),
    "cosignature": (lambda data: verify_cosignature(data, WITNESS_VKEY), NOTE),
    "key list": (lambda data: open_key_list(data, ROOT_VKEY), NOTE),
    "vkey": (lambda data: parse_vkey(text(data)), VKEY.encode()),
    "tlog-proof": (lambda data: parse_tlog_proof(text(data)), PROOF),
    "entry": (lambda data: decode_entry(data, VECTORS), ENTRY),
    "journal": (
        lambda data: read_commits(data, 0, CompactRange()),
        ENTRY + b'\n{"checkpoint":"x"}\n',
    ),
    "bundle": (split_bundle, b"\x00\x03abc\x00\x01d"),
    "sealed": (lambda data: unseal(b"k" * 32, data), b"DWS1" + bytes(40)),
}


def bent(good: bytes) -> st.SearchStrategy[bytes]:
    """Anything, and good input with a piece cut out, put in or exchanged."""
    pieces = st.tuples(st.integers(0, len(good)), st.integers(0, 40), st.binary(max_size=12))
    return st.binary(max_size=200) | pieces.map(
        lambda cut: good[: cut[0]] + cut[2] + good[cut[0] + cut[1] :]
    )


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_parser_raises_our_errors_only(name, data):
    """Hypothesis bends good input at every place: the answer is a value or a ProvenanceError."""
    parse, good = PARSERS[name]
    given_bytes = data.draw(bent(good))
    with suppress(ProvenanceError):
        parse(given_bytes)


SCALARS = st.none() | st.booleans() | st.integers(-5, 2**64) | st.text(max_size=5) | st.floats()
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)


@settings(max_examples=200)
@given(value=JSON, place=st.integers(0, 10**6), whole=st.booleans())
@example(value={}, place=0, whole=True)
def test_a_receipt_with_any_json_in_any_field_is_refused_with_one_error(value, place, whole):
    """Any value in the place of any field, at any depth: VerifyError, never a crash and never a yes."""
    receipt = json.loads(RECEIPT)
    parent: object = receipt
    fields = sorted(receipt)
    field: object = fields[place % len(fields)]
    child = receipt[field]
    depth = place // len(fields)
    while not whole and isinstance(child, dict | list) and child and depth:
        parent = child
        options = sorted(child) if isinstance(child, dict) else list(range(len(child)))
        field = options[depth % len(options)]
        child, depth = child[field], depth // len(options)
    if value == child:
        return
    parent[field] = value  # type: ignore[index]
    with pytest.raises(VerifyError):
        verify_receipt(receipt, PROOF.decode(), VKEY)


@settings(max_examples=150)
@given(data=st.data())
def test_the_stand_alone_program_answers_no_to_any_bytes(tmp_path_factory, data):
    """Receipt, proof and key bent: a line that begins with "no: " and exit code 1, or the good files."""
    folder = tmp_path_factory.mktemp("fuzz")
    receipt, proof = data.draw(bent(RECEIPT)), data.draw(bent(PROOF) | st.just(PROOF))
    (folder / "a.receipt.json").write_bytes(receipt)
    (folder / "a.tlog-proof").write_bytes(proof)
    key = data.draw(st.just(VKEY) | st.text(max_size=40))
    code = standalone.main([str(folder / "a.receipt.json"), "--key", key])
    assert code == int((receipt, proof, key) != (RECEIPT, PROOF, VKEY))


KEYS = sign_key_list(KeyList(ORIGIN, 1, ((0, VKEY),)), KEY)


@settings(max_examples=150)
@given(forged=bent(KEYS))
def test_a_key_list_of_any_bytes_is_no_reason_to_say_yes(forged):
    """The root's list bent at every place: VerifyError from the one file, unless it is the good list."""
    receipt = json.loads(RECEIPT)
    assert "key list 1 of" in verify_receipt(receipt, PROOF.decode(), ROOT_VKEY, KEYS.decode())[0]
    if forged != KEYS:
        with pytest.raises(VerifyError):
            verify_receipt(receipt, PROOF.decode(), ROOT_VKEY, text(forged))


@settings(max_examples=100)
@given(value=JSON)
def test_chainpoint_proofs_and_versions_of_any_shape(value):
    """Any JSON in the place of a proof's steps, of a digest, of the versions: our error, no other."""
    proof = {
        "@context": "https://w3id.org/chainpoint/v2", "type": "ChainpointSHA256v2", "targetHash": "00" * 32,
        "merkleRoot": "00" * 32, "proof": value, "anchors": [],
    }  # fmt: skip
    for forged in (
        proof,
        proof | {"proof": [], "targetHash": value},
        proof | {"proof": [{"right": value}]},
    ):
        with pytest.raises(ProvenanceError):
            verify_chainpoint_v2(forged, 0, 2, bytes(32))
    with pytest.raises(ProvenanceError):
        Versions.of(value)


@settings(max_examples=60)
@given(data=st.data())
def test_a_ledger_folder_with_any_bytes_opens_or_raises_our_error(tmp_path_factory, data):
    """The journal and the copy of the checkpoint bent: the state before, or a ProvenanceError; never fewer entries."""
    folder = tmp_path_factory.mktemp("ledger")
    ledger = Ledger.open(folder, ORIGIN, KEY)
    ledger.append_many([("test", {"n": number}) for number in range(3)], "2025-01-31T12:00:00Z")
    name = data.draw(st.sampled_from(["entries.jsonl", "checkpoint"]))
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(data.draw(bent(good)))
    with suppress(ProvenanceError):
        reader = Ledger.open(folder, ORIGIN)
        assert reader.size == 3
        assert [entry["body"]["n"] for entry in reader.entries()] == [0, 1, 2]
