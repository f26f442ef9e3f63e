"""Rows and files: every format and compression, and every reason to refuse one."""

import gzip
import hashlib
import hmac
import io
import json
import os
from pathlib import Path

import polars as pl
import pytest
import zstandard

from pipelines.storage import checks
from pipelines.storage.config import Config, IntakeConfig
from pipelines.storage.intake import Counts
from pipelines.storage.records import SCHEMA


def reasons(result):
    """(delivery, row, reason) of every refused row."""
    return list(result.quarantine.select("delivery", "row", "reason").iter_rows())


def csv_bytes(rows):
    frame = pl.DataFrame(rows)
    return frame.write_csv().encode()


def parquet_bytes(rows):
    sink = io.BytesIO()
    pl.DataFrame(rows).write_parquet(sink)
    return sink.getvalue()


FORMS = {
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "csv": csv_bytes,
    "parquet": parquet_bytes,
    "txt": lambda rows: "\n\n".join(row["text"] for row in rows).encode(),
    "md": lambda rows: "\n\n".join(row["text"] for row in rows).encode(),
}
PACKS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_format_and_compression_gives_the_same_records(deliver, take_in, form, pack):
    """Three rows (or one run of paragraphs), exact values, whatever the file looks like."""
    rows = [
        {
            "text": 'a, "quoted"\nline',
            "licence": "CC0-1.0",
            "date": "1999-12-31",
            "consent_resell": True,
        },
        {
            "text": "ünïcødé 漢字 😀",
            "licence": "CC-BY-4.0",
            "date": "2000-01-01",
            "consent_resell": False,
        },
        {
            "text": " leading and trailing ",
            "licence": "CC0-1.0",
            "date": None,
            "consent_resell": None,
        },
    ]
    deliver(f"ada/f.{form}{pack}", PACKS[pack](FORMS[form](rows)))
    result = take_in()
    source = f"f.{form}"
    if form in ("txt", "md"):
        assert result.counts == Counts(1, 1, 0, 0, 0)
        assert result.records["text"].to_list() == ["\n\n".join(row["text"] for row in rows)]
        assert result.records["licence"].to_list() == ["LicenseRef-delivery"]
    else:
        assert result.counts == Counts(3, 3, 0, 0, 0)
        assert result.records["text"].to_list() == [row["text"] for row in rows]
        assert result.records["licence"].to_list() == ["CC0-1.0", "CC-BY-4.0", "CC0-1.0"]
        assert result.records["date"].to_list() == ["1999-12-31", "2000-01-01", None]
        assert result.records["consent_resell"].to_list() == [True, False, None]
        assert result.records["position"].to_list() == [0, 1, 2]
    assert set(result.records["source"]) == {source}
    assert set(result.records["owner"]) == {"ada"}
    assert result.records["consent_train"].all()
    assert not result.records["consent_display"].any()
    assert not result.records["personal"].any()
    assert result.records.schema == SCHEMA


def test_identity_follows_the_interface(deliver, take_in, keys):
    """Fingerprint, record id and raw digest recomputed with the standard library alone."""
    deliver("ada/a.jsonl", [{"text": "e\u0301\r\nx", "source": "s", "position": 7}])
    row = take_in().records.row(0, named=True)

    def mac(key, data):
        return hmac.new(key, data, hashlib.sha256).digest()

    assert row["text"] == "e\u0301\r\nx"
    assert row["fingerprint"] == mac(keys.k_fp, "\u00e9\nx".encode())
    identity = f'["ada","s",7,"{row["fingerprint"].hex()}"]'.encode()
    assert row["record_id"] == mac(keys.k_id, identity)
    assert row["raw_digest"] == mac(keys.k_file, "e\u0301\r\nx".encode())


