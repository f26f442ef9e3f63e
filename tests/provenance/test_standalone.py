"""The verifier as an owner runs it: one copied file, no package of ours, a yes or a no with a reason."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import provenance.verify as verify_module

VECTORS = Path(__file__).parent / "vectors"
VKEY = (VECTORS / "vkey.txt").read_text().strip()
SOURCE = Path(verify_module.__file__)
REASONS = json.loads((VECTORS / "bad" / "reasons.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """A folder with the verifier and one owner's two files, and nothing else."""
    shutil.copy(SOURCE, tmp_path / "verify.py")
    for name in ("ada.receipt.json", "ada.tlog-proof"):
        shutil.copy(VECTORS / "good" / name, tmp_path / name)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-I", "verify.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_an_owner_runs_the_copied_file_and_gets_yes(folder):
    """From a folder without our packages, in isolated mode: exit code 0 and the facts."""
    done = run(folder, "ada.receipt.json", "ada.tlog-proof", VKEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("yes\n- the log dataworth.example/demo signed 6 entries")
    assert "the price is 700001 of 1000005 micro-units EUR" in done.stdout


def test_after_one_flipped_bit_it_says_no_and_why(folder):
    """One bit in the middle of the receipt: exit code 1, "no", and what was expected."""
    path = folder / "ada.receipt.json"
    data = bytearray(path.read_bytes())
    data[data.index(b'"price_microunits":700001') + len(b'"price_microunits":')] ^= 1
    path.write_bytes(data)
    done = run(folder, "ada.receipt.json", "ada.tlog-proof", VKEY)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no: digest of the receipt: expected ")


def test_wrong_use_and_missing_files_are_a_no_without_a_traceback(folder):
    """Nothing but yes is ever exit code 0."""
    (folder / "bomb").write_text("[" * 100_000)
    attempts = ((), ("ada.receipt.json",), ("none", "none", VKEY), ("verify.py",) * 3)
    for arguments in (*attempts, ("bomb", "ada.tlog-proof", VKEY)):
        done = run(folder, *arguments)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith("no: ")


@pytest.mark.parametrize("name", ["white-space", "duplicate-key"])
def test_a_receipt_file_in_another_spelling_is_refused(name, capsys):
    """White space or a duplicate key: another parser could read another receipt."""
    path = VECTORS / "bad" / f"{name}.receipt.json"
    proof = path.with_name(f"{name}.tlog-proof")
    assert verify_module.main([str(path), str(proof), VKEY]) == 1
    out = capsys.readouterr().out
    assert out.startswith("no: ")
    assert REASONS[name] in out


def test_a_refusal_does_not_print_the_secrets_of_the_receipt(capsys):
    """The owner may paste the answer into a mail: no salt and no text digest stands in it."""
    for path in sorted((VECTORS / "bad").glob("*.receipt.json")):
        proof = path.with_name(path.name.replace(".receipt.json", ".tlog-proof"))
        assert verify_module.main([str(path), str(proof), VKEY]) == 1
        out = capsys.readouterr().out
        text = path.read_text()
        start = text.index('"records"')
        for word in ('"salt":"', '"text_digest":"'):
            at = text.find(word, start)
            assert at < 0 or text[at + len(word) :][:64] not in out


def test_the_file_is_short_and_needs_cryptography_only():
    """Under 200 lines with text, standard library and cryptography: an owner can read it all."""
    source = SOURCE.read_text()
    assert sum(bool(line.strip()) for line in source.splitlines()) < 200
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"cryptography"}
