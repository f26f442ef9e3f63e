"""Make the tree vectors, good and bad: ``python tests/provenance/vectors/trees.py``.

An equivalent of the published RFC 9162 set of transparency-dev/merkle, in its field names, made from
the RFC's recursion alone (``tests/oracles``): none of the code under test takes part. Four kinds
(inclusion, consistency, and both for subtrees); each good case stands beside the bad ones that are
made from it by a named probe, the probes of that project: wrong leaf, wrong root, index and size
moved, proof cut, padded, reordered, one bit flipped, one hash in place of another.

Bytes are base64, ``wantErr`` says what a verifier must answer. Verifiers in other languages can be
tested on the files alone.

    inclusion            leafIdx treeSize leafHash root proof
    consistency          size1 size2 root1 root2 proof
    subtreeinclusion     leafIdx start end leafHash root proof      (root is the subtree's)
    subtreeconsistency   start end size root1 root2 proof           (root1 is the subtree's)
"""

from __future__ import annotations

import base64
import importlib.util
import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "trees"
_SPEC = importlib.util.spec_from_file_location(
    "merkle_recursion", Path(__file__).resolve().parents[2] / "oracles" / "merkle_recursion.py"
)
oracle = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(oracle)
LEAVES = [b"", b"\x00", b"\x10", b" !", b"01", b"@ABC", b"PQRSTUVW", b"`abcdefghijklmno"]
LEAVES += [b"vector leaf %d" % index for index in range(8, 40)]
STRANGER = sha256(b"stranger").digest()

INCLUSION = [
    (0, 1),
    (0, 2),
    (1, 2),
    (1, 3),
    (2, 3),
    (0, 8),
    (5, 8),
    (2, 5),
    (4, 5),
    (6, 7),
    (12, 13),
]
INCLUSION += [(31, 40), (39, 40)]
CONSISTENCY = [
    (1, 1),
    (1, 2),
    (2, 3),
    (1, 8),
    (3, 8),
    (4, 8),
    (6, 8),
    (8, 8),
    (2, 5),
    (5, 7),
    (7, 13),
]
CONSISTENCY += [(8, 40), (33, 40)]
SUBTREES = [(0, 1), (0, 4), (0, 6), (4, 8), (8, 13), (12, 13), (16, 32), (32, 40), (0, 40)]
PARTS = [
    (0, 1, 1),
    (0, 4, 5),
    (0, 6, 8),
    (4, 8, 8),
    (4, 6, 13),
    (8, 13, 13),
    (8, 13, 21),
    (12, 13, 40),
]
PARTS += [(16, 32, 40), (32, 40, 40), (0, 40, 40)]

Case = dict[str, Any]


def hashed(index: int) -> bytes:
    """The leaf hash at an index."""
    return sha256(b"\x00" + LEAVES[index]).digest()


def flip(digest: bytes, bit: int = 4) -> bytes:
    """The digest with one bit turned round."""
    return (int.from_bytes(digest, "big") ^ 1 << bit).to_bytes(32, "big")


