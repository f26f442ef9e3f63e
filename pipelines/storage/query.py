"""SQL over the home, for questions only.

``records`` (the version in force), ``quarantine``, ``duplicates``, ``clusters``, ``entropy``, ``owner_entropy``, ``surprisal``, ``model_surprisal``
(the list ``bits`` has one entry per token of the record), ``quality``, ``values`` and ``prices`` are views over Parquet files,
as far as they exist (write "values" in quotes: it is a word of SQL, and "buyer-NAME-prices" and
"buyer-NAME-values", the tables of other buyers). DuckDB is a guest here: it runs in memory, sees these views and
nothing else. User SQL cannot read or write a file, load an extension, see a Python variable or change a
setting; one reading statement is run at a time, and nothing spills to disk.

Texts of personal records are not behind the view, they are outside: the data set that holds personal rows has
no column ``text`` at all, so no clever query can find it. ``show_personal=True`` is for the operator who has a
reason.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipelines.storage.errors import QueryError
from pipelines.storage.home import Home
from pipelines.storage.manifest import parse_storage

if TYPE_CHECKING:
    import duckdb

TABLES: Final = (
    "quarantine",
    "duplicates",
    "clusters",
    "entropy",
    "owner_entropy",
    "surprisal",
    "model_surprisal",
    "quality",
    "values",
    "prices",
)

_SETTINGS: Final = (
    "SET temp_directory = ''",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def sql(home: Home, query: str, *, show_personal: bool = False) -> "duckdb.DuckDBPyRelation":
    """Run one reading statement.

    Args:
        home: a created home.
        query: SELECT, FROM, WITH, DESCRIBE, SHOW, SUMMARIZE, VALUES or EXPLAIN.
        show_personal: show the texts of personal records too.

    Returns:
        A relation: ``.to_arrow_table()``, ``.pl()``, ``.fetchall()``. It is evaluated when it is read.

    Raises:
        QueryError: not one reading statement, or DuckDB refused it; says which tables there are.
    """
    import duckdb

    connection = duckdb.connect(":memory:")
    names = _views(home, connection, show_personal=show_personal)
    for setting in _SETTINGS:
        connection.execute(setting)
    reading = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in reading:
            raise QueryError(
                "one reading statement is run at a time: SELECT, FROM, WITH, DESCRIBE, SHOW, EXPLAIN"
            )
        result = connection.sql(query)
    except duckdb.Error as error:
        message = str(error).split("\n\nLINE")[0].strip()
        raise QueryError(f"{message} (tables here: {', '.join(names) or 'none yet'})") from None
    if result is None:
        raise QueryError("the statement gives no rows")
    return result


def _views(home: Home, connection: Any, *, show_personal: bool) -> list[str]:
    names = []
    files = _record_files(home)
    if files:
        _record_view(connection, files, show_personal=show_personal)
        names.append("records")
    for name in (*TABLES, *sorted(path.stem for path in home.tables.glob("buyer-*.parquet"))):
        path = home.table(name)
        if path.exists():
            connection.register(name, _dataset([path]))
            names.append(name)
    return names


def _record_view(connection: Any, files: list[Path], *, show_personal: bool) -> None:
    import pyarrow as pa
    import pyarrow.dataset as ds

    whole = _dataset(files)
    if show_personal:
        connection.register("records", whole)
        return
    without_text = pa.schema([part for part in whole.schema if part.name != "text"])
    is_personal = ds.field("personal")
    connection.register("open_records", whole.filter(~is_personal))
    connection.register("personal_records", _dataset(files, without_text).filter(is_personal))
    connection.execute(
        "CREATE VIEW records AS SELECT * FROM open_records "
        "UNION ALL BY NAME SELECT *, NULL::VARCHAR AS text FROM personal_records"
    )


def _dataset(files: list[Path], schema: Any = None) -> Any:
    import pyarrow.dataset as ds

    return ds.dataset([str(file) for file in files], schema=schema, format="parquet")


def _record_files(home: Home) -> list[Path]:
    try:
        head = home.head_path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return []
    storage = parse_storage((home.storage / f"{head}.json").read_bytes(), head)
    return [home.blocks / block.file for block in storage.blocks]
