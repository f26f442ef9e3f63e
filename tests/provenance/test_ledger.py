"""The ledger: append-only, readable after any crash, safe with two writers, never repaired by guess."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance import (
    FormatError,
    Ledger,
    LedgerError,
    MerkleTree,
    RootMismatchError,
    SignatureError,
    SigningKey,
    VerificationError,
    checkpoint_text,
    open_checkpoint,
    sign_note,
    verify_consistency,
    verify_inclusion,
    vkey,
)
from provenance.journal import encode_commit
from tests.oracles import merkle_recursion as oracle

ROOT = Path(__file__).resolve().parents[2]
KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
VKEY = vkey(ORIGIN, KEY.public)
TIME = "2025-01-31T12:00:00Z"

# A writer in a process of its own. Its last argument is a plan: "append N" appends and exits,
# "forever" appends until it is killed, "torn" writes an entry and only half of its checkpoint.
WRITER = """
import sys, time
from pathlib import Path
import provenance.ledger as ledger_module
from provenance import Ledger, SigningKey

folder, name, plan = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
ledger = Ledger.open(folder, sys.argv[4], SigningKey.demo())
if plan == "torn":
    def half(lines, note, whole=ledger_module.journal.encode_commit):
        return whole(lines, note)[:-90]
    def hang(descriptor):
        print("entries are on disk", flush=True)
        time.sleep(600)
    ledger_module.journal.encode_commit, ledger_module.os.fsync = half, hang
print("ready", flush=True)
number = 0
while plan == "forever" or number < int(plan.removeprefix("append ") if plan != "torn" else 1):
    ledger.append("test", {"writer": name, "number": number}, "2025-01-31T12:00:00Z")
    number += 1
