"""The surprisal of every token, as the graph leaves it for SQL."""

from pathlib import Path

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
