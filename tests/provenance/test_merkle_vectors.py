"""RFC 9162 test vectors, good and bad ones: those of transparency-dev/merkle, and our own.

*Ours* stand in ``vectors/trees`` and are made from the RFC's recursion alone, so they run everywhere;
``vectors/trees.py`` tells their fields. *Theirs*: 518 cases as JSON lines beside the repository (``../shared/data/rfc9162``); the tests skip visibly
where the folder is missing. ``wantErr`` marks what a verifier must refuse.

Some consistency vectors write ``don't care 1`` where a root stands. Our verifier refuses roots that
are not 32 bytes long, so these placeholders are hashed: equal ones stay equal, others different.
Six subtree vectors accept an *empty* subtree, which proves nothing about any leaf, two of them under
a random root. Ours refuses an empty subtree, as RFC 9162 and the vectors do for an empty old tree.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from provenance import (
    VerificationError,
    sha256,
    verify_consistency,
    verify_inclusion,
    verify_subtree_consistency,
    verify_subtree_inclusion,
)
from tests.provenance.vectors import trees

OWN = Path(__file__).parent / "vectors" / "trees"
FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "rfc9162"
COUNTS = {"inclusion": 98, "consistency": 98, "subtreeinclusion": 204, "subtreeconsistency": 118}


def check(kind: str, case: dict) -> None:
    def hash_of(name: str) -> bytes:
        digest = base64.b64decode(case[name] or "")
        return sha256(digest) if digest.startswith(b"don't care") else digest

    proof = [base64.b64decode(text) for text in case["proof"] or []]
    if kind == "inclusion":
        leaf, root = hash_of("leafHash"), hash_of("root")
        verify_inclusion(leaf, case["leafIdx"], case["treeSize"], proof, root)
    elif kind == "consistency":
        roots = hash_of("root1"), hash_of("root2")
        verify_consistency(case["size1"], case["size2"], *roots, proof)
    elif kind == "subtreeinclusion":
        place = case["leafIdx"], case["start"], case["end"]
        verify_subtree_inclusion(hash_of("leafHash"), *place, proof, hash_of("root"))
    else:
        place = case["start"], case["end"], case["size"]
        verify_subtree_consistency(*place, hash_of("root1"), hash_of("root2"), proof)


@pytest.mark.parametrize("kind", COUNTS)
def test_every_own_vector_gets_its_answer(kind):
    """Each case of the committed set: good ones hold, every named probe is refused with our error."""
    cases = [json.loads(line) for line in (OWN / f"{kind}.jsonl").read_text().splitlines()]
    assert len(cases) >= COUNTS[kind]
    wrong = []
    for case in cases:
        try:
            check(kind, case)
            refused = False
        except VerificationError:
            refused = True
        if refused != case["wantErr"]:
            wrong.append(case)
    assert wrong == []
    assert sum(not case["wantErr"] for case in cases) >= 9


def test_own_vectors_are_what_the_recursion_gives():
    """The committed files are made anew from the oracle and come out byte for byte."""
    made = trees.files()
    assert {path.name: path.read_bytes() for path in OWN.iterdir()} == made
    cases = [json.loads(line) for data in made.values() for line in data.splitlines()]
    assert len(cases) >= sum(COUNTS.values())


@pytest.mark.parametrize("kind", COUNTS)
def test_every_published_vector_gets_its_published_answer(kind):
    """Each good vector is accepted, each bad one is refused with our error and no other."""
    path = FOLDER / f"{kind}.jsonl"
    if not path.exists():
        pytest.skip(f"vectors are not beside the repository: {path.name}")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(cases) == COUNTS[kind]
    assert {case["wantErr"] for case in cases} == {True, False}
    wrong = []
    for case in cases:
        try:
            check(kind, case)
            refused = False
        except VerificationError:
            refused = True
        vacuous = kind == "subtreeconsistency" and case["start"] == case["end"]
        assert not (vacuous and not refused)
        if not vacuous and refused != case["wantErr"]:
            wrong.append(case["case"])
    assert wrong == []