"""


def start(folder: Path, name: str, plan: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(folder), name, plan, ORIGIN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_for(line: str, process: subprocess.Popen) -> None:
    while (got := process.stdout.readline()) != f"{line}\n":
        assert got, f"the writer ended before it said {line!r}"


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def filled(folder: Path, n: int) -> Ledger:
    ledger = Ledger.open(folder, ORIGIN, KEY)
    ledger.append_many([("test", {"number": number}) for number in range(n)], TIME)
    return ledger


def forge(folder: Path, *lines: bytes, key: SigningKey = KEY) -> None:
    """A ledger of any lines, signed, as the holder of the key can write it."""
    folder.mkdir(exist_ok=True)
    text = checkpoint_text(ORIGIN, len(lines), MerkleTree.from_data(lines).root())
    note = sign_note(text, ORIGIN, key)
    (folder / "entries.jsonl").write_bytes(encode_commit(list(lines), note))
    (folder / "checkpoint").write_bytes(note)


def test_lines_and_root_by_their_written_definition(tmp_path):
    """One JCS line per entry, the signed checkpoint behind each append; the root is RFC 9162 over the entries."""
    ledger = Ledger.open(tmp_path / "ledger", ORIGIN, KEY)
    assert ledger.append("corpus", {"b": 1, "a": ["x"]}, TIME) == 0
    assert list(ledger.append_many([("one", {}), ("two", {})], TIME)) == [1, 2]
    lines = (tmp_path / "ledger" / "entries.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    signed = [json.loads(lines.pop(at))["checkpoint"] for at in (5, 2, 0)]
    first = '{"body":{"a":["x"],"b":1},"format":1,"kind":"corpus","time":"2025-01-31T12:00:00Z"}'
    assert lines[0] == first.encode()
    assert ledger.root == oracle.root(lines)
    assert [open_checkpoint(note, VKEY).size for note in signed] == [3, 1, 0]
    assert signed[0].encode() == ledger.checkpoint == (tmp_path / "ledger/checkpoint").read_bytes()
    checkpoint = open_checkpoint(ledger.checkpoint, VKEY)
    assert (checkpoint.origin, checkpoint.size, checkpoint.root) == (ORIGIN, 3, ledger.root)
    assert ledger.verify(VKEY) == checkpoint


@settings(max_examples=12)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_any_sequence_of_appends_is_one_growing_history(tmp_path_factory, batches):
    """Law: every entry stays proven, and every checkpoint ever signed is a prefix of the last."""
    folder = tmp_path_factory.mktemp("ledger")
    ledger = Ledger.open(folder, ORIGIN, KEY)
    states, count = [], 0
    for batch in batches:
        ledger.append_many([("test", {"n": count + i}) for i in range(batch)], TIME)
        count += batch
        states.append(open_checkpoint(ledger.checkpoint, VKEY))
    reader = Ledger.open(folder, ORIGIN)
    assert [entry["body"]["n"] for entry in reader.entries()] == list(range(count))
    for state in states:
        if state.size:
            path = reader.consistency_path(state.size)
            verify_consistency(state.size, count, state.root, reader.root, path)
    for index in range(count):
        leaf = sha256(b"\x00" + reader.entry_bytes(index)).digest()
        verify_inclusion(leaf, index, count, reader.inclusion_path(index), reader.root)


def test_a_reader_needs_no_key_and_cannot_write(tmp_path):
    """Opening without a key creates nothing, changes nothing, appends nothing."""
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger.open(tmp_path / "none", ORIGIN)
    assert not (tmp_path / "none").exists()
    ledger = filled(tmp_path, 2)
    reader = Ledger.open(tmp_path, ORIGIN)
    assert (reader.size, reader.root, reader.checkpoint) == (2, ledger.root, ledger.checkpoint)
    with pytest.raises(LedgerError, match="reading only"):
        reader.append("test", {}, TIME)
    with pytest.raises(LedgerError, match="knows no key"):
        _ = reader.vkey


def test_a_large_body_stands_in_a_file_of_its_own(tmp_path):
    """Above 32 KiB the line holds digest and size; reading gives the body back, checked."""
    ledger = Ledger.open(tmp_path, ORIGIN, KEY)
    at_limit, above = {"x": "a" * (32 * 1024 - 8)}, {"x": "a" * (32 * 1024 - 7)}
    ledger.append_many([("small", at_limit), ("large", above)], TIME)
    small, large = ledger.entries()
    assert "body_sha256" not in small
    assert large["body"] == above
    assert large["body_size"] == 32 * 1024 + 1
    assert len(ledger.entry_bytes(1)) < 300
    path = tmp_path / "bodies" / large["body_sha256"]
    assert sha256(path.read_bytes()).hexdigest() == large["body_sha256"]
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    for call in (ledger.entries, lambda: ledger.entry(1), lambda: ledger.verify(VKEY)):
        with pytest.raises(LedgerError, match="was changed"):
            call()
    path.unlink()
    with pytest.raises(LedgerError, match="is missing"):
        ledger.verify(VKEY)


@pytest.mark.parametrize(
    ("kind", "body", "moment"),
    [
        ("Kind", {}, TIME),
        ("", {}, TIME),
        ("two words", {}, TIME),
        ("test", {"price": 1.5}, TIME),
        ("test", {"price": None}, TIME),
        ("test", [], TIME),
        ("test", {}, "yesterday"),
        ("test", {}, "2025-01-31T12:00:00"),
        ("test", {}, "2025-01-31T12:00:00+01:00"),
    ],
)
def test_an_entry_in_another_form_is_refused_and_nothing_is_written(tmp_path, kind, body, moment):
    """One bad entry refuses the whole batch before a byte is written."""
    ledger = filled(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(FormatError):
        ledger.append_many([("test", {}), (kind, body)], moment)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_attack_truncated_ledger_is_refused_not_repaired(tmp_path):
    """Cutting signed entries off, to any length, is damage: no reader and no writer goes on."""
    filled(tmp_path, 6)
    path = tmp_path / "entries.jsonl"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        for key in (None, KEY):
            with pytest.raises(LedgerError, match="truncated"):
                Ledger.open(tmp_path, ORIGIN, key)
    path.unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger.open(tmp_path, ORIGIN)
    path.write_bytes(whole)
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger.open(tmp_path, ORIGIN, KEY)


def test_attack_rollback_to_an_older_signed_state_fails_against_a_kept_checkpoint(tmp_path):
    """Old files are a valid ledger; whoever kept a later checkpoint, or holds it open, sees it."""
    ledger = filled(tmp_path, 3)
    old = {name: (tmp_path / name).read_bytes() for name in ("entries.jsonl", "checkpoint")}
    ledger.append("test", {"important": True}, TIME)
    kept = open_checkpoint(ledger.checkpoint, VKEY)
    for name, data in old.items():
        (tmp_path / name).write_bytes(data)
    assert Ledger.open(tmp_path, ORIGIN).verify(VKEY).size == 3 < kept.size
    with pytest.raises(LedgerError, match="rolled back from 4 to 3"):
        ledger.append("test", {}, TIME)
    # The operator goes on with another history: no consistency proof leads there.
    other = Ledger.open(tmp_path, ORIGIN, KEY)
    other.append_many([("test", {"rewritten": number}) for number in range(3)], TIME)
    path = other.consistency_path(kept.size)
    with pytest.raises(RootMismatchError):
        verify_consistency(kept.size, other.size, kept.root, other.root, path)
    with pytest.raises(LedgerError, match="signed root"):
        ledger.append("test", {}, TIME)


def test_attack_every_flipped_bit_of_the_files_is_noticed(tmp_path):
    """Each byte of entries and checkpoint, one bit each: verify, or opening, refuses."""
    filled(tmp_path, 3)
    for name in ("entries.jsonl", "checkpoint"):
        path = tmp_path / name
        whole = path.read_bytes()
        for position in range(len(whole)):
            forged = bytearray(whole)
            forged[position] ^= 1 << position % 8
            path.write_bytes(forged)
            with pytest.raises((LedgerError, VerificationError)):
                Ledger.open(tmp_path, ORIGIN).verify(VKEY)
        path.write_bytes(whole)
    Ledger.open(tmp_path, ORIGIN).verify(VKEY)


def test_attack_another_key_or_another_origin_is_refused(tmp_path):
    """A stranger's checkpoint over the right root, and another log's folder, do not open."""
    ledger = filled(tmp_path, 2)
    stranger = SigningKey.generate()
    with pytest.raises(SignatureError):
        Ledger.open(tmp_path, ORIGIN, stranger)
    with pytest.raises(LedgerError, match=r"expected the log other\.example"):
        Ledger.open(tmp_path, "other.example")
    forge(tmp_path, *(ledger.entry_bytes(index) for index in range(2)), key=stranger)
    with pytest.raises(SignatureError):
        Ledger.open(tmp_path, ORIGIN).verify(VKEY)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b'"price":1', b'"price":1,"price":100', "duplicate key"),
        (b'"price":1', b'"price": 1', "not canonical"),
        (b'"price":1', b'"price":1.0', "only integers"),
    ],
)
def test_attack_an_uncanonical_line_is_refused_even_if_it_was_signed(
    tmp_path, before, after, reason
):
    """The key holder signs a line with two readings or two spellings: verify refuses it."""
    line = b'{"body":{"price":1},"format":1,"kind":"test","time":"2025-01-31T12:00:00Z"}'
    forge(tmp_path, line.replace(before, after))
    with pytest.raises(FormatError, match=reason):
        Ledger.open(tmp_path, ORIGIN).verify(VKEY)


def test_an_unknown_entry_format_is_refused(tmp_path):
    """A later version's entry is an error, not a guess."""
    for line, reason in (
        (b'{"body":{},"format":2,"kind":"test","time":"2025-01-31T12:00:00Z"}', "format 2"),
        (b'{"body":{},"format":1,"kind":"test","time":"2025-01-31T12:00:00Z","x":1}', "fields"),
        (b'{"format":1,"kind":"test","time":"2025-01-31T12:00:00Z"}', "fields"),
        (b'{"body_sha256":"../key","body_size":1,"format":1,"kind":"t","time":""}', "hex digest"),
        (b"[1]", "format 'list'"),
    ):
        forge(tmp_path, line)
        with pytest.raises(LedgerError, match=reason):
            Ledger.open(tmp_path, ORIGIN).entries()