def probes(proof: list[bytes], root: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Every way to bend a proof's list of hashes, by name."""
    yield "trailing garbage", [*proof, STRANGER]
    yield "trailing root", [*proof, root]
    yield "preceding garbage", [STRANGER, *proof]
    yield "preceding root", [root, *proof]
    yield "hash of no bytes at the end", [*proof, b""]
    if proof:
        yield "truncated", proof[:-1]
        yield "first hash left out", proof[1:]
        yield "empty", []
        yield "last hash twice", [*proof, proof[-1]]
        yield "last hash cut by a byte", [*proof[:-1], proof[-1][:-1]]
        for place in range(len(proof)):
            yield (
                f"modified @{place} bit 4",
                [*proof[:place], flip(proof[place]), *proof[place + 1 :]],
            )
    if len(proof) > 1:
        yield "reversed", proof[::-1]
        yield "cut at another place", [proof[0] + proof[1][:1], proof[1][1:], *proof[2:]]


def inclusion() -> Iterator[Case]:
    """A leaf in a tree."""
    for index, size in INCLUSION:
        data = LEAVES[:size]
        root, proof = oracle.root(data), oracle.inclusion(index, data)
        good: Case = {
            "leafIdx": index, "treeSize": size, "leafHash": hashed(index), "root": root, "proof": proof,
        }  # fmt: skip
        yield good | {"desc": f"leaf {index} of {size}", "wantErr": False}
        bad: dict[str, Case] = {
            "wrong leaf": {"leafHash": STRANGER},
            "leaf data for the leaf hash": {"leafHash": LEAVES[index]},
            "root as leaf": {"leafHash": root},
            "wrong root": {"root": STRANGER},
            "root of another size": {"root": oracle.root(LEAVES[: size + 1])},
            "swapped leaf and root": {"leafHash": root, "root": hashed(index)},
            "index behind the end": {"leafIdx": size},
            "index xor 1": {"leafIdx": index ^ 1},
            "size 0": {"treeSize": 0},
            "size of half": {"treeSize": size // 2},
            "size of double": {"treeSize": 2 * size},
        }
        bad |= {f"proof: {name}": {"proof": bent} for name, bent in probes(proof, root)}
        yield from labelled(good, bad)


def consistency() -> Iterator[Case]:
    """A tree at the beginning of a larger one."""
    for old, new in CONSISTENCY:
        data = LEAVES[:new]
        roots, proof = (oracle.root(data[:old]), oracle.root(data)), oracle.consistency(old, data)
        good: Case = {
            "size1": old, "size2": new, "root1": roots[0], "root2": roots[1], "proof": proof,
        }  # fmt: skip
        yield good | {"desc": f"{old} in {new}", "wantErr": False}
        bad: dict[str, Case] = {
            "wrong first root": {"root1": STRANGER},
            "wrong second root": {"root2": STRANGER},
            "first size 0": {"size1": 0, "root1": oracle.root([])},
            "first size above the second": {"size1": new + 1},
            "second size of double": {"size2": 2 * new},
        }
        if old != new:
            bad["swapped roots"] = {"root1": roots[1], "root2": roots[0]}
            bad["swapped sizes"] = {"size1": new, "size2": old}
            bad["first size plus 1"] = {"size1": old + 1}
        bad |= {f"proof: {name}": {"proof": bent} for name, bent in probes(proof, roots[1])}
        yield from labelled(good, bad)


def subtree_inclusion() -> Iterator[Case]:
    """A leaf in a subtree: a record in a shard."""
    for start, end in SUBTREES:
        part = LEAVES[start:end]
        for index in sorted({start, (start + end) // 2, end - 1}):
            root, proof = oracle.root(part), oracle.inclusion(index - start, part)
            good: Case = {
                "leafIdx": index, "start": start, "end": end, "leafHash": hashed(index), "root": root, "proof": proof,
            }  # fmt: skip
            yield good | {"desc": f"leaf {index} of [{start}, {end})", "wantErr": False}
            bad: dict[str, Case] = {
                "wrong leaf": {"leafHash": STRANGER},
                "wrong root": {"root": STRANGER},
                "index behind the end": {"leafIdx": end},
                "empty subtree": {"end": start},
                "start that is not aligned": {
                    "start": start + 1,
                    "end": end + 1,
                    "leafIdx": index + 1,
                },
            }
            if start:
                bad["index before the start"] = {"leafIdx": start - 1}
            if end - start == 1:
                del bad["start that is not aligned"]  # every place is a subtree of one leaf
            bad |= {f"proof: {name}": {"proof": bent} for name, bent in probes(proof, root)}
            yield from labelled(good, bad)


def subtree_consistency() -> Iterator[Case]:
    """A subtree in a tree: a shard in a corpus."""
    for start, end, size in PARTS:
        data = LEAVES[:size]
        roots = oracle.root(data[start:end]), oracle.root(data)
        proof = oracle.subtree(start, end, data)
        good: Case = {
            "start": start, "end": end, "size": size, "root1": roots[0], "root2": roots[1], "proof": proof,
        }  # fmt: skip
        yield good | {"desc": f"[{start}, {end}) in {size}", "wantErr": False}
        bad: dict[str, Case] = {
            "wrong subtree root": {"root1": STRANGER},
            "wrong root": {"root2": STRANGER},
            "empty subtree": {"end": start},
            "end behind the tree": {"size": end - 1},
            "start that is not aligned": {"start": start + 1, "end": end + 2},
        }
        if (start, end) != (0, size):
            bad["swapped roots"] = {"root1": roots[1], "root2": roots[0]}
        bad |= {f"proof: {name}": {"proof": bent} for name, bent in probes(proof, roots[1])}
        yield from labelled(good, bad)


def labelled(good: Case, bad: dict[str, Case]) -> Iterator[Case]:
    """Bad cases with the name of their probe; what a probe leaves as it was is no case."""
    for name, change in bad.items():
        if any(good[field] != value for field, value in change.items()):
            yield good | change | {"desc": name, "wantErr": True}


KINDS = {
    "inclusion": inclusion,
    "consistency": consistency,
    "subtreeinclusion": subtree_inclusion,
    "subtreeconsistency": subtree_consistency,
}


def files() -> dict[str, bytes]:
    """Content of every vector file by its name."""
    out = {}
    for kind, cases in KINDS.items():
        lines = [json.dumps(encoded(case), sort_keys=True) + "\n" for case in cases()]
        out[f"{kind}.jsonl"] = "".join(lines).encode()
    return out


def encoded(case: Case) -> Case:
    """The case with its bytes in base64."""
    text = {name: b64(value) for name, value in case.items() if isinstance(value, bytes)}
    return case | text | {"proof": [b64(digest) for digest in case["proof"]]}


def b64(data: bytes) -> str:
    """Standard base64."""
    return base64.b64encode(data).decode()


def main() -> None:
    """Write all vector files."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in files().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
