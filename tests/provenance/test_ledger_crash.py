"""The journal: a writer killed at any byte, one fsync an append, torn tails told from damage."""

from __future__ import annotations

import os
import shutil

import pytest

from provenance import (
    FormatError,
    Ledger,
    LedgerError,
    MerkleTree,
    SigningKey,
    checkpoint_text,
    sign_note,
    vkey,
)
from provenance.journal import encode_commit

KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
VKEY = vkey(ORIGIN, KEY.public)
TIME = "2025-01-31T12:00:00Z"


def filled(folder, n):
    ledger = Ledger.open(folder, ORIGIN, KEY)
    ledger.append_many([("test", {"number": number}) for number in range(n)], TIME)
    return ledger


def test_kill_at_every_byte_of_an_append_leaves_the_state_before_or_after(tmp_path):
    """Every prefix of the append's one write: committed entries stay, a torn tail is kept and told."""
    base = tmp_path / "base"
    filled(base, 2)
    before, copy = (base / "entries.jsonl").read_bytes(), (base / "checkpoint").read_bytes()
    written = Ledger.open(base, ORIGIN, KEY)
    written.append_many([("test", {"number": 2}), ("test", {"number": 3})], TIME)
    after = (base / "entries.jsonl").read_bytes()
    assert after.startswith(before)
    for length in range(len(before), len(after) + 1):
        folder = tmp_path / f"cut-{length}"
        shutil.copytree(base, folder)
        (folder / "entries.jsonl").write_bytes(after[:length])
        (folder / "checkpoint").write_bytes(copy)  # it is written after the entries
        whole = length == len(after)
        reader = Ledger.open(folder, ORIGIN)
        assert reader.size == reader.verify(VKEY).size == (4 if whole else 2)
        ledger = Ledger.open(folder, ORIGIN, KEY)
        assert bool(ledger.torn) == (len(before) < length < len(after))
        for name in ledger.torn:
            assert before + (folder / "torn" / name).read_bytes() == after[:length]
        if length % 16 and not whole:
            shutil.rmtree(folder)
            continue
        assert ledger.append("test", {"next": True}, TIME) == reader.size
        assert ledger.verify(VKEY).size == reader.size + 1
        numbers = [entry["body"].get("number") for entry in ledger.entries()]
        assert numbers[:2] == [0, 1]
        shutil.rmtree(folder)


def test_kill_at_every_byte_of_the_first_write_leaves_a_ledger_that_can_be_made(tmp_path):
    """A folder whose creation was cut short, with no copy of the checkpoint yet, is made anew."""
    filled(tmp_path / "base", 0)
    first = (tmp_path / "base" / "entries.jsonl").read_bytes()
    for length in [*range(0, len(first), 5), len(first) - 1, len(first)]:
        folder = tmp_path / f"cut-{length}"
        folder.mkdir()
        (folder / "entries.jsonl").write_bytes(first[:length])
        assert filled(folder, 1).verify(VKEY).size == 1


def test_a_single_append_is_one_fsync_and_so_is_a_batch(tmp_path, monkeypatch):
    """Durable means at least one fsync, and cheap means no second one."""
    ledger, calls, real = filled(tmp_path, 1), [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (calls.append(descriptor), real(descriptor))
    )
    ledger.append("test", {"one": 1}, TIME)
    assert len(calls) == 1
    ledger.append_many([("test", {"n": number}) for number in range(100)], TIME)
    assert len(calls) == 2
    assert ledger.verify(VKEY).size == 102


def test_a_copy_of_the_checkpoint_that_a_power_cut_emptied_is_made_again(tmp_path):
    """The copy is not synced, so it may come back empty or old; entries.jsonl alone is enough."""
    ledger = filled(tmp_path, 2)
    old = ledger.checkpoint
    ledger.append("test", {}, TIME)
    for left in (b"", old):
        (tmp_path / "checkpoint").write_bytes(left)
        assert Ledger.open(tmp_path, ORIGIN).size == 3
        assert Ledger.open(tmp_path, ORIGIN, KEY).checkpoint == ledger.checkpoint
        assert (tmp_path / "checkpoint").read_bytes() == ledger.checkpoint


def test_damage_before_a_later_checkpoint_is_refused_not_set_aside(tmp_path):
    """One byte changed in an old batch, the copy rolled back with it: no writer cuts the rest off."""
    ledger = filled(tmp_path, 2)
    old = ledger.checkpoint
    for number in range(3):
        ledger.append("test", {"later": number}, TIME)
    path = tmp_path / "entries.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"later":0', b'"later":9'))
    for copy in (ledger.checkpoint, old, b""):
        (tmp_path / "checkpoint").write_bytes(copy)
        for key in (None, KEY):
            with pytest.raises(LedgerError, match=r"signed root|was changed behind entry 1"):
                Ledger.open(tmp_path, ORIGIN, key)
    assert path.read_bytes() != whole
    assert not (tmp_path / "torn").exists()


def test_a_checkpoint_that_skips_or_repeats_entries_does_not_count(tmp_path):
    """Signed sizes above or below the lines that stand there are no commits, whoever signed them."""
    filled(tmp_path, 1)
    path = tmp_path / "entries.jsonl"
    good = path.read_bytes()
    line = b'{"body":{},"format":1,"kind":"test","time":"2025-01-31T12:00:00Z"}'
    for size in (0, 1, 3):
        root = MerkleTree.from_data([line] * size).root()
        note = sign_note(checkpoint_text(ORIGIN, size, root), ORIGIN, KEY)
        path.write_bytes(good + encode_commit([line], note))
        assert Ledger.open(tmp_path, ORIGIN).size == 1
    path.write_bytes(good)


def test_a_clock_that_runs_backwards_is_refused(tmp_path):
    """A time before the last entry's: both times are named, nothing is written, the same time is fine."""
    ledger = filled(tmp_path, 1)
    before = (tmp_path / "entries.jsonl").read_bytes()
    for earlier in ("2025-01-31T11:59:59Z", "2024-12-31T23:59:59Z"):
        with pytest.raises(LedgerError, match=f"expected a time from {TIME} on, got {earlier}"):
            ledger.append("test", {}, earlier)
    assert (tmp_path / "entries.jsonl").read_bytes() == before
    assert ledger.append("test", {}, TIME) == 1
    assert ledger.append("test", {}, "2025-01-31T12:00:00+00:00") == 2


def test_an_entry_above_the_limit_of_a_tile_is_refused(tmp_path):
    """32 KiB of body stand in the line, more in a file; the line never passes the tiles' 65,535 bytes."""
    ledger = filled(tmp_path, 0)
    ledger.append("test", {"text": "a" * 32_000}, TIME)
    ledger.append("test", {"text": "\u00e9" * 2_000_000}, TIME)
    assert all(len(ledger.entry_bytes(index)) <= 65_535 for index in range(2))
    with pytest.raises(FormatError, match="at most 64"):
        ledger.append("k" * 65, {}, TIME)
