"""The inbox as files: listing, digests, bounded lines and streams, Parquet pages."""

import contextlib
import gzip
import hashlib
import hmac
import io
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.storage import parquet_pages
from pipelines.storage.config import Config, IntakeConfig
from pipelines.storage.deliveries import (
    CHUNK_BYTES,
    FileProblem,
    file_digest,
    lines,
    open_regular,
    open_stream,
    scan,
)
from pipelines.storage.intake import Counts
from provenance.canonical import keyed

KEY = bytes(range(32))


class Chunks(io.BytesIO):
    """A stream whose reads are as short as a socket's."""

    def __init__(self, data, size):
        super().__init__(data)
        self.size = size

    def read(self, size=-1, /):
        """At most `size` bytes, and at most those of one chunk."""
        return super().read(min(size, self.size))


@given(
    st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"x"))),
    st.integers(1, 9),
    st.integers(1, 10),
    st.booleans(),
)
@settings(deadline=None)
def test_lines_are_those_of_split_whatever_the_chunks(parts, chunk, limit, end):
    """Content, size and digest of every line; a line beyond the limit is passed over, not lost."""
    data = b"\n".join(parts) + (b"\n" if end else b"")
    expected = data.split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    got = list(lines(Chunks(data, chunk), limit, KEY))
    assert [line.size for line in got] == [len(line) for line in expected]
    assert [line.digest for line in got] == [keyed(KEY, line) for line in expected]
    for line, whole in zip(got, expected, strict=True):
        assert line.data == (whole if len(whole) <= limit else None)
        assert line.num_quotes == (whole.count(b'"') if len(whole) > limit else 0)


def test_the_file_digest_is_the_keyed_digest_of_the_bytes(tmp_path):
    """Read in pieces, equal to the standard library in one."""
    data = bytes(range(256)) * 3000
    (tmp_path / "f").write_bytes(data)
    assert file_digest(tmp_path / "f", KEY) == hmac.new(KEY, data, hashlib.sha256).digest()


def test_links_pipes_and_folders_are_not_opened(tmp_path):
    """Even if a file is exchanged for one of these after it was looked at."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    with open_regular(tmp_path / "file") as descriptor:
        assert os.read(descriptor, 9) == b"x"
    for name, kind in (("link", OSError), ("pipe", FileProblem), (".", FileProblem)):
        with pytest.raises(kind), open_regular(tmp_path / name):
            pass


@pytest.mark.parametrize("pack", ["gz", "zst"])
def test_several_members_are_one_stream(deliver, take_in, pack):
    """Cat a.gz b.gz > c.gz is a valid delivery, and so is the same with zst."""
    press = gzip.compress if pack == "gz" else zstandard.ZstdCompressor().compress
    deliver(f"ada/a.jsonl.{pack}", press(b'{"text":"one"}\n') + press(b'{"text":"two"}\n'))
    assert take_in().records["text"].to_list() == ["one", "two"]


@pytest.mark.parametrize("pack", ["gz", "zst"])
def test_a_bomb_is_stopped_long_before_its_end(deliver, keys, home, pack):
    """1 GB of zeros in a few kB: reading stops just behind the free 16 MiB."""
    press = gzip.compress if pack == "gz" else zstandard.ZstdCompressor().compress
    deliver(f"ada/a.txt.{pack}", press(bytes(1 << 25)) * 30)
    (delivery,) = scan(home.inbox, keys.k_file)
    limits = IntakeConfig(max_expansion=10)
    seen = []

    def read_all():
        with open_stream(delivery, limits) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                seen.append(len(chunk))

    with pytest.raises(FileProblem, match="expands_too_much"):
        read_all()
    assert sum(seen) <= (16 << 20) + CHUNK_BYTES


def test_size_limits_are_exact_for_plain_and_compressed_files(deliver, take_in):
    """max_file_bytes bytes pass, one more does not."""
    config = Config(intake=IntakeConfig(max_file_bytes=1000, max_record_chars=2000))
    for number in (1000, 1001):
        deliver(f"ada/{number}.txt", f"{number:04d}" + "x" * (number - 4))
        deliver(
            f"ada/{number}.md.gz", gzip.compress(f"{number:04d}".encode() + b"y" * (number - 4))
        )
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["z" * 400]}), table, compression="none")
    deliver("ada/big.parquet", table.getvalue() + b"")
    result = take_in(config)
    refused = result.quarantine.select("delivery", "reason").rows()
    assert ("ada/1001.txt", "too_large") in refused
    assert ("ada/1001.md.gz", "too_large") in refused
    assert [name for name, _ in refused if "1000" in name] == []


BOUNDED = """
import resource, sys
from pathlib import Path
from pipelines.storage.config import Config, IntakeConfig
from pipelines.storage.home import Home
from pipelines.storage.intake import read_deliveries
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.suppression import SuppressionList
import polars, pyarrow.parquet, pyarrow.dataset

home, keys = Home(Path(sys.argv[1])), CorpusKeys.demo()
inbox = Path(sys.argv[2])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def take(inbox):
    return read_deliveries(inbox, config=Config(), keys=keys, scratch=home.staging,
                           suppression=SuppressionList(home.suppression_path, keys))