ROW_CASES = [
    (b"not json", "bad_row"),
    (b"[1]", "bad_row"),
    (b'"text"', "bad_row"),
    (b'{"text":"a","text":"b"}', "bad_row"),
    (b"[" * 100_000, "bad_row"),
    (b'{"text":"\xff"}', "bad_utf8"),
    (b'{"text":"\\ud800"}', "bad_utf8"),
    (b'{"text":"a","source":"\\ud800"}', "bad_utf8"),
    (b"{}", "missing_text"),
    (b'{"Text":"a"}', "missing_text"),
    (b'{"text":null}', "missing_text"),
    (b'{"text":3}', "bad_value"),
    (b'{"text":["a"]}', "bad_value"),
    (b'{"text":""}', "empty"),
    (b'{"text":" \\n\\t"}', "empty"),
    (b'{"text":"a","position":-1}', "bad_value"),
    (b'{"text":"a","position":1.5}', "bad_value"),
    (b'{"text":"a","position":true}', "bad_value"),
    (b'{"text":"a","position":9007199254740992}', "bad_value"),
    (b'{"text":"a","position":' + b"9" * 5000 + b"}", "bad_row"),
    (b'{"text":"a","source":""}', "bad_value"),
    (b'{"text":"a","source":5}', "bad_value"),
    (b'{"text":"a","id":true}', "bad_value"),
    (b'{"text":"a","date":"31.12.1999"}', "bad_value"),
    (b'{"text":"a","date":"1999-02-30"}', "bad_value"),
    (b'{"text":"a","date":"1999-01-01x"}', "bad_value"),
    (b'{"text":"a","personal":"maybe"}', "bad_value"),
    (b'{"text":"a","consent_train":2}', "bad_value"),
    (b'{"text":"a","consent_train":false}', "no_consent"),
    (b'{"text":"a","consent_train":"No"}', "no_consent"),
    (b'{"text":"a","licence":"GPL-3.0-only"}', "unknown_licence"),
    (b'{"text":"a","license":"my own"}', "unknown_licence"),
    (b'{"text":"a","licence":7}', "bad_value"),
    (b'{"text":"' + b"a" * 100_001 + b'"}', "too_long"),
    (b'{"text":"' + b"a" * 2_000_000 + b'"}', "too_long"),
]


@pytest.mark.parametrize(("line", "reason"), ROW_CASES)
def test_each_bad_row_has_its_reason_and_costs_no_other(deliver, take_in, line, reason):
    """One bad row between two good ones: exactly one is refused, with the expected reason."""
    deliver("ada/a.jsonl", b'{"text":"before"}\n' + line + b'\n\n{"text":"after"}\n')
    result = take_in()
    assert reasons(result) == [("ada/a.jsonl", 1, reason)]
    assert result.counts == Counts(3, 2, 0, 1, 0)
    assert result.records["position"].to_list() == [0, 2]


def test_row_limits_are_exact(deliver, take_in):
    """max_record_chars characters are accepted, one more is not, in every row format."""
    config = Config(intake=IntakeConfig(max_record_chars=10))
    rows = [{"text": "é" * 10}, {"text": "x" * 11}]
    for form in ("jsonl", "csv", "parquet"):
        deliver(f"ada-{form}/a.{form}", FORMS[form](rows))
    result = take_in(config)
    assert reasons(result) == [
        (f"ada-{f}/a.{f}", 1, "too_long") for f in ("csv", "jsonl", "parquet")
    ]
    assert result.counts == Counts(6, 3, 0, 3, 0)


