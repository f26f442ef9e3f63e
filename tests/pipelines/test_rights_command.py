"""`dataworth erase` and `withdraw`: what they refuse, what a request holds, and that nobody's text is in it."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from graph_commands import contents, data_of, head, ledger, stored, values


@pytest.fixture
def home(tiny_home: Path, copied: Callable[[Path], Path]) -> Path:
    """A finished home of this test's own."""
    return copied(tiny_home)


def block(home: Path) -> Path:
    """The block file of the version that values rest on."""
    return stored(home, values(home, "corpus")["version"])[0]


def test_erase_refuses_what_names_nothing(ask, home: Path) -> None:
    """No owner, an unknown one, a malformed id, an unknown text: each is refused and leaves no request."""
    before = contents(home)
    (home.parent / "unknown.txt").write_text("Nobody ever wrote this.\n")
    cases = {
        (): "name what is meant",
        ("--owner", "nobody"): "names no record",
        ("--owner", "registry", "--source", "person-9999"): "names no record",
        ("--record", "abc"): "64 lower-case hex digits",
        ("--record", "0" * 64): "names no record",
        ("--file", str(home.parent / "unknown.txt")): "no record has exactly the text",
        (
            "--owner",
            "registry",
            "--basis",
            "because",
        ): "expected one of no-longer-needed, consent-withdrawn",
    }
    for arguments, message in cases.items():
        said = ask(home, "erase", *arguments)
        assert said.code == 2, arguments
        assert message in said.err
    assert contents(home) == before


def test_erase_writes_a_request_without_text(ask, home: Path) -> None:
    """The request names owner and source, has a deadline in a month, and holds none of the text."""
    said = ask(home, "erase", "--owner", "registry", "--source", "person-0002", "--reason", "asked")
    assert said.code == 0
    assert "5 records of 1 owners" in said.out
    name = said.out.split()[1].rstrip(":")
    body = json.loads((home / f"requests/{name}.json").read_text())
    assert (body["kind"], body["owner"], body["sources"]) == ("erase", "registry", ["person-0002"])
    assert (body["state"], body["record_ids"]) == ("received", [])
    assert body["deadline"] > body["received"]
    assert len(body["nonce"]) == 64
    assert set(body) == {
        "kind", "owner", "sources", "record_ids", "reason", "received", "deadline", "state", "format",
        "acknowledged", "method", "note", "number", "nonce", "basis",
    }  # fmt: skip


def test_a_repeated_request_is_told_and_written_once(ask, home: Path) -> None:
    """The same words twice are one request; the second answer says in which state the first one is."""
    words = ("erase", "--owner", "registry", "--source", "person-0002")
    name = ask(home, *words).out.split()[1].rstrip(":")
    before = contents(home)
    said = ask(home, *words)
    assert said.code == 0
    assert f"request {name} was made before: received" in said.out
    assert contents(home) == before


def test_a_legal_basis_is_stated_with_the_request_or_later(ask, home: Path) -> None:
    """A word of the list is kept with the request, also when it comes later; it is no part of what the request is named by."""
    words = ("erase", "--owner", "registry", "--source", "person-0002")
    name = ask(home, *words, "--basis", "objection").out.split()[1].rstrip(":")
    path = home / f"requests/{name}.json"
    assert json.loads(path.read_text())["basis"] == "objection"
    said = ask(home, *words, "--basis", "consent-withdrawn")
    assert f"request {name} was made before" in said.out
    assert "its legal basis is now Art. 17(1)(b) GDPR: consent withdrawn" in said.out
    assert json.loads(path.read_text())["basis"] == "consent-withdrawn"
    ask(home, *words)  # said without one: what was stated stays
    assert json.loads(path.read_text())["basis"] == "consent-withdrawn"
    path.write_text(path.read_text().replace("consent-withdrawn", "because"))
    said = ask(home, *words)
    assert said.code == 2
    assert "has the legal basis 'because'; known: no-longer-needed" in said.err


def test_a_plan_of_an_erasure_writes_nothing(ask, home: Path) -> None:
    """Costs of every method and a recommendation, but no request."""
    before = contents(home)
    said = ask(home, "erase", "--owner", "registry", "--source", "person-0002", "--plan")
    assert said.code == 0
    assert {"exact", "npo", "rmu", "recommended:"} <= set(said.out.split())
    assert contents(home) == before


def test_an_unknown_version_and_the_whole_corpus_are_refused(ask, home: Path) -> None:
    """A version that isn't there is named together with the newest; erasing everything would leave nothing to compare."""
    said = ask(home, "erase", "--owner", "registry", "--version", "ffff")
    assert said.code == 2
    assert (
        f"0 corpus versions begin with 'ffff': give more of the name of a folder of versions/, such as {head(home)[:12]}"
        in said.err
    )
    ids = [i.hex() for i in pl.read_parquet(block(home))["record_id"] if i is not None]
    said = ask(home, "erase", *(word for i in ids for word in ("--record", i)))
    assert said.code == 2
    assert "names every record of the corpus" in said.err


def test_erase_by_exact_text_finds_the_record(ask, home: Path) -> None:
    """A file with a record's text names that record, whoever asks."""
    row = pl.read_parquet(block(home)).filter(pl.col("owner") == "wilson").row(0, named=True)
    (home.parent / "mine.txt").write_text(row["text"] + "\n")
    said = ask(home, "erase", "--file", str(home.parent / "mine.txt"))
    assert said.code == 0
    name = said.out.split()[1].rstrip(":")
    body = json.loads((home / f"requests/{name}.json").read_text())
    assert body["record_ids"] == [row["record_id"].hex()]


def test_withdraw_ends_future_use_only(ask, home: Path) -> None:
    """A withdrawal is a request of its own kind; the models and the ledger of the past stay as they are."""
    before = len(ledger(home)), data_of(home, "runs")
    said = ask(home, "withdraw", "--owner", "wilson")
    assert said.code == 0
    name = said.out.split()[1].rstrip(":")
    assert json.loads((home / f"requests/{name}.json").read_text())["kind"] == "withdraw"
    assert (len(ledger(home)), data_of(home, "runs")) == before
    assert ask(home, "withdraw", "--owner", "nobody").code == 2