take(Path(sys.argv[3]))
before = peak()
result = take(inbox)
print(result.counts.received, result.counts.accepted, "|".join(result.quarantine["reason"]))
print(peak() - before)
"""

MB = 1_000_000


def big_line(path):
    with path.open("wb") as file:
        file.write(b'{"text":"first"}\n{"text":"')
        for _ in range(200):
            file.write(b"a" * MB)
        file.write(b'"}\n{"text":"last"}\n')


def big_cell(path):
    with path.open("wb") as file:
        file.write(b'text\nfirst\n"')
        for _ in range(200):
            file.write(b'a, ""b""\n' + b"c" * (MB - 9))
        file.write(b'"\nlast\n')


def many_rows(path):
    """Twenty million bad rows: their reasons alone would take gigabytes."""
    with path.open("wb") as file:
        for _ in range(60):
            file.write(b"{}\n" * (MB // 3))


def bomb(press):
    def write(path):
        path.write_bytes(press(bytes(50 * MB)) * 20)

    return write


def page_bomb(path):
    """A page of 200 MB in 10 kB; its header says so."""
    table = pa.table({"text": ["a", "x" * (200 * MB), "b"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def dictionary_bomb(path, size=200 * MB):
    """One text that stands in 1,000 rows, in the dictionary page."""
    codes = pa.array([0] * 1000, pa.int32())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(["x" * size]))
    limit = {"dictionary_pagesize_limit": 2 * size}
    pq.write_table(
        pa.table({"text": column}), path, compression="zstd", write_statistics=False, **limit
    )


def small_dictionary_bomb(path):
    """15 MB in each of 1,000 rows: 15 GB if every row got a copy of its own."""
    dictionary_bomb(path, 15 * MB)


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("a.jsonl", big_line, "3 2 too_long"),
        ("a.csv", big_cell, "3 2 too_long"),
        ("a.jsonl.gz", bomb(gzip.compress), "1 0 expands_too_much"),
        ("a.txt.zst", bomb(zstandard.ZstdCompressor().compress), "1 0 expands_too_much"),
        ("a.parquet", page_bomb, "1 0 expands_too_much"),
        ("b.parquet", dictionary_bomb, "1 0 expands_too_much"),
        ("c.parquet", small_dictionary_bomb, "1000 0 " + "|".join(["too_long"] * 1000)),
        ("d.jsonl", many_rows, "1 0 mostly_refused"),
    ],
    ids=["line", "cell", "gz", "zst", "page", "dictionary", "rows", "refused"],
)
def test_memory_stays_bounded_against_a_hostile_file(tmp_path, home, name, write, said):
    """The peak of a child process rises by less than 150 MB over reading one small file of the format."""
    calm = tmp_path / "calm" / "ada"
    hostile = tmp_path / "hostile" / "ada"
    calm.mkdir(parents=True)
    hostile.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["calm"]}), calm / "a.parquet")
    (calm / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text":"calm too"}'))
    write(hostile / name)
    child = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(home.path), str(hostile.parent), str(calm.parent)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    counts, rise = child.stdout.splitlines()
    assert counts == said
    assert float(rise) < 150
    (hostile / name).unlink()


@given(st.binary(max_size=200), st.integers(0, 3000))
@settings(deadline=None)
def test_damaged_page_headers_never_do_worse_than_a_problem(noise, at):
    """Any bytes in the place of any header: a size, or "unreadable", and it ends."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(500)]}), sink)
    data = bytearray(sink.getvalue())
    data[at : at + len(noise)] = noise[: max(0, len(data) - at)]
    footer = pq.ParquetFile(io.BytesIO(sink.getvalue()))
    with contextlib.suppress(FileProblem):
        size = parquet_pages.largest_data_page(
            footer, io.BytesIO(bytes(data)), ["text"], IntakeConfig()
        )
        assert size <= parquet_pages.MAX_PAGE_BYTES


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
def test_page_sizes_are_read_exactly(tmp_path, version, codec):
    """A plain page of one 5,000-byte string unpacks to its length, 4 bytes of prefix, and little more."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["é" * 2500], "other": ["y" * 9000]})
    pq.write_table(table, path, use_dictionary=False, data_page_version=version, compression=codec)
    with path.open("rb") as file:
        size = parquet_pages.largest_data_page(pq.ParquetFile(path), file, ["text"], IntakeConfig())
    assert 5004 <= size <= 5024


def test_parquet_rows_are_counted_against_the_size_limit(deliver, take_in):
    """A dictionary of one short text in very many rows is a bomb of rows; it stops at max_file_bytes."""
    column = pa.DictionaryArray.from_arrays(
        pa.array([0] * 200_000, pa.int32()), pa.array(["x" * 50])
    )
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": column}), sink)
    assert len(sink.getvalue()) < 5000
    deliver("ada/a.parquet", sink.getvalue())
    result = take_in(Config(intake=IntakeConfig(max_file_bytes=100_000)))
    assert result.counts == Counts(1, 0, 0, 1, 0)
    assert result.quarantine["reason"].to_list() == ["too_large"]
