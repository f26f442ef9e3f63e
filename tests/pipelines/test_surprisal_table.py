"""The surprisal of every token, as the graph leaves it for SQL."""

import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from graph_commands import values


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
    from pipelines.storage.query import sql

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
