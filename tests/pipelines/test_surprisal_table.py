"""The surprisal of every token, as the graph leaves it for SQL."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from graph_commands import environment, values

from pipelines.results import latest
from pipelines.site import open_site
from pipelines.steps import information
from pipelines.storage.errors import ConfigError
from pipelines.storage.query import sql
from pipelines.storage.terms import InformationConfig
from trainer.spec import load_run
from valuation import reference


def test_the_surprisal_of_every_token_adds_up_to_the_record(tiny_home: Path) -> None:
    """DuckDB sums the list of a record to the bits that the entropy table states, and the memory map holds the same numbers."""
    import duckdb

    from valuation.surprisal import open_surprisal

    query = """with bits as (select record_id, unnest(bits)::double as bit from read_parquet($s))
        select record_id, sum(bit), any_value(e.surprisal_bits_per_token * e.tokens), any_value(e.tokens), count(*)
        from bits join read_parquet($e) e using (record_id) group by record_id"""
    tables = {
        "s": str(tiny_home / "tables/surprisal.parquet"),
        "e": str(tiny_home / "tables/entropy.parquet"),
    }
    rows = duckdb.connect().execute(query, tables).fetchall()
    assert len(rows) == values(tiny_home, "entropy")["records"]
    for _, total, stated, tokens, entries in rows:
        assert tokens == entries
        assert total == pytest.approx(stated, rel=1e-12)
    mapped = open_surprisal(tiny_home / "tables", sum(row[3] for row in rows))
    assert float(mapped.astype("f8").sum()) == pytest.approx(sum(row[1] for row in rows))


def test_the_mass_of_copies_is_that_of_the_clusters(tiny_home: Path) -> None:
    """DuckDB's share of each owner's tokens in exact and near copies, from two other tables, is what the owners' table and the result say."""
    import duckdb

    tables = {name: str(tiny_home / f"tables/{name}.parquet") for name in ("clusters", "entropy")}
    query = """select {} sum(tokens * (kind = 'exact')::int) / sum(tokens), sum(tokens * (kind = 'near')::int) / sum(tokens)
        from read_parquet($clusters) join read_parquet($entropy) e using (record_id) {}"""
    connection = duckdb.connect()
    rows = connection.execute(
        query.format("e.owner,", "group by e.owner order by e.owner"), tables
    ).fetchall()
    path = str(tiny_home / "tables/owner_entropy.parquet")
    stated = connection.execute(
        "select owner, exact_mass, near_mass from read_parquet($p) order by owner", {"p": path}
    ).fetchall()
    assert len(rows) == len(stated) > 1
    for (owner, *shares), (name, *told) in zip(rows, stated, strict=True):
        assert owner == name
        assert told == pytest.approx(shares, abs=1e-12)
    whole = connection.execute(query.format("", ""), tables).fetchone()
    result = values(tiny_home, "entropy")
    assert (result["exact_mass"], result["near_mass"]) == pytest.approx(whole, abs=1e-12)


def test_sql_offers_the_surprisal_of_every_token(tiny_home: Path) -> None:
    """One list per record that adds up to what `entropy` states, for personal records as well: bits are no text."""
    from pipelines.storage.home import Home

    query = """select count(*), max(abs(list_sum(bits::double[]) - e.surprisal_bits_per_token * e.tokens)), sum(len(bits) - e.tokens)
        from surprisal join entropy e using (record_id)"""
    rows, worst, missing = sql(Home(tiny_home), query).fetchall()[0]
    assert rows == values(tiny_home, "entropy")["records"]
    assert worst < 1e-6
    assert missing == 0


def test_a_strip_is_drawn_only_under_a_licence_that_is_still_accepted(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """`explain RECORD` draws a record whose owner consents; once no licence of the home is on the list, it draws nothing more."""
    home = copied(tiny_home)
    table = pl.read_parquet(home / "tables/surprisal.parquet")
    record = table.filter(pl.col("owner") == "wilson")["record_id"][0].hex()
    assert re.search("[▁▂▃▄▅▆▇█]{3}", ask(home, "explain", record).out)
    path = home / "dataworth.toml"
    text, lists = re.subn(r"(?m)^licences = .*$", 'licences = ["MIT"]', path.read_text())
    text, stated = re.subn(r"(?m)^text_licence = .*$", 'text_licence = "MIT"', text)
    assert lists == stated == 1
    path.write_text(text)
    said = ask(home, "explain", record)
    assert said.code == 0, said.err
    assert not re.search("[▁▂▃▄▅▆▇█]", said.out)


def trained(directory: Path, _world: int) -> dict[str, Any]:
    """The reference run, in this process."""
    if not (directory / "result.json").exists():
        assert reference.run(load_run(directory), directory) == 0
    return {}


def test_a_model_that_never_saw_a_record_tells_its_surprisal_beside_the_counts(
    tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """`[information] surprisal = "model"`: SQL adds each record's bits up to its stated rate and finds both references' first tokens equal; the counts' table stays; back to "ngram", the model's is gone."""
    home = copied(tiny_home)
    site = open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)
    config = dataclasses.replace(site.config, information=InformationConfig(surprisal="model"))
    asked = dataclasses.replace(site, config=config)
    parts = [latest(site.home.results, name) for name in ("corpus", "tokens")]
    before = site.home.table("surprisal").read_bytes()
    digest, found = information.entropy(asked, *parts, trained)  # type: ignore[arg-type]
    assert site.home.table("surprisal").read_bytes() == before
    assert all((home / file).exists() for file in found["files"])
    query = """select count(*), max(abs(list_sum(m.bits::double[]) - e.model_bits_per_token * e.tokens)), sum(len(m.bits) - e.tokens),
        sum((m.bits[1] <> s.bits[1])::int), sum((m.bits[2] <> s.bits[2])::int), avg(e.model_bits_per_token)
        from model_surprisal m join entropy e using (record_id) join surprisal s using (record_id)"""
    rows, worst, missing, heads, seconds, mean = sql(site.home, query).fetchall()[0]
    assert rows == found["records"]
    assert worst < 1e-6
    assert missing == heads == 0
    assert seconds > 0.9 * rows
    assert 1 < mean < 9.1  # 512 tokens: guessing takes 9 bits
    steps = load_run(home / "runs" / found["run"]).steps
    assert steps * site.size.rows * site.size.length * 2 >= found["tokens"]  # one pass
    fold_L = np.frombuffer(next((home / "runs/inputs").glob("folds-*.bin")).read_bytes(), "<i8")
    clusters = pl.read_parquet(site.home.table("clusters"))
    assert clusters.with_columns(fold=fold_L[fold_L >= 0]).group_by("cluster").agg(pl.col("fold").n_unique())["fold"].max() == 1  # fmt: skip
    (home / "tables/.surprisal.model.part").touch()  # of a killed one
    again, _ = information.entropy(site, *parts, trained)  # type: ignore[arg-type]
    assert again == values_digest(home)
    assert again != digest
    assert not list(home.glob("tables/*model*"))  # dots at the beginning too
    assert information.inputs(site) == {}
    assert information.inputs(asked) != {}
    with pytest.raises(ConfigError, match=r"expected one of ngram, model, got 'oracle'"):
        InformationConfig(surprisal="oracle")


def values_digest(home: Path) -> str:
    """The data version that the graph gave to its entropy."""
    found = latest(home / "results", "entropy")
    assert found is not None
    return found.data_version