def test_file_failures_are_one_row_and_leave_nothing_else(deliver, take_in, home):
    """Each file that cannot be read counts once, as row -1; its good rows are not taken."""
    good = FORMS["jsonl"]([{"text": f"row {number} " * 100} for number in range(100)])
    deliver("ada/empty.txt", b"")
    deliver("ada/empty.jsonl", b"\n \n")
    deliver("ada/head.csv", b"text\n")
    deliver("ada/none.csv", b"")
    deliver("ada/semicolon.csv", b"text;source\na;b\n")
    deliver("ada/twice.csv", b"text,text\na,b\n")
    deliver("ada/other.csv", b"body\na\n")
    deliver("ada/other.parquet", parquet_bytes([{"body": "a"}]))
    deliver("ada/number.parquet", parquet_bytes([{"text": 3}]))
    deliver("ada/torn.parquet", parquet_bytes([{"text": "a"}])[:-9])
    deliver("ada/fake.parquet", b"PAR1 no PAR1")
    deliver("ada/torn.jsonl.gz", gzip.compress(good)[:-20])
    deliver("ada/torn.jsonl.zst", zstandard.ZstdCompressor().compress(good)[:-20])
    deliver("ada/plain.jsonl.gz", good)
    deliver("ada/plain.txt.zst", good)
    deliver("ada/crc.jsonl.gz", gzip.compress(good)[:-8] + bytes(8))
    deliver("ada/latin.txt", "Grüße".encode("latin-1"))
    deliver("ada/utf16.md", "Grüße".encode("utf-16"))
    deliver("ada/cut.txt", "Grüße 漢".encode()[:-1])
    deliver("ada/table.xlsx", b"x")
    deliver("ada/archive.jsonl.zip", b"x")
    deliver("ada/folder/x.jsonl", good)
    deliver("no owner/x.jsonl", good)
    deliver("stray.jsonl", good)
    deliver("ada/.hidden.jsonl", good)
    deliver("ada/ok.txt", "fine")
    os.mkfifo(home.inbox / "ada" / "pipe.jsonl")
    (home.inbox / "ada" / "link.jsonl").symlink_to("/etc/passwd")
    (home.inbox / "evil").symlink_to("/etc")
    result = take_in()
    assert all(row == -1 for _, row, _ in reasons(result))
    assert {delivery: reason for delivery, _, reason in reasons(result)} == {
        "ada/archive.jsonl.zip": "unknown_format",
        "ada/crc.jsonl.gz": "unreadable",
        "ada/cut.txt": "bad_utf8",
        "ada/empty.jsonl": "empty",
        "ada/empty.txt": "empty",
        "ada/fake.parquet": "unreadable",
        "ada/folder": "misplaced",
        "ada/head.csv": "empty",
        "ada/latin.txt": "bad_utf8",
        "ada/link.jsonl": "not_a_file",
        "ada/none.csv": "empty",
        "ada/number.parquet": "bad_value",
        "ada/other.csv": "missing_text",
        "ada/other.parquet": "missing_text",
        "ada/pipe.jsonl": "not_a_file",
        "ada/plain.jsonl.gz": "unreadable",
        "ada/plain.txt.zst": "unreadable",
        "ada/semicolon.csv": "missing_text",
        "ada/table.xlsx": "unknown_format",
        "ada/torn.jsonl.gz": "unreadable",
        "ada/torn.jsonl.zst": "unreadable",
        "ada/torn.parquet": "unreadable",
        "ada/twice.csv": "bad_row",
        "ada/utf16.md": "bad_utf8",
        "evil": "misplaced",
        "no owner/x.jsonl": "bad_owner",
        "stray.jsonl": "misplaced",
    }
    assert result.counts == Counts(28, 1, 0, 27, 0)
    assert len(result.files) == 28


def test_names_that_are_not_text_are_read_and_reported(home, take_in):
    """File names are bytes: one that is not UTF-8 is shown with a mark, and its rows are taken."""
    folder = os.fsencode(home.inbox / "ada")
    for name in (b"\xff.jsonl", b"\xfe.exe"):
        Path(os.fsdecode(folder)).mkdir(exist_ok=True)
        Path(os.fsdecode(folder + b"/" + name)).write_bytes(b'{"text":"a"}')
    Path(os.fsdecode(os.fsencode(home.inbox) + b"/o\xff")).mkdir()
    Path(os.fsdecode(os.fsencode(home.inbox) + b"/o\xff/a.txt")).write_bytes(b"x")
    result = take_in()
    assert result.records["source"].to_list() == ["\ufffd.jsonl"]
    assert reasons(result) == [
        ("ada/\ufffd.exe", -1, "unknown_format"),
        ("o\ufffd/a.txt", -1, "bad_owner"),
    ]


