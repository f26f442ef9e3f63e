# fmt: off
"""Check an owner's receipt with this one file: ``python verify_standalone.py FILE --key KEY [--keys LIST]``.

FILE is OWNER.receipt.json or OWNER.tlog-proof, the other one lies beside it. It needs Python 3.11, the package ``cryptography``
and nothing of the people who made the receipt: copy it out, read it, run it. Only the KEY, one line of text, must come from a
source you trust. If it is a root key (NAME/root+...), LIST is the key list that it signed: which key signs which sizes of the
log (the ledger's file ``keys``, from anywhere). Each step rests on the one before: the holder of the key signed a log of n
entries; one commits to this receipt; one names the corpus version with the same roots for every owner; each record, with owner
and licence, is under the record root; no fingerprint listed as absent is under the sparse root; value and price are part of
committed totals, and the price follows from the value; windows, run, request and audit stand in the log. *Not* proven: that a
training ran as recorded, or that values were computed well. RFC 9162, RFC 8785, C2SP tlog-proof.
"""

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
OTHERS = "absences entries erasures format owner owner_pseudonym price records salt sum_path values windows"

class VerifyError(ValueError):
    """The receipt is not proven; the message says what was expected and what was found."""

def verify_receipt(receipt: dict[str, Any], tlog_proof: str, vkey: str, keys: str | None = None) -> list[str]:
    """The facts that the files prove, or VerifyError. Args: contents of both files; the log's vkey, or the root key's with its list ``keys``."""
    try:
        facts, bodies = _log(receipt, tlog_proof, vkey, keys)
        return facts + _contents(receipt, bodies)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise VerifyError(f"{'' if isinstance(error, VerifyError) else f'malformed ({type(error).__name__}): '}{error}") from error

def verify_text(receipt: dict[str, Any], record_id: str, text: str) -> str:
    """The fact that this text is a record of a receipt that was verified; VerifyError if it is none."""
    wanted = [row["text_digest"] for row in receipt["records"] if row["record_id"] == record_id]
    canonical = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).encode("utf-8", "surrogatepass")
    _same(f"digests of the text of record {record_id}", wanted, [_sha(canonical).hex()])
    return f"record {record_id} is this text"

def _log(receipt: dict[str, Any], proof: str, vkey: str, keys: str | None) -> tuple[list[str], dict[str, list[Any]]]:
    """What the log proves, and the bodies of the attached entries by kind."""
    _same("format, fields", [1, *sorted(CORPUS + OTHERS.split())], [receipt["format"], *sorted(receipt)])
    head, note = proof.split("\n\n", 1)
    vkey, listed = _listed(keys, vkey, int(note.split("\n")[1])) if keys is not None else (vkey, [])
    (magic, extra, position, *hashes), (origin, count, top) = head.split("\n"), _signed(note, vkey)
    size, root, line, index = int(count), _base64(top), _base64(extra.removeprefix("extra ")), int(position.removeprefix("index "))
    _same("origin and size of the log", (vkey.split("+", 1)[0], str(size)), (origin, count))
    _same("head of the proof", ["c2sp.org/tlog-proof@v1", f"extra {base64.b64encode(line).decode()}", f"index {index}"], [magic, extra, position])
    _prove("the receipt's entry", _sha(b"\x00" + line), _sides(index, size), [_base64(h).hex() for h in hashes], root)
    # The attached entries prove themselves; a digest they come after could not cover their paths.
    entry, rest = _load(line), _sha(_jcs({name: value for name, value in receipt.items() if name != "entries"}))
    digest = _sha(b"dataworth/receipt/v1\n" + _hex(receipt["salt"]) + rest).hex()
    _same("kind of the receipt's entry, digest of the receipt", ("receipt", entry["body"]["receipt_sha256"]), (entry["kind"], digest))
    bodies: dict[str, list[Any]] = {kind: [] for kind in ("corpus", "tokens", "values", "prices", "run", "windows", "erasure", "audit")}
    for row in receipt["entries"]:
        past, outside = _load(row["entry"].encode()), "body_sha256" in _load(row["entry"].encode())
        _same("fields of an attached entry", 3 + outside, len(row))
        _prove(f"entry {row['index']}", _sha(b"\x00" + row["entry"].encode()), _sides(row["index"], size), row["path"], root)
        if outside:
            _same("digest of a body", past["body_sha256"], _sha(row["body"].encode()).hex())
            past["body"] = _load(row["body"].encode())
        bodies.setdefault(past["kind"], []).append(past["body"])
    signed = f"the log {origin} signed {size} entries with root {root.hex()}"
    return [*listed, signed, f"its entry {index} of {entry['time']} commits to this receipt"], bodies

