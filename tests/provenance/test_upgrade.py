"""A ledger of the first layout is taken over whole, by copy, verify and switch, or refused as it was.

`vectors/older-ledger` was written by the code that had that layout (demo key, three entries, one of them
with a body in a file of its own).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import provenance.upgrade as upgrade_module
from provenance import (
    Ledger,
    LedgerError,
    ProvenanceError,
    SignatureError,
    SigningKey,
    upgrade_ledger,
    verify_consistency,
    vkey,
)
from provenance.entries import decode_entry
from provenance.journal import is_older

OLDER = Path(__file__).parent / "vectors" / "older-ledger"
ORIGIN = "dataworth.example/demo"
KEY = SigningKey.demo()
VKEY = vkey(ORIGIN, KEY.public)
ROOT = bytes.fromhex("dc3c9eaa51107ea0946f3a26518f640bea01e51175df234311db328bd93f3ad7")
TIME = "2025-01-31T12:00:02Z"


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden folder."""
    shutil.copytree(OLDER, tmp_path / "ledger")
    return tmp_path / "ledger"


def content(folder):
    """Every file but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_ledger_of_the_first_layout_is_taken_over_and_goes_on(folder):
    """Same entries, same root, same signed note; the next append extends it, and a second call does nothing."""
    before = content(folder)
    assert is_older(folder)
    taken = upgrade_ledger(folder, ORIGIN, VKEY)
    assert (taken.size, taken.root) == (3, ROOT)
    after = content(folder)
    assert after.pop("entries.jsonl").startswith(before.pop("entries.jsonl"))
    assert after == before
    ledger = Ledger.open(folder, ORIGIN, KEY)
    assert (ledger.size, ledger.root, ledger.torn) == (3, ROOT, ())
    assert [entry["kind"] for entry in ledger.entries()] == ["corpus", "windows", "erasure"]
    assert ledger.append("note", {"n": 1}, TIME) == 3
    verify_consistency(3, 4, ROOT, ledger.root, ledger.consistency_path(3))
    assert ledger.verify(VKEY).size == 4
    assert not is_older(folder)
    assert upgrade_ledger(folder, ORIGIN, VKEY) is None
    assert Ledger.open(folder, ORIGIN).size == 4


@pytest.mark.parametrize("key", [None, KEY])
def test_without_the_upgrade_it_is_refused_with_what_to_do(folder, key):
    """Opening and verifying say that it is of the first layout, and change no byte."""
    before = content(folder)
    with pytest.raises(LedgerError, match="first layout: take it over with upgrade_ledger"):
        Ledger.open(folder, ORIGIN, key)
    assert content(folder) == before


def test_an_empty_ledger_of_the_first_layout_is_taken_over(folder):
    """Size 0: the signed empty log becomes the first line."""
    (folder / "entries.jsonl").write_bytes(b"")
    empty = Ledger.open(folder.parent / "new", ORIGIN, KEY)
    (folder / "checkpoint").write_bytes(empty.checkpoint)
    assert upgrade_ledger(folder, ORIGIN, VKEY).size == 0
    assert Ledger.open(folder, ORIGIN, KEY).append("note", {}, TIME) == 0


def test_what_no_checkpoint_covered_is_kept_aside(folder):
    """An entry line and a torn line behind the signed ones: in `torn/`, not in the history."""
    with (folder / "entries.jsonl").open("ab") as file:
        file.write(b'{"body":{},"format":1}\n{"bod')
    assert upgrade_ledger(folder, ORIGIN, VKEY).size == 3
    (torn,) = (folder / "torn").iterdir()
    assert torn.read_bytes() == b'{"body":{},"format":1}\n{"bod'
    assert Ledger.open(folder, ORIGIN, KEY).size == 3


def damaged(folder, name):
    """What could have happened to the old folder."""
    entries, body = folder / "entries.jsonl", next((folder / "bodies").iterdir())
    data = entries.read_bytes()
    {
        "changed": lambda: entries.write_bytes(data.replace(b"version-1", b"version-2")),
        "cut": lambda: entries.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1]),
        "swapped": lambda: entries.write_bytes(b"".join(sorted(data.splitlines(keepends=True)))),
        "body": lambda: body.write_bytes(body.read_bytes() + b" "),
        "no body": body.unlink,
        "note": lambda: (folder / "checkpoint").write_bytes(b"x\n\n"),
    }[name]()


@pytest.mark.parametrize("name", ["changed", "cut", "swapped", "body", "no body", "note"])
def test_attack_a_damaged_older_ledger_is_refused_and_left_alone(folder, name):
    """Entry changed, cut or exchanged, body changed or gone, no note: our error, not one byte written."""
    damaged(folder, name)
    before = content(folder)
    with pytest.raises(ProvenanceError):
        upgrade_ledger(folder, ORIGIN, VKEY)
    assert content(folder) == before


def test_attack_another_key_or_another_log_is_refused(folder):
    """Who did not sign the old ledger cannot have it taken over."""
    before = content(folder)
    other = SigningKey.from_seed(bytes(32))
    with pytest.raises(SignatureError):
        upgrade_ledger(folder, ORIGIN, vkey(ORIGIN, other.public))
    with pytest.raises(ProvenanceError):
        upgrade_ledger(folder, "other.example/log", vkey("other.example/log", KEY.public))
    assert content(folder) == before


def test_a_kill_at_any_step_leaves_the_old_ledger_or_the_new(folder, monkeypatch):
    """Stopped before each call that writes: the folder is one of the two, and the next call finishes."""
    with (folder / "entries.jsonl").open("ab") as file:
        file.write(b"torn")
    before = content(folder)["entries.jsonl"]

    def killed(*_arguments, **_options):
        raise KeyboardInterrupt

    real = upgrade_module.write_atomic
    for stop in range(3):
        calls = []

        def write(*arguments, calls=calls, stop=stop):
            calls.append(arguments)
            if len(calls) > stop:
                killed()
            real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(upgrade_module, "write_atomic", write)
            if stop == 2:
                patch.setattr(Path, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                upgrade_ledger(folder, ORIGIN, VKEY)
        assert (folder / "entries.jsonl").read_bytes() == before
    assert upgrade_ledger(folder, ORIGIN, VKEY).size == 3
    assert Ledger.open(folder, ORIGIN, KEY).size == 3
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_an_unknown_format_of_an_entry_is_refused_with_expected_and_got(folder, number):
    """There is one format of an entry; a ledger signed over another one says which it knows."""
    line = (OLDER / "entries.jsonl").read_bytes().splitlines()[0]
    assert decode_entry(line, folder / "bodies")["format"] == 1
    changed = json.dumps(json.loads(line) | {"format": number}).encode()
    with pytest.raises(ProvenanceError, match=r"unknown entry format .*, expected 1|null"):
        decode_entry(changed, folder / "bodies")
