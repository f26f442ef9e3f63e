"""The verifier as an owner runs it: one copied file, no package of ours, a yes or a no with a reason."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import provenance.verify_standalone as verify_module
from provenance import (
    CorpusState,
    KeyList,
    Ledger,
    ProvenanceError,
    ReceiptOwner,
    SigningKey,
    build_receipt,
    issue_receipts,
    open_key_list,
    root_name,
    sign_key_list,
    sign_note,
    vkey,
)

TIME = "2025-01-31T12:00:00Z"
ORIGIN = "dataworth.example/demo"
OLD, NEW, ROOT = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
ROOT_VKEY = vkey(root_name(ORIGIN), ROOT.public)
VECTORS = Path(__file__).parent / "vectors"
VKEY = (VECTORS / "vkey.txt").read_text().strip()
SOURCE = Path(verify_module.__file__)
REASONS = json.loads((VECTORS / "bad" / "reasons.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """A folder with the verifier and one owner's two files, and nothing else."""
    shutil.copy(SOURCE, tmp_path / "verify_standalone.py")
    for name in ("ada.receipt.json", "ada.tlog-proof"):
        shutil.copy(VECTORS / "good" / name, tmp_path / name)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-I", "verify_standalone.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_an_owner_runs_the_copied_file_and_gets_yes(folder):
    """From a folder without our packages, in isolated mode: exit code 0 and the facts."""
    done = run(folder, "ada.receipt.json", "--key", VKEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("yes\n- the log dataworth.example/demo signed 11 entries")
    assert "the price is 700001 of 1000005 micro-units EUR" in done.stdout
    assert run(folder, "ada.tlog-proof", "--key", VKEY).stdout == done.stdout


def test_every_claim_has_a_line_in_plain_words(folder):
    """Membership, value, standard error, price and its rule, windows, checkpoint, absence, erasure, audit."""
    lines = run(folder, "ada.receipt.json", "--key", VKEY).stdout
    for claim in (
        "is number 0 under licence CC0-1.0",
        "value of owner ada on target_value by shapley: 7000009 nano-nat, standard error not of its own",
        "value of group all on target_value by shapley: 10000000 nano-nat, standard error 123456",
        "the price follows from the value: 1000000 x 7000009 / 10000000, rounded",
        "run run-1, steps 0 to 99, shards [0]: in the log",
        "is the end of run run-1, made from code ",
    ):
        assert lines.count(claim) == 1
    for kind in ("receipt.json", "tlog-proof"):
        shutil.copy(VECTORS / "good" / f"bob-after-erasure.{kind}", folder)
    lines = run(folder, "bob-after-erasure.receipt.json", "--key", VKEY).stdout
    assert "is absent from this version" in lines
    assert re.search(r"erasure request [0-9a-f]{16} is audited; the audit 8{64} says PASS", lines)


def test_after_one_flipped_bit_it_says_no_and_why(folder):
    """One bit in the middle of the receipt: exit code 1, "no", and what was expected."""
    path = folder / "ada.receipt.json"
    data = bytearray(path.read_bytes())
    data[data.index(b'"price_microunits":700001') + len(b'"price_microunits":')] ^= 1
    path.write_bytes(data)
    done = run(folder, "ada.receipt.json", "--key", VKEY)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(
        "no: kind of the receipt's entry, digest of the receipt: expected "
    )


def test_wrong_use_and_missing_files_are_a_no_without_a_traceback(folder):
    """Nothing but yes is ever exit code 0."""
    (folder / "bomb").write_text("[" * 100_000)
    (folder / "bomb.tlog-proof").write_text("")
    (folder / "bomb").rename(folder / "bomb.receipt.json")
    attempts = ((), ("ada.receipt.json",), ("ada.receipt.json", "--key"), ("none", "--key", VKEY))
    attempts += (("ada.receipt.json", VKEY, "--key"), ("ada.receipt.json", "--key", "no vkey"))
    for arguments in (
        *attempts,
        ("bomb.receipt.json", "--key", VKEY),
        ("ada.receipt.json", "--key", VKEY, "--keys"),
        ("ada.receipt.json", "--key", VKEY, "--keys", "none"),
        ("ada.receipt.json", "--key", VKEY, "--list", "ada.tlog-proof"),
        ("verify_standalone.py",) * 3,
    ):
        done = run(folder, *arguments)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith("no: ")


@pytest.mark.parametrize("name", ["white-space", "duplicate-key"])
def test_a_receipt_file_in_another_spelling_is_refused(name, capsys):
    """White space or a duplicate key: another parser could read another receipt."""
    path = VECTORS / "bad" / f"{name}.receipt.json"
    assert verify_module.main([str(path), "--key", VKEY]) == 1
    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert REASONS[name] in out


@pytest.fixture
def rotated(folder):
    """Receipts from before and after a rotation, and the list that the root key signed of both keys."""
    ledger = Ledger.open(folder / "ledger", ORIGIN, OLD)
    state = CorpusState("v", bytes(32), 0, bytes(32))
    receipt = build_receipt(ReceiptOwner("ada", bytes(32), bytes(32)), state, [])
    ledger.append("corpus", state.body(), TIME)
    issue(folder, "before", ledger, receipt)
    keys = KeyList(ORIGIN, 1, ((0, vkey(ORIGIN, OLD.public)),)).rotated(
        ledger.size + 1, vkey(ORIGIN, NEW.public)
    )
    (folder / "keys").write_bytes(sign_key_list(keys, ROOT))
    issue(folder, "after", Ledger.open(folder / "ledger", ORIGIN, NEW, keys=keys), receipt)
    shutil.rmtree(folder / "ledger")
    return folder


def issue(folder, name, ledger, receipt):
    (issued,) = issue_receipts(ledger, [receipt], [0], TIME)
    (folder / f"{name}.receipt.json").write_bytes(issued.receipt)
    (folder / f"{name}.tlog-proof").write_text(issued.tlog_proof)


def test_after_a_rotation_the_root_key_and_its_list_are_enough(rotated):
    """Receipts under the old and the new key, in a folder with the one file: yes, and which key signed."""
    for name, size, key in (("before", 2, OLD), ("after", 3, NEW)):
        done = run(rotated, f"{name}.tlog-proof", "--key", ROOT_VKEY, "--keys", "keys")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[:3:2] == [
            "yes",
            f"- the log {ORIGIN} signed {size} entries with root {done.stdout.split('root ')[2][:64]}",
        ]
        assert (
            f"- key list 2 of {ORIGIN}/root names {vkey(ORIGIN, key.public)} for {size} entries\n"
            in done.stdout
        )
        one = run(rotated, f"{name}.tlog-proof", "--key", vkey(ORIGIN, key.public))
        assert one.returncode == 0
        other = vkey(ORIGIN, (NEW if key is OLD else OLD).public)
        assert run(rotated, f"{name}.tlog-proof", "--key", other).returncode == 1


@pytest.mark.parametrize(
    ("first", "change", "reason"),
    [
        (
            4,
            None,
            r"signatures by dataworth.example/demo, last line",
        ),  # the old key beyond its last size
        (
            1,
            None,
            r"signatures by dataworth.example/demo, last line",
        ),  # the new key before its first
        (3, OLD, "key id|signatures by dataworth.example/demo/root"),  # not signed by the root
        (3, (" ", "  "), "signature"),
        (3, ("v1", "v2"), "signature"),
    ],
)
def test_attack_a_list_that_does_not_give_the_key_this_size(rotated, first, change, reason):
    """A retired key, a future key, another signer, changed text: no, with what was expected."""
    rows = ((0, vkey(ORIGIN, OLD.public)), (first, vkey(ORIGIN, NEW.public)))
    signer = change if isinstance(change, SigningKey) else ROOT
    text = sign_key_list(KeyList(ORIGIN, 2, rows), signer).decode()
    (rotated / "keys").write_text(text.replace(*change, 1) if isinstance(change, tuple) else text)
    name = "before" if first == 1 else "after"
    done = run(rotated, f"{name}.tlog-proof", "--key", ROOT_VKEY, "--keys", "keys")
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(rf"^no: .*({reason}).*expected .*got ", done.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "dataworth key list v2\n{o}\n2\n0 {a}\n3 {b}\n",
        "dataworth key list v1\nother.example/log\n2\n0 {a}\n3 {b}\n",
        "dataworth key list v1\n{o}\n02\n0 {a}\n3 {b}\n",
        "dataworth key list v1\n{o}\n2\n0 {a}\n03 {b}\n",
        "dataworth key list v1\n{o}\n2\n3 {b}\n0 {a}\n",
        "dataworth key list v1\n{o}\n2\n0 {a}\n3 {b}\n3 {b}\n",
        "dataworth key list v1\n{o}\n2\n1 {a}\n3 {b}\n",
        "dataworth key list v1\n{o}\n2\n0 {a}\n3 {b} extra\n",
        "dataworth key list v1\n{o}\n2\n0 {r}\n3 {b}\n",
        "dataworth key list v1\n{o}\n2\n",
        "dataworth key list v1\n{o}\n",
    ],
)
def test_attack_a_key_list_in_another_form_is_refused_though_the_root_signed_it(rotated, text):
    """What the package's own reader refuses, the one file refuses as well."""
    filled = text.format(
        o=ORIGIN, a=vkey(ORIGIN, OLD.public), b=vkey(ORIGIN, NEW.public), r=ROOT_VKEY
    )
    note = sign_note(filled, root_name(ORIGIN), ROOT)
    with pytest.raises(ProvenanceError):
        open_key_list(note, ROOT_VKEY)
    proof = (rotated / "after.tlog-proof").read_text()
    receipt = json.loads((rotated / "after.receipt.json").read_bytes())
    with pytest.raises(verify_module.VerifyError, match=r"key list|malformed"):
        verify_module.verify_receipt(receipt, proof, ROOT_VKEY, note.decode())


def test_a_refusal_does_not_print_the_secrets_of_the_receipt(capsys):
    """The owner may paste the answer into a mail: no salt and no text digest stands in it."""
    for path in sorted((VECTORS / "bad").glob("*.receipt.json")):
        assert verify_module.main([str(path), "--key", VKEY]) == 1
        out = capsys.readouterr().out
        text = path.read_text()
        start = text.index('"records"')
        for word in ('"salt":"', '"text_digest":"'):
            at = text.find(word, start)
            assert at < 0 or text[at + len(word) :][:64] not in out


def test_the_file_is_short_and_needs_cryptography_only():
    """Under 200 lines, blank ones included, standard library and cryptography: an owner can read it all."""
    source = SOURCE.read_text()
    assert len(source.splitlines()) < 200
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"cryptography"}