def test_two_writers_take_turns_and_lose_nothing(tmp_path):
    """Two processes append 12 entries each at the same time: 24 entries, each in its own order."""
    writers = [start(tmp_path, name, "append 12") for name in ("a", "b")]
    for writer in writers:
        assert writer.wait(timeout=60) == 0
        writer.stdout.close()
    ledger = Ledger.open(tmp_path, ORIGIN)
    ledger.verify(VKEY)
    bodies = [entry["body"] for entry in ledger.entries()]
    for name in ("a", "b"):
        assert [body["number"] for body in bodies if body["writer"] == name] == list(range(12))
    assert len(bodies) == 24


def test_an_open_ledger_takes_over_what_another_writer_added(tmp_path):
    """Two objects on one folder: the second append stands behind the first, not over it."""
    first = filled(tmp_path, 1)
    second = Ledger.open(tmp_path, ORIGIN, KEY)
    assert second.append("test", {"by": 2}, TIME) == 1
    assert first.append("test", {"by": 1}, TIME) == 2
    assert [entry["body"] for entry in first.entries()] == [{"number": 0}, {"by": 2}, {"by": 1}]
    assert first.verify(VKEY).size == 3


def test_a_writer_that_holds_the_lock_too_long_is_reported(tmp_path):
    """A held lock is waited for, then named; nothing is written past it."""
    ledger = filled(tmp_path, 1)
    with (tmp_path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="another process has been writing"):
            Ledger.open(tmp_path, ORIGIN, KEY, lock_timeout_s=0.05)
        assert Ledger.open(tmp_path, ORIGIN).size == 1  # readers never wait
    assert ledger.append("test", {}, TIME) == 1


