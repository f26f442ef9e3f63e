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