def _contents(receipt: dict[str, Any], bodies: dict[str, list[Any]]) -> list[str]:
    claim, owner = {name: receipt[name] for name in CORPUS}, _hex(receipt["owner_pseudonym"])
    _same("corpus version named in the log", [{name: body[name] for name in CORPUS} for body in bodies["corpus"]], [claim])
    facts = [f"corpus version {claim['corpus_version']} of {claim['size']} records is in the log"]
    for row in receipt["records"]:
        licence, what = row["licence"].encode("ascii"), f"record {row['record_id']}"
        leaf = b"\x00\x01" + _sha(b"dataworth/commitment/v1\n" + _hex(row["salt"]) + _hex(row["text_digest"])) + owner + bytes((row["canonicalisation"], len(licence))) + licence
        _prove(what, _sha(leaf), _sides(row["index"], claim["size"]), row["path"], _hex(claim["record_root"]))
        facts.append(f"{what} is number {row['index']} under licence {row['licence']}")
    for row in receipt["absences"]:
        key, other, depth = row["fingerprint"], row["terminal"], len(row["siblings"])
        bits, shown = (f"{int.from_bytes(_hex(text)):0256b}"[:depth] for text in (key, other or key))
        _same("absence: another key, at the key's place", (True, bits), (key != other, shown))
        node = _sha(b"\x02" + _hex(other)) if other else bytes(32)
        _prove("absence", node, [int(b) for b in bits[::-1]], row["siblings"][::-1], _hex(receipt["sparse_root"]), b"\x03")
        facts.append(f"fingerprint {key} is absent from this version")
    facts += [f"values were measured on the proxy {body['proxy']}; against a larger model: {body['transfer']}" for body in bodies["values"] if "proxy" in body]
    worth = -1
    for item in receipt["values"]:
        row, (named,) = item["row"], bodies["values"]
        mine = row["subject_kind"] == "owner"  # the tree adds up owners; their groups stand in it with 0
        worth = max(0, row["value_nano"]) if mine else worth
        _add_up("value", (owner if mine else bytes(32)) + _sha(_jcs(row)), worth if mine else 0, item, named)
        facts.append(f"value of {row['subject_kind']} {row['subject_id']} on {row['target']} by {row['method']}: {row['value_nano']} nano-{row['unit']}, standard error {row.get('se_nano', 'not of its own')}")
    if receipt["price"]:
        price, (pool,) = receipt["price"], bodies["prices"] or [{"corpus_version": "no entry of kind prices"}]
        _same("payouts of the corpus version in the log", claim["corpus_version"], pool["corpus_version"])
        _add_up("payout", owner, price["price_microunits"], receipt["sum_path"], pool)
        facts.append(f"the price is {price['price_microunits']} of {pool['sum_total']} micro-units {price['currency']}, and all prices add up to it")
        if worth >= 0 and "value_total" not in pool:
            facts.append(f"the price is by rule {pool['rule']}, which is more than one proportion: dataworth dispute recomputes it")
        elif worth >= 0:
            total = pool["value_total"]
            gap, rule = abs(price["price_microunits"] * total - pool["payable"] * worth), f"{pool['payable']} x {worth} / {total}"
            _same("table of values under the prices", bodies["values"][0]["table"], pool["values"])
            _same(f"price by the rule {rule}", (True, True), (gap < max(1, total), worth <= total))
            facts.append(f"the price follows from the value: {rule}, rounded")
    recorded = [row for body in bodies["windows"] for row in body["windows"]]
    for row in receipt["windows"]:
        steps = f"run {row['run']}, steps {row['first_step']} to {row['last_step']}, shards {row['shards']}"
        for width in (tokens["shard_leaves"] for tokens in bodies["tokens"]):
            _same(f"{steps}: a shard of this owner's records", expected=True, got=any(record["index"] // width in row["shards"] for record in receipt["records"]))
        facts.append(f"{steps}: {'in the log' if any(row.items() <= r.items() for r in recorded) else 'stated in this receipt only'}")
    made = [run for run in bodies["run"] if recorded and run["run"] == recorded[-1]["run"]]
    facts += [f"checkpoint {recorded[-1]['state_digest']} is the end of run {run['run']}, made from {', '.join(f'{k} {v}' for k, v in run['versions'].items())}" for run in made]
    for row in receipt["erasures"]:
        request, audit = _sha(_jcs(row["identity"])).hex()[:16], {name: row[name] for name in ("audit", "verdict")}
        _same(f"state of request {request}", True, row["state"] in [b["state"] for b in bodies["erasure"] if b["request"] == request])  # noqa: FBT003
        _same("audit and verdict in the log", True, any(audit.items() <= b.items() for b in bodies["audit"]))  # noqa: FBT003
        facts.append(f"erasure request {request} is {row['state']}; the audit {row['audit']} says {row['verdict']}")
    return facts

def _listed(keys: str, root: str, size: int) -> tuple[str, list[str]]:
    """The key that the root key's list names for a log of this size, and that as a fact."""
    (head, origin, serial, *rows), name = _signed(keys, root), root.split("+", 1)[0]
    firsts = {int(row.split(" ")[0]): row.split(" ")[1] for row in rows}
    spelled = [f"{origin}/root", "dataworth key list v1", str(int(serial)), 0, {origin}, *(f"{first} {firsts[first]}" for first in sorted(firsts))]
    _same("root, head and rows of the key list", spelled, [name, head, serial, min(firsts), {key.split("+", 1)[0] for key in firsts.values()}, *rows])
    key = firsts[max(first for first in firsts if first <= size)]
    return key, [f"key list {serial} of {name} names {key} for {size} entries"]

def _signed(note: str, vkey: str) -> list[str]:
    """The lines that the holder of the key signed; signatures of others are ignored."""
    name, key_id, encoded = vkey.split("+", 2)
    text, tail = note.rsplit("\n\n", 1)
    key, (*lines, end) = _base64(encoded), tail.split("\n")
    wanted = _sha(name.encode() + b"\n" + key)[:4]
    _same("key id and type of the vkey", (key_id, 1), (wanted.hex(), key[0]))
    mine = [blob[4:] for line in lines if line.startswith(f"\u2014 {name} ") and (blob := _base64(line.split(" ")[2]))[:4] == wanted]
    _same(f"signatures by {name}, last line", (1, ""), (len(mine), end))
    try:
        Ed25519PublicKey.from_public_bytes(key[1:]).verify(mine[0], f"{text}\n".encode())
    except InvalidSignature:
        raise VerifyError(f"signature: expected one by {name}, got one of another text") from None
    return text.split("\n")

def _sides(index: int, size: int) -> list[int]:
    """Where each sibling stands, 1 = left: from index and size alone, never from the proof."""
    _same(f"index {index} below size {size}", expected=True, got=0 <= index < size)
    inner = (index ^ (size - 1)).bit_length()
    return [index >> level & 1 for level in range(inner)] + [1] * (index >> inner).bit_count()

def _prove(what: str, node: bytes, sides: list[int], path: list[str], root: bytes, prefix: bytes = b"\x01") -> None:
    """Fold a path to the root. A node is a hash; in a sum tree, 8 bytes of sum stand before it."""
    _same(f"{what}: length of the path", len(sides), len(path))
    for left, text in zip(sides, path, strict=True):
        sibling, width = _hex(text, len(node)), len(node) - 32
        total = sum(int.from_bytes(part[:width]) for part in (node, sibling))
        node = total.to_bytes(width) + _sha(prefix + (sibling + node if left else node + sibling))
    _same(f"{what}: root", root.hex(), node.hex())

def _add_up(what: str, label: bytes, amount: int, proof: dict[str, Any], tree: dict[str, Any]) -> None:
    """A labelled amount is part of a sum tree's total."""
    node, root = amount.to_bytes(8) + _sha(b"\x04" + amount.to_bytes(8) + label), tree["sum_total"].to_bytes(8) + _hex(tree["sum_root"])
    _prove(what, node, _sides(proof["index"], tree["sum_size"]), proof["path"], root, b"\x05")

def _sha(data: bytes) -> bytes: return hashlib.sha256(data).digest()
def _jcs(obj: Any) -> bytes: return json.dumps(obj, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
def _load(data: bytes) -> Any:
    """JSON in its one canonical spelling, so that no other parser reads something else."""
    _same("digest of the JSON in canonical spelling", _sha(_jcs(json.loads(data))), _sha(data))
    return json.loads(data)
def _hex(text: str, length: int = 32) -> bytes:
    _same(f"{length} bytes in hex", (length, text), (len(text) // 2, bytes.fromhex(text).hex()))
    return bytes.fromhex(text)
def _base64(text: str) -> bytes:
    _same("base64", text, base64.b64encode(base64.b64decode(text)).decode())
    return base64.b64decode(text)
def _same(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise VerifyError(f"{what}: expected {str(expected)[:300]}, got {str(got)[:300]}")

def main(arguments: list[str]) -> int:
    """Print yes and the facts, or no and the reason; the exit code is 0 or 1."""
    try:
        options = (["--key", "--keys"][:max(1, len(arguments) // 2)], 1)
        _same("usage: python verify_standalone.py FILE --key KEY [--keys LIST]", options, (arguments[1::2], len(arguments) % 2))
        stem = arguments[0].removesuffix(".receipt.json").removesuffix(".tlog-proof")
        receipt, *texts = (Path(name).read_bytes() for name in (f"{stem}.receipt.json", f"{stem}.tlog-proof", *arguments[4:]))
        facts = verify_receipt(_load(receipt), texts[0].decode(), arguments[2], *(text.decode() for text in texts[1:]))
        text = "\n".join(["yes", *(f"- {fact}" for fact in facts), ""])
    except (IndexError, OSError, RecursionError, TypeError, ValueError) as error:
        text = f"no: {error}\n"
    sys.stdout.write(text)
    return int(text.startswith("no: "))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
