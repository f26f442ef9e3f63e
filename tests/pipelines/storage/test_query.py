"""SQL: questions only, and no personal text by any trick."""

import contextlib

import duckdb
import polars as pl
import pytest

from pipelines.storage.config import Config
from pipelines.storage.errors import QueryError
from pipelines.storage.query import sql
from pipelines.storage.versions import Versions

SECRET = "The phone number of Zaphod B. is 424242."


@pytest.fixture
def filled(home, keys, deliver, take_in):
    """A corpus with one personal record, and four of the five tables."""
    deliver("ada/a.jsonl", [{"text": "open one"}, {"text": "open two"}, {"text": ""}])
    deliver("reg/p.jsonl", [{"text": SECRET, "personal": True}])
    result = take_in(Config())
    Versions(home, keys).publish(result.records)
    result.quarantine.write_parquet(home.table("quarantine"))
    for name in ("clusters", "values", "prices"):
        pl.DataFrame({"subject": ["ada"], "amount": [3]}).write_parquet(home.table(name))
    return home


def test_views_show_what_is_there(filled):
    """Records of HEAD with their index, and every table by its name."""
    rows = sql(filled, "SELECT index, owner, text FROM records ORDER BY index").fetchall()
    assert rows == [(0, "ada", "open one"), (1, "ada", "open two"), (2, "reg", None)]
    assert sql(filled, "SELECT reason FROM quarantine").fetchall() == [("empty",)]
    for name in ("clusters", '"values"', "prices"):
        assert sql(filled, f"FROM {name}").fetchall() == [("ada", 3)]
    assert sql(filled, "SELECT count(*) AS n FROM records").to_arrow_table().to_pylist() == [
        {"n": 3}
    ]
    assert sql(filled, "DESCRIBE records").fetchall()
    assert sql(filled, "EXPLAIN SELECT 1").fetchall()
    assert sql(filled, "WITH a AS (SELECT 1 AS x) SELECT x FROM a;").fetchall() == [(1,)]


def test_an_operator_can_ask_for_personal_texts(filled):
    """show_personal=True is the only way."""
    rows = sql(filled, "SELECT text FROM records WHERE personal", show_personal=True).fetchall()
    assert rows == [(SECRET,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT text FROM records",
        "SELECT * FROM records WHERE personal",
        "SELECT * FROM records WHERE text LIKE '%Zaphod%'",
        "SELECT count(*) FILTER (text LIKE '%Zaphod%') FROM records",
        "SELECT * FROM open_records",
        "SELECT * FROM open_records WHERE personal",
        "SELECT text FROM open_records WHERE NOT (NOT personal)",
        "SELECT text FROM open_records WHERE owner = 'reg' OR true",
        "SELECT * FROM personal_records",
        "SELECT min(text), max(text), string_agg(text) FROM records",
        "SELECT COLUMNS('.*') FROM personal_records",
        "SUMMARIZE records",
        "SUMMARIZE open_records",
    ],
)
def test_personal_texts_are_outside_not_hidden(filled, query):
    """Whatever is asked of whatever name, the text and its words do not come out."""
    shown = str(sql(filled, query).fetchall())
    assert "Zaphod" not in shown
    assert "424242" not in shown


def test_filtered_data_sets_stay_filtered(filled):
    """Counts without columns, and predicates pushed down, see the same rows."""
    assert sql(filled, "SELECT count(*) FROM open_records").fetchall() == [(2,)]
    assert sql(filled, "SELECT count(*) FROM personal_records").fetchall() == [(1,)]
    assert sql(filled, "SELECT count(*) FROM open_records WHERE owner = 'reg'").fetchall() == [(0,)]
    with pytest.raises(QueryError, match="text"):
        sql(filled, "SELECT text FROM personal_records")


def attacks(home):
    block = next(home.blocks.iterdir())
    return [
        f"SELECT * FROM read_parquet('{block}')",
        f"SELECT * FROM '{block}'",
        f"SELECT * FROM parquet_metadata('{block}')",
        f"SELECT * FROM parquet_schema('{block}')",
        f"SELECT * FROM read_blob('{home.keys_path}')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM home",
        "SELECT getenv('HOME')",
        "SELECT * FROM duckdb_secrets() WHERE which_secret('x', 's3') IS NULL",
        f"COPY (SELECT 1) TO '{home.path}/out.csv'",
        f"COPY records TO '{home.path}/out.parquet'",
        f"EXPORT DATABASE '{home.path}/out'",
        f"ATTACH '{home.path}/out.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "RESET enable_external_access",
        "PRAGMA enable_profiling",
        "CREATE TABLE t AS SELECT 1",
        "DROP VIEW records",
        "DELETE FROM records",
        "INSERT INTO records SELECT * FROM records",
        "CALL pragma_version()",
        "SELECT 1; SELECT 2",
        "SELECT 1; COPY (SELECT 1) TO '/tmp/x'",
        "",
        ";",
        "SELEC 1",
        "BEGIN",
        f"EXPLAIN ANALYZE COPY (SELECT 1) TO '{home.path}/out.csv'",
    ]


def test_user_sql_can_neither_read_nor_write_outside(filled):
    """Each attack ends in a QueryError (at the latest when it is read), and no file appears."""
    before = sorted(filled.path.rglob("*"))
    for query in attacks(filled):
        got: list[object] = []
        with contextlib.suppress(QueryError, duckdb.Error):  # DuckDB's own when it is read late
            got = sql(filled, query).fetchall()
        assert got == [], query
    assert sorted(filled.path.rglob("*")) == before


@pytest.mark.parametrize("method", ["write_parquet", "write_csv", "to_parquet", "to_csv"])
def test_a_relation_cannot_be_written_to_a_file(filled, method):
    """The returned object obeys the same walls."""
    relation = sql(filled, "SELECT 1 AS a")
    with pytest.raises(Exception, match="disabled by configuration"):
        getattr(relation, method)(str(filled.path / "out"))
    assert not (filled.path / "out").exists()


def test_an_empty_home_says_which_tables_there_are(home):
    """No corpus yet: SQL works, and the error names what is missing and what exists."""
    assert sql(home, "SELECT 1").fetchall() == [(1,)]
    with pytest.raises(QueryError, match="tables here: none yet"):
        sql(home, "SELECT * FROM records")
    pl.DataFrame({"a": [1]}).write_parquet(home.table("prices"))
    with pytest.raises(QueryError, match="tables here: prices"):
        sql(home, "SELECT * FROM records")
    assert sql(home, "FROM prices").fetchall() == [(1,)]
