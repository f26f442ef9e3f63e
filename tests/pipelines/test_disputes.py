"""What a dispute takes for committed, what it says of settings that changed since, and of files that are gone."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import polars as pl
import pytest
from graph_commands import environment, ledger

from pipelines.results import Result, latest, store
from pipelines.runs import started
from pipelines.site import Site, open_site
from pipelines.steps.ledger import enter


@pytest.fixture
def home(tiny_home: Path, copied: Callable[[Path], Path]) -> Path:
    """A finished home of this test's own."""
    return copied(tiny_home)


def opened(home: Path) -> Site:
    """A home of the tests, opened as the graph opens it."""
    return open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)


def newest(home: Path, asset: str) -> Result:
    """The newest result of an asset."""
    found = latest(home / "results", asset)
    assert found is not None
    return found


def with_run(home: Path, name: str) -> Path:
    """The run behind the owners' values, copied under another name that the result then tells; its folder."""
    found = newest(home, "owner_values")
    folder = home / "runs" / name
    shutil.copytree(home / "runs" / found["run"], folder)
    store(home / "results", dataclasses.replace(found, values={**found.values, "run": name}))
    return folder


# --- what counts as committed ----------------------------------------------------------------------------------------


def test_a_run_that_was_entered_after_its_values_counts_for_nothing(ask, home: Path) -> None:
    """Same bank, same lots, same losses under another name: the ledger names that run, but behind the values that it would stand for."""
    folder = with_run(home, "proxy-ffffffffffff")
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(r"run NO proxy-f+, digest .*the ledger names none", said.out)
    late = started(opened(home), folder, newest(home, "evaluation_plan"))
    said = ask(home, "dispute")
    assert said.code == 1
    own = newest(home, "values")["entry"]
    assert f"entered in entry {late}, expected before its values were, in entry {own}" in said.out
    # A second entry of the same values behind it is not their own: the first one is.
    body = dict(ledger(home)[own]["body"])
    later = enter(opened(home), "values", body | {"transfer": "another word"})
    found = newest(home, "values")
    store(home / "results", dataclasses.replace(found, values={**found.values, "entry": later}))
    said = ask(home, "dispute")
    assert said.code == 1
    assert f"expected before its values were, in entry {own}" in said.out


def test_a_run_with_two_digests_in_the_ledger_is_refused_by_both(ask, home: Path) -> None:
    """A run.json that was changed and entered anew: neither entry counts, and both are named."""
    run = newest(home, "owner_values")["run"]
    first = next(e["body"]["run_digest"] for e in ledger(home) if e["body"].get("run") == run)
    path = home / "runs" / run / "run.json"
    path.write_bytes(path.read_bytes() + b"\n")
    late = started(opened(home), path.parent, newest(home, "evaluation_plan"))
    second = ledger(home)[late]["body"]["run_digest"]
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(rf"run NO .*none of them counts: {first[:16]} in entry \d+, {second[:16]} in entry {late}", said.out)  # fmt: skip
    # The file as it was doesn't help: who entered the second one has to say why.
    path.write_bytes(path.read_bytes()[:-1])
    assert ask(home, "dispute").code == 1


def test_a_value_table_that_the_ledger_does_not_name_is_said(ask, home: Path) -> None:
    """Other bytes with the same numbers are not what was entered; those that an erasure entered later are."""
    path = home / "tables/values.parquet"
    pl.read_parquet(path).write_parquet(path, compression="uncompressed")
    said = ask(home, "dispute")
    assert said.code == 1
    table = sha256(path.read_bytes()).hexdigest()
    assert re.search(rf"ledger NO the value table is {table[:16]}; .*the ledger names [0-9a-f]{{16}} in entry \d+", said.out)  # fmt: skip
    body = ledger(home)[newest(home, "values")["entry"]]["body"]
    late = enter(opened(home), "values", {**body, "table": table, "erasure": True})
    said = ask(home, "dispute")
    assert said.code == 0, said.out
    assert f"entry {late} names the table {table[:16]}" in said.out
