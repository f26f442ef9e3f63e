"""Bad input through the real commands: what is wrong is said, the last good version stays, the next run goes on.

The deliveries are a user's own (an inbox outside of the home, keys of its own): the default corpus is never bad.
"""

import gzip
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
import zstandard
from graph_commands import (
    dataworth,
    head,
    ledger,
    log_of,
    made,
    results,
    reused,
    text_of,
    values,
)

from pipelines.defs import ASSETS

SETTINGS = """
size = "tiny"
[target]
since = "2021-01-01"
[pricing]
pool_microunits = 7_000_001
reserve_microunits = 1
[intake]
personal_owners = ["registry"]
"""
CORPUS = ("run", "--select", "group:corpus")
LONG_LINE = 200 << 20
BOMB = 1 << 30


class Own(NamedTuple):
    """A home and the inbox it is fed from."""

    home: Path
    inbox: Path

    def run(self, *arguments: str, inbox: Path | None = None):
        """Our command in this home."""
        return dataworth(self.home, *arguments, DATAWORTH_INBOX=str(inbox or self.inbox))


@pytest.fixture(scope="module")
def published(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Own:
    """A user's home after one good run of the corpus group; never to be changed."""
    folder = tmp_path_factory.mktemp("own")
    own = Own(folder / "home", folder / "inbox")
    shutil.copytree(tiny_home / "inbox", own.inbox)
    (own.inbox / ".demo").unlink()
    assert own.run("init").returncode == 0
    (own.home / "dataworth.toml").write_text(SETTINGS)
    done = own.run(*CORPUS)
    assert done.returncode == 0, done.stderr
    return own


@pytest.fixture
def own(published: Own, tmp_path: Path) -> Own:
    """A copy of it."""
    return copy(published, tmp_path)


def copy(source: Own, folder: Path) -> Own:
    """Home and inbox, side by side."""
    for path in source:
        shutil.copytree(path, folder / path.name, symlinks=True)
    return Own(folder / "home", folder / "inbox")


def readable(ask, own: Own, version: str) -> None:
    """The version in force is this one, it verifies row by row, and questions are answered."""
    assert head(own.home) == version
    inbox = str(own.inbox)
    assert "yes corpus: " in ask(own.home, "verify", DATAWORTH_INBOX=inbox).out
    counted = ask(own.home, "sql", "select count(*) as n from records", DATAWORTH_INBOX=inbox)
    assert counted.code == 0
    assert f"n {values(own.home, 'corpus')['live']}" in counted.out


# --- nothing to work on ---------------------------------------------------------------------------------------------


def test_an_empty_inbox_is_said(ask, own: Own, tmp_path: Path) -> None:
    """An inbox that is set and holds nothing is an error with the remedy; nothing published is lost by it."""
    before = head(own.home)
    (tmp_path / "empty").mkdir()
    done = own.run(*CORPUS, inbox=tmp_path / "empty")
    assert done.returncode == 2
    assert "the inbox 'empty' is empty: put files in empty/OWNER/" in done.stderr
    assert "Traceback" not in done.stderr
    readable(ask, own, before)
    assert own.run(*CORPUS).returncode == 0
    assert made(log_of(own.home)) == set()


@pytest.mark.slow
def test_a_missing_inbox_is_said(ask, own: Own, tmp_path: Path) -> None:
    """So is one that isn't there: a misspelt folder is not the default corpus."""
    before = head(own.home)
    done = own.run(*CORPUS, inbox=tmp_path / "nowhere")
    assert done.returncode == 2
    assert "no inbox folder 'nowhere': make it" in done.stderr
    readable(ask, own, before)


def test_a_missing_target_is_said_with_the_two_lines(ask, own: Own) -> None:
    """Without held-out records nothing can be valued: the message holds the lines to add, and with them it runs."""
    before = head(own.home)
    config = own.home / "dataworth.toml"
    config.write_text(re.sub(r"\[target\]\nsince.*\n", "", SETTINGS))
    done = own.run(*CORPUS)
    assert done.returncode == 2
    assert '[target]\nsince = "2024-01-01"' in done.stderr
    assert "Traceback" not in done.stderr
    readable(ask, own, before)
    config.write_text(SETTINGS)
    assert own.run(*CORPUS).returncode == 0


def test_a_target_that_is_in_the_corpus_is_taken_out_of_it(own: Own) -> None:
    """A target file with a delivered text: that record is quarantined, not trained on and measured with."""
    rows = pl.read_parquet(sorted(own.home.glob("blocks/*.parquet")))
    texts = rows.filter(pl.col("owner") == "wilson").sort("position")["text"].to_list()
    target = own.home / "target.jsonl"
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:6]))
    (own.home / "dataworth.toml").write_text(
        SETTINGS.replace('since = "2021-01-01"', 'path = "target.jsonl"')
    )
    shutil.rmtree(own.home / "target")  # a target is split once; this is a new lineage's
    done = own.run("run", "--select", "deliveries,corpus")
    assert done.returncode == 0, done.stderr
    assert values(own.home, "corpus")["reasons"]["in_target"] == 6


