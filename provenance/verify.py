"""Check an owner's receipt with this one file: ``python verify.py RECEIPT TLOG_PROOF VKEY``.

It needs Python 3.11, the package ``cryptography`` and nothing of the people who made the receipt:
copy it out, read it, run it. Only the VKEY, one line of text, must come from a source you trust.

Proven, each step resting on the one before: (1) the holder of VKEY signed a log of n entries;
(2) one of them commits to this receipt; (3) one names the corpus version with the same roots for
every owner; (4) each record, with owner and licence, is under the record root; (5) no fingerprint
listed as absent is under the sparse root; (6) the price is part of the committed total. *Not*
proven: that a training ran as recorded, or that values were computed well. Source: RFC 9162,
RFC 8785, C2SP signed-note, tlog-checkpoint and tlog-proof.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

CORPUS = ["corpus_version", "record_root", "size", "sparse_root"]
OTHERS = "absences entries format owner owner_pseudonym price records salt sum_path values windows"
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class VerifyError(ValueError):
    """The receipt is not proven; the message says what was expected and what was found."""


def verify_receipt(receipt: dict[str, Any], tlog_proof: str, vkey: str) -> list[str]:
    """The facts that a receipt proves, one sentence each.

    Args:
        receipt: the content of ``OWNER.receipt.json``.
        tlog_proof: the content of ``OWNER.tlog-proof``.
        vkey: the log's verifier key, ``NAME+KEYID+BASE64``.

    Raises:
        VerifyError: something does not hold, so nothing of the receipt may be believed.
    """
    try:
        facts, bodies = _log(receipt, tlog_proof, vkey)
        return facts + _contents(receipt, bodies)
    except MALFORMED as error:
        kind = "" if isinstance(error, VerifyError) else f"malformed ({type(error).__name__}): "
        raise VerifyError(f"{kind}{error}") from error


def verify_text(receipt: dict[str, Any], record_id: str, text: str) -> str:
    """The fact that this text is a record of a receipt that was verified.

    Raises:
        VerifyError: no such record, or another text.
    """
    wanted = [row["text_digest"] for row in receipt["records"] if row["record_id"] == record_id]
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    canonical = unicodedata.normalize("NFC", lines).encode("utf-8", "surrogatepass")
    _same(f"digests of the text of record {record_id}", wanted, [_sha(canonical).hex()])
    return f"record {record_id} is this text"


def _log(receipt: dict[str, Any], proof: str, vkey: str) -> tuple[list[str], dict[str, list[Any]]]:
    """What the log proves, and the bodies of the attached entries by kind."""
    _same(
        "format, fields",
        [1, *sorted(CORPUS + OTHERS.split())],
        [receipt["format"], *sorted(receipt)],
    )
    head, note = proof.split("\n\n", 1)
    magic, extra, position, *hashes = head.split("\n")
    size, root = _checkpoint(note, vkey)
    line, index = _base64(extra.removeprefix("extra ")), int(position.removeprefix("index "))
    spelled = f"c2sp.org/tlog-proof@v1\nextra {base64.b64encode(line).decode()}\nindex {index}"
    _same("head of the proof", spelled, f"{magic}\n{extra}\n{position}")
    path, sides = [_base64(text).hex() for text in hashes], _sides(index, size)
    _prove("the receipt's entry", _sha(b"\x00" + line), sides, path, root)
    entry = _load(line)
    # The attached entries prove themselves; a digest they come after could not cover their paths.
    rest = _jcs({name: value for name, value in receipt.items() if name != "entries"})
    digest = _sha(b"dataworth/receipt/v1\n" + _hex(receipt["salt"]) + _sha(rest)).hex()
    _same("kind of the receipt's entry", "receipt", entry["kind"])
    _same("digest of the receipt", entry["body"]["receipt_sha256"], digest)
    bodies: dict[str, list[Any]] = {"corpus": [], "prices": [], "windows": []}
    for row in receipt["entries"]:
        past, outside = _load(row["entry"].encode()), "body_sha256" in _load(row["entry"].encode())
        _same("fields of an attached entry", 3 + outside, len(row))
        sides, node = _sides(row["index"], size), _sha(b"\x00" + row["entry"].encode())
        _prove(f"entry {row['index']}", node, sides, row["path"], root)
        if outside:
            _same("digest of a body", past["body_sha256"], _sha(row["body"].encode()).hex())
            past["body"] = _load(row["body"].encode())
        bodies.setdefault(past["kind"], []).append(past["body"])
    signed = f"the log {vkey.split('+', 1)[0]} signed {size} entries with root {root.hex()}"
    return [signed, f"its entry {index} of {entry['time']} commits to this receipt"], bodies


def _contents(receipt: dict[str, Any], bodies: dict[str, list[Any]]) -> list[str]:
    claim = {name: receipt[name] for name in CORPUS}
    corpus = [{name: body[name] for name in CORPUS} for body in bodies["corpus"]]
    _same("corpus version named in the log", corpus, [claim])
    facts = [f"corpus version {claim['corpus_version']} of {claim['size']} records is in the log"]
    owner, root = _hex(receipt["owner_pseudonym"]), _hex(claim["record_root"])
    for row in receipt["records"]:
        inner = _sha(b"dataworth/commitment/v1\n" + _hex(row["salt"]) + _hex(row["text_digest"]))
        licence, what = row["licence"].encode("ascii"), f"record {row['record_id']}"
        tail = bytes((row["canonicalisation"], len(licence))) + licence
        node, sides = _sha(b"\x00\x01" + inner + owner + tail), _sides(row["index"], claim["size"])
        _prove(what, node, sides, row["path"], root)
        facts.append(f"{what} is number {row['index']} under licence {row['licence']}")
    for row in receipt["absences"]:
        # At the key's place in the sparse tree stands nothing, or the leaf of another key.
        key, other, depth = row["fingerprint"], row["terminal"], len(row["siblings"])
        bits, shown = (
            f"{int.from_bytes(_hex(text)):0256b}"[:depth] for text in (key, other or key)
        )
        _same("absence: another key, at the key's place", (True, bits), (key != other, shown))
        node, sides = _sha(b"\x02" + _hex(other)) if other else bytes(32), [int(b) for b in bits]
        root = _hex(receipt["sparse_root"])
        _prove("absence", node, sides[::-1], row["siblings"][::-1], root, b"\x03")
        facts.append(f"fingerprint {key} is absent from this version")
    if receipt["price"]:
        price, proof, pools = receipt["price"], receipt["sum_path"], bodies["prices"]
        versions = [pool["corpus_version"] for pool in pools]
        _same("payouts of the corpus version in the log", versions, [claim["corpus_version"]])
        pool = pools[0]
        total, amount = (n.to_bytes(8) for n in (pool["sum_total"], price["price_microunits"]))
        node, sides = _sha(b"\x04" + amount + owner), _sides(proof["index"], pool["sum_size"])
        root = total + _hex(pool["sum_root"])
        _prove("payout", amount + node, sides, proof["path"], root, b"\x05")
        share = f"{price['price_microunits']} of {pool['sum_total']} micro-units"
        facts.append(f"the price is {share} {price['currency']}, and all prices add up to it")
    recorded = [row for body in bodies["windows"] for row in body["windows"]]
    for row in receipt["windows"]:
        steps = f"run {row['run']}, steps {row['first_step']} to {row['last_step']}"
        known = any(row.items() <= other.items() for other in recorded)
        facts.append(f"{steps}: {'in the log' if known else 'stated in this receipt only'}")
    return facts


def _checkpoint(note: str, vkey: str) -> tuple[int, bytes]:
    """Size and root that the holder of the key signed; signatures of others are ignored."""
    name, key_id, encoded = vkey.split("+", 2)
    text, tail = note.rsplit("\n\n", 1)
    key, (*lines, end) = _base64(encoded), tail.split("\n")
    wanted = _sha(name.encode() + b"\n" + key)[:4]
    _same("key id and type of the vkey", (key_id, 1), (wanted.hex(), key[0]))
    blobs = [_base64(line.split(" ")[2]) for line in lines if line.startswith(f"\u2014 {name} ")]
    mine = [blob[4:] for blob in blobs if blob[:4] == wanted]
    _same(f"signatures by {name}, last line", (1, ""), (len(mine), end))
    try:
        Ed25519PublicKey.from_public_bytes(key[1:]).verify(mine[0], f"{text}\n".encode())
    except InvalidSignature:
        raise VerifyError(f"signature: expected one by {name}, got one of another text") from None
    origin, size, root = text.split("\n")
    _same("origin and size of the log", (name, str(int(size))), (origin, size))
    return int(size), _base64(root)


def _sides(index: int, size: int) -> list[int]:
    """Where each sibling stands, 1 = left: from index and size alone, never from the proof."""
    _same(f"index {index} below size {size}", expected=True, got=0 <= index < size)
    inner = (index ^ (size - 1)).bit_length()
    return [index >> level & 1 for level in range(inner)] + [1] * (index >> inner).bit_count()


def _prove(
    what: str, node: bytes, sides: list[int], path: list[str], root: bytes, prefix: bytes = b"\x01"
) -> None:
    """Fold a path to the root. A node is a hash; in the sum tree, 8 bytes of sum stand before it."""
    _same(f"{what}: length of the path", len(sides), len(path))
    for left, text in zip(sides, path, strict=True):
        sibling, width = _hex(text, len(node)), len(node) - 32
        total = sum(int.from_bytes(part[:width]) for part in (node, sibling))
        pair = sibling + node if left else node + sibling
        node = total.to_bytes(width) + _sha(prefix + pair)
    _same(f"{what}: root", root.hex(), node.hex())


def _load(data: bytes) -> Any:
    """JSON in its one canonical spelling, so that no other parser reads something else."""
    _same("digest of the JSON in canonical spelling", _sha(_jcs(json.loads(data))), _sha(data))
    return json.loads(data)


def _jcs(obj: Any) -> bytes:
    return json.dumps(obj, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _hex(text: str, length: int = 32) -> bytes:
    _same(f"{length} bytes in hex", (length, text), (len(text) // 2, bytes.fromhex(text).hex()))
    return bytes.fromhex(text)


def _base64(text: str) -> bytes:
    _same("base64", text, base64.b64encode(base64.b64decode(text)).decode())
    return base64.b64decode(text)


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _same(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise VerifyError(f"{what}: expected {str(expected)[:300]}, got {str(got)[:300]}")


def main(arguments: list[str]) -> int:
    """Print yes and the facts, or no and the reason; the exit code is 0 or 1."""
    try:
        receipt, proof = (Path(name).read_bytes() for name in arguments[:2])
        facts = verify_receipt(_load(receipt), proof.decode(), *arguments[2:])
    except (OSError, RecursionError, TypeError, ValueError) as error:
        sys.stdout.write(f"no: {error}\n")
        return 1
    sys.stdout.write("\n".join(["yes", *(f"- {fact}" for fact in facts), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