def test_an_unreadable_folder_is_reported(deliver, take_in, monkeypatch):
    """A folder that cannot be listed costs its owner only."""
    deliver("ada/a.txt", "a")
    deliver("bob/b.txt", "b")
    real = os.scandir

    def refuse(path):
        if str(path).endswith("ada"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = take_in()
    assert reasons(result) == [("ada", -1, "unreadable")]
    assert result.records["owner"].to_list() == ["bob"]


def test_an_unreadable_file_is_reported(deliver, take_in, monkeypatch):
    """Permission denied is a reason like any other (root reads everything, so it is injected)."""
    path = deliver("ada/a.jsonl", [{"text": "a"}])
    real = os.open

    def refuse(name, *rest, **options):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    result = take_in()
    assert reasons(result) == [("ada/a.jsonl", -1, "unreadable")]
    assert result.quarantine["detail"].to_list() == ["Permission denied"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "txt"])
def test_a_file_that_changes_while_it_is_read_is_refused_whole(deliver, take_in, monkeypatch, form):
    """An append in the middle of reading: none of its rows is taken, the next run takes them."""
    rows = [{"text": "one"}, {"text": "two"}]
    path = deliver(f"ada/a.{form}", FORMS[form](rows))
    deliver("bob/b.txt", "untouched")
    real = checks.examine

    def change(row, delivery, *rest):
        if delivery.owner == "ada":
            path.write_bytes(FORMS[form]([*rows, {"text": "three"}]))
        return real(row, delivery, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.storage.intake.examine", change)
        result = take_in()
    assert reasons(result) == [(f"ada/a.{form}", -1, "changed_while_read")]
    assert result.records["owner"].to_list() == ["bob"]
    assert take_in().counts.quarantined == 0


def test_a_file_that_disappears_while_it_is_read_is_refused_whole(deliver, take_in, monkeypatch):
    """Deleting is a change too."""
    path = deliver("ada/a.jsonl", [{"text": "one"}, {"text": "two"}])
    deliver("bob/b.txt", "untouched")
    real = checks.examine

    def remove(row, delivery, *rest):
        if delivery.owner == "ada":
            path.unlink(missing_ok=True)
        return real(row, delivery, *rest)

    monkeypatch.setattr("pipelines.storage.intake.examine", remove)
    assert reasons(take_in()) == [("ada/a.jsonl", -1, "changed_while_read")]


def test_csv_follows_rfc_4180(deliver, take_in):
    """Quoted commas, line ends and quotes; short and long rows, open quotes and a BOM."""
    content = (
        "\ufefftext,source,position\r\n"
        '"a,b",s,0\r\n'
        '"line 1\nline 2\r\nline 3",s,1\r\n'
        '"say ""hi""",s,2\r\n'
        "short\r\n"
        "long,s,3,extra\r\n"
        '5" disk,s,4\r\n'
        ",s,5\r\n"
        "plain,,\r\n"
        '"open,s,6\r\nnever closed\r\n'
    )
    deliver("ada/a.csv", content)
    result = take_in()
    assert result.records.select("text", "source", "position").rows() == [
        ("a,b", "s", 0),
        ("line 1\nline 2\r\nline 3", "s", 1),
        ('say "hi"', "s", 2),
        ('5" disk', "s", 4),
        ("plain", "a.csv", 7),
    ]
    assert reasons(result) == [
        ("ada/a.csv", 3, "bad_row"),
        ("ada/a.csv", 4, "bad_row"),
        ("ada/a.csv", 6, "empty"),
        ("ada/a.csv", 8, "bad_row"),
    ]


def test_a_csv_row_too_long_to_be_held_does_not_swallow_the_next(deliver, take_in):
    """One quoted cell of many lines and one of a single line, both beyond the limit, between good rows."""
    config = Config(intake=IntakeConfig(max_record_chars=100))
    many = '"' + "x" * 70 + "\n" + ('y""' * 30 + "\n") * 2000 + 'end"'
    single = '"' + "z, " * 40_000 + '"'
    opens = '"' + "w" * 100_000 + "\nstill the same cell\nand its end" + '"'
    deliver("ada/a.csv", f"text\ngood\n{many}\nfine\n{single}\nwell\n{opens}\nlast\n")
    result = take_in(config)
    assert result.records["text"].to_list() == ["good", "fine", "well", "last"]
    assert reasons(result) == [("ada/a.csv", row, "too_long") for row in (1, 3, 5)]
    assert result.quarantine["raw_digest"].n_unique() == 3


def test_parquet_types_are_checked_and_converted(deliver, take_in):
    """Dates, categories, nulls and strange columns; a bad string costs its own row only."""
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    raw = pa.array([b"good", b"\xff\xfe", b"fine", None], pa.binary())
    table = pa.table(
        {
            "text": pa.Array.from_buffers(pa.string(), 4, raw.buffers()),
            "date": pa.array([dt.date(2000, 1, 2)] * 4),
            "id": pa.array([7, 8, 9, 10]),
            "licence": pa.array(["CC0-1.0"] * 4).dictionary_encode(),
            "embedding": pa.array([[0.5]] * 4),
        }
    )
    pq.write_table(table, sink)
    deliver("ada/a.parquet", sink.getvalue())
    deliver("bob/b.parquet", parquet_bytes([{"text": "a", "date": [1, 2]}]))
    result = take_in()
    assert result.records.select("text", "source", "position", "date", "licence").rows() == [
        ("good", "a.parquet#7", 0, "2000-01-02", "CC0-1.0"),
        ("fine", "a.parquet#9", 0, "2000-01-02", "CC0-1.0"),
    ]
    assert reasons(result) == [
        ("ada/a.parquet", 1, "bad_utf8"),
        ("ada/a.parquet", 3, "missing_text"),
        ("bob/b.parquet", -1, "bad_value"),
    ]
    assert result.files[0].ignored_fields == 1


def test_a_file_of_another_kind_is_refused_whole(deliver, take_in):
    """10,000 bad rows are listed; one more, and most of the file, and the file is the problem."""
    deliver("ada/a.jsonl", b"{}\n" * 10_000)
    assert take_in().counts == Counts(10_000, 0, 0, 10_000, 0)
    deliver("ada/a.jsonl", b"{}\n" * 10_001)
    assert reasons(take_in()) == [("ada/a.jsonl", -1, "mostly_refused")]
    good = "".join(f'{{"text":"{number}"}}\n{{}}\n' for number in range(10_001)).encode()
    deliver("ada/a.jsonl", good)
    assert take_in().counts == Counts(20_002, 10_001, 0, 10_001, 0)


def test_a_file_of_too_many_rows_is_refused_whole(deliver, take_in):
    """max_file_rows rows are accepted, one more refuses the file."""
    config = Config(intake=IntakeConfig(max_file_rows=3))
    deliver("ada/three.jsonl", [{"text": str(number)} for number in range(3)])
    deliver("bob/four.jsonl", [{"text": str(number)} for number in range(4)])
    result = take_in(config)
    assert reasons(result) == [("bob/four.jsonl", -1, "too_large")]
    assert result.counts == Counts(4, 3, 0, 1, 0)


def test_every_reason_is_explained(deliver, take_in):
    """No reason can stand in a table that is not in REASONS."""
    assert {reason for _, reason in ROW_CASES} <= checks.REASONS.keys()
    assert {
        "changed_while_read",
        "expands_too_much",
        "too_large",
        "erased",
    } <= checks.REASONS.keys()
    deliver("ada/a.jsonl", b"\n".join(line for line, _ in ROW_CASES))
    assert set(take_in().quarantine["reason"]) <= checks.REASONS.keys()