# --- bad files among good ones --------------------------------------------------------------------------------------


def soil(inbox: Path) -> None:
    """One file of every bad kind, and good ones before, among and behind them."""
    folder = inbox / "ada"
    folder.mkdir()
    good = b'{"text": "A good row that stands in the middle of bad ones, number %d."}\n'
    (folder / "a-good.txt").write_text("A letter that is quite in order.\n")
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(good % 1 * 1000)[:60])
    (folder / "link.jsonl").symlink_to("/etc/hostname")
    (folder / "archive.zip").write_bytes(b"PK\3\4")
    with (folder / "long.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(LONG_LINE >> 20):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + good % 2)
    packer = zstandard.ZstdCompressor().compressobj()
    with (folder / "bomb.jsonl.zst").open("wb") as file:
        for _ in range(BOMB >> 24):
            file.write(packer.compress(bytes(1 << 24)))
        file.write(packer.flush())
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n' + good % 3)
    (folder / "columns.jsonl").write_bytes(b'{"txt": "misspelt"}\n' + good % 4)
    (folder / "columns.csv").write_text("body,licence\nhello,CC0-1.0\n")
    (folder / "licence.jsonl").write_bytes(
        b'{"text": "mine alone", "licence": "Proprietary"}\n' + good % 5
    )
    (folder / "empty.jsonl").write_bytes(b"")
    if os.geteuid() != 0:  # nothing is unreadable for root
        (folder / "secret.jsonl").write_bytes(good % 6)
        (folder / "secret.jsonl").chmod(0)
    (folder / "z-good.jsonl").write_bytes(good % 7)


REASONS = {
    "broken.jsonl.gz": (-1, "unreadable", "truncated or damaged"),
    "link.jsonl": (-1, "not_a_file", "only regular files are read"),
    "archive.zip": (-1, "unknown_format", "known are jsonl"),
    "long.jsonl": (0, "too_long", "at most"),
    "bomb.jsonl.zst": (-1, "expands_too_much", "max_expansion"),
    "latin.jsonl": (0, "bad_utf8", ""),
    "columns.jsonl": (0, "missing_text", "the row has no text"),
    "columns.csv": (-1, "missing_text", "text"),
    "licence.jsonl": (0, "unknown_licence", "licences"),
    "empty.jsonl": (-1, "empty", "no rows"),
}


class Soiled(NamedTuple):
    """A home whose inbox holds all kinds of bad files, after a run."""

    own: Own
    code: int
    before: str
    log: str


@pytest.fixture(scope="module")
def soiled(published: Own, tmp_path_factory: pytest.TempPathFactory) -> Soiled:
    """One run over bad files among good ones."""
    own = copy(published, tmp_path_factory.mktemp("soiled"))
    before = head(own.home)
    soil(own.inbox)
    done = own.run(*CORPUS)
    return Soiled(own, done.returncode, before, log_of(own.home))


def test_bad_files_do_not_stop_the_good_ones(ask, soiled: Soiled) -> None:
    """The run ends well: seven good rows of the soiled owner are in the new version, the old ones with them."""
    assert soiled.code == 0
    corpus = values(soiled.own.home, "corpus")
    assert corpus["parent"] == soiled.before
    assert corpus["owners"]["ada"] == 6
    assert corpus["size"] == corpus["live"]
    counts = corpus["counts"]
    assert counts["received"] == sum(
        counts[part] for part in ("accepted", "held_out", "quarantined", "duplicates")
    )
    readable(ask, soiled.own, corpus["version"])


@pytest.mark.parametrize("name", REASONS)
def test_every_bad_row_or_file_has_its_reason(soiled: Soiled, name: str) -> None:
    """The quarantine names file, row, reason and what would help; it holds no text."""
    table = pl.read_parquet(soiled.own.home / "tables/quarantine.parquet")
    (found,) = table.filter(pl.col("delivery") == f"ada/{name}").iter_rows(named=True)
    row, reason, detail = REASONS[name]
    assert (found["owner"], found["row"], found["reason"]) == ("ada", row, reason)
    assert detail in found["detail"]
    assert "xxx" not in found["detail"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_file_without_permission_is_one_quarantined_row(soiled: Soiled) -> None:
    """The system's word for it is the detail."""
    table = pl.read_parquet(soiled.own.home / "tables/quarantine.parquet")
    (found,) = table.filter(pl.col("delivery") == "ada/secret.jsonl").iter_rows(named=True)
    assert (found["row"], found["reason"], found["detail"]) == (
        -1,
        "unreadable",
        "Permission denied",
    )


def test_the_reasons_are_a_question_away(ask, soiled: Soiled) -> None:
    """`dataworth sql` counts them, and the log of the run holds no bad text."""
    said = text_of(
        soiled.own.run("sql", "select reason, count(*) as n from quarantine group by reason")
    )
    assert "expands_too_much 1" in said
    assert "missing_text 2" in said
    assert "mine alone" not in soiled.log


def test_the_next_run_finishes_the_whole_graph(ask, soiled: Soiled, tmp_path: Path) -> None:
    """From deliveries to the report on a user's own inbox, with keys, seeds and prices of its own."""
    own = Own(tmp_path / "home", soiled.own.inbox)
    shutil.copytree(soiled.own.home, own.home)
    done = own.run("run")
    assert done.returncode == 0, done.stderr
    log = log_of(own.home)
    assert made(log) | reused(log) == set(ASSETS)
    # Bad files that stay where they are cost nothing: they were seen, and have not changed.
    assert reused(log) == {"deliveries", "corpus", "quarantine", "clusters", "tokens", "target"}
    assert set(values(own.home, "prices")) >= {"sum", "reserve"}
    prices = pl.read_parquet(own.home / "tables/prices.parquet")
    assert int(prices["price_microunits"].sum()) == 7_000_001
    assert "ada" in set(prices["subject"])
    commitment = values(own.home, "commitment")
    assert commitment["demo"] is False
    assert "demo" not in commitment["vkey"]
    assert "ledger checkpoint" in values(own.home, "evaluation_plan")["seed_rule"]
    assert values(own.home, "robustness_audit")["skipped"]  # nobody asked to be forgotten
    assert not [entry for entry in ledger(own.home) if entry["kind"] in ("erasure", "audit")]
    verified = ask(own.home, "verify", DATAWORTH_INBOX=str(own.inbox))
    assert verified.code == 0, verified


# --- a delivery that is still being written -------------------------------------------------------------------------


@contextmanager
def growing(path: Path) -> Iterator[None]:
    """A delivery that somebody writes to all the time."""
    done = threading.Event()

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            number = 0
            while not done.wait(0.002):
                number += 1
                file.write(
                    b'{"text": "Row number %d of a delivery that is not complete yet."}\n' % number
                )

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_delivery_that_changes_while_it_is_read_waits(ask, own: Own) -> None:
    """It is quarantined with this reason, the others are taken in; when it is complete the next run takes it in."""
    before = values(own.home, "corpus")
    slow = own.inbox / "ada/slow.jsonl"
    slow.parent.mkdir()
    (own.inbox / "ada/quick.txt").write_text("A letter that is complete.\n")
    with growing(slow):
        done = own.run(*CORPUS)
    assert done.returncode == 0, done.stderr
    corpus = values(own.home, "corpus")
    assert corpus["parent"] == before["version"]
    assert corpus["reasons"]["changed_while_read"] == 1
    assert corpus["owners"]["ada"] == 1
    table = pl.read_parquet(own.home / "tables/quarantine.parquet")
    (found,) = table.filter(pl.col("reason") == "changed_while_read").iter_rows(named=True)
    assert found["delivery"] == "ada/slow.jsonl"
    assert "deliver it again" in found["detail"]
    readable(ask, own, corpus["version"])

    rows = len(slow.read_bytes().splitlines())
    done = own.run(*CORPUS)
    assert done.returncode == 0, done.stderr
    assert values(own.home, "corpus")["owners"]["ada"] == 1 + rows
    assert "changed_while_read" not in values(own.home, "corpus")["reasons"]


@pytest.mark.slow
def test_an_inbox_that_changes_between_two_looks_is_not_mistaken(own: Own) -> None:
    """A result is kept under the content that was read, not under what was seen before."""
    late = own.inbox / "ada/late.txt"
    late.parent.mkdir()
    late.write_text("The first wording.\n")
    first = own.run("run", "--select", "deliveries")
    assert first.returncode == 0
    late.write_text(
        "The second wording.\n"
    )  # as if it came between the assets `deliveries` and `corpus`
    own.run("run", "--select", "corpus")
    late.write_text("The first wording.\n")
    done = own.run("run", "--select", "deliveries,corpus")
    assert done.returncode == 0, done.stderr
    texts = pl.read_parquet(sorted(own.home.glob("blocks/*.parquet")))["text"].to_list()
    assert any("The first wording." in text for text in texts)
    assert results(own.home)["corpus"]["values"]["owners"]["ada"] >= 1