def test_kill_before_the_checkpoint_is_whole_leaves_a_torn_tail_that_is_kept_aside(tmp_path):
    """A real child dies by SIGKILL with an entry and half a checkpoint written: it did not happen."""
    before = filled(tmp_path, 3)
    process = start(tmp_path, "torn", "torn")
    wait_for("entries are on disk", process)
    kill(process)
    whole = (tmp_path / "entries.jsonl").read_bytes()
    reader = Ledger.open(tmp_path, ORIGIN)
    assert (reader.size, reader.root, len(reader.entries())) == (3, before.root, 3)
    assert reader.verify(VKEY).size == 3
    # A reader leaves the tail, the next writer keeps it aside, says so and goes on.
    (tmp_path / ".checkpoint.0123.tmp").write_bytes(b"half a checkpoint")
    assert (tmp_path / "entries.jsonl").read_bytes() == whole
    after = Ledger.open(tmp_path, ORIGIN, KEY)
    data = (tmp_path / "entries.jsonl").read_bytes()
    (name,) = after.torn
    assert data + (tmp_path / "torn" / name).read_bytes() == whole
    assert b'"writer":"torn"' in whole[len(data) :]
    assert not list(tmp_path.glob(".*.tmp"))
    assert after.append("test", {"after": True}, TIME) == 3
    assert after.verify(VKEY).size == 4
    assert Ledger.open(tmp_path, ORIGIN, KEY).torn == ()


def test_kill_at_any_moment_leaves_the_last_signed_state_readable(tmp_path):
    """A child that appends in a loop is killed four times, at different moments.

    Each time the log opens, verifies, extends the checkpoint seen before, and takes more entries.
    """
    ledger = filled(tmp_path, 1)
    for delay_s in (0.0, 0.011, 0.023, 0.047):
        process = start(tmp_path, str(delay_s), "forever")
        wait_for("ready", process)
        time.sleep(delay_s)
        kill(process)
        reader = Ledger.open(tmp_path, ORIGIN)
        assert reader.verify(VKEY).size == reader.size >= ledger.size
        path = reader.consistency_path(ledger.size)
        verify_consistency(ledger.size, reader.size, ledger.root, reader.root, path)
        ledger = Ledger.open(tmp_path, ORIGIN, KEY)
        ledger.append("test", {"after": str(delay_s)}, TIME)
        assert not [item for item in tmp_path.iterdir() if item.suffix == ".tmp"]


def test_a_full_disk_loses_the_append_and_nothing_else(tmp_path, monkeypatch):
    """ENOSPC while the entries are synced: the error is seen, the next append succeeds."""
    ledger = filled(tmp_path, 2)
    root, real = ledger.root, os.fsync
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(OSError, match="No space left"):
        ledger.append("test", {"lost": True}, TIME)
    monkeypatch.setattr(os, "fsync", real)
    assert (ledger.size, ledger.root) == (2, root)
    assert ledger.append("test", {"kept": True}, TIME) == 2
    assert [entry["body"] for entry in ledger.entries()][-1] == {"kept": True}
    assert ledger.verify(VKEY).size == 3


def test_a_change_on_disk_behind_an_open_ledger_is_noticed(tmp_path):
    """entry() and entries() compare with the tree in memory, so they never return changed lines."""
    ledger = filled(tmp_path, 2)
    path = tmp_path / "entries.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":7'))
    assert ledger.entry(0)["body"] == {"number": 0}
    for call in (ledger.entries, lambda: ledger.entry(1)):
        with pytest.raises(LedgerError, match="changed on disk"):
            call()
    for index in (-1, 2):
        with pytest.raises(LedgerError, match="must be in"):
            ledger.entry(index)
    with pytest.raises(LedgerError, match="signed root"):
        ledger.verify(VKEY)


def test_other_readers_see_plain_json(tmp_path):
    """No tool of ours is needed to read the history: lines with a body are the entries."""
    filled(tmp_path, 2)
    lines = map(json.loads, (tmp_path / "entries.jsonl").read_text().splitlines())
    assert [line["body"]["number"] for line in lines if "body" in line] == [0, 1]


def _full(descriptor):
    raise OSError(28, "No space left on device")
