"""What Dagster's UI shows: exact Markdown, inert cells, reproducible pictures, typed columns."""

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import display

ROOT = Path(display.__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def test_importing_is_cheap() -> None:
    """The module loads no dagster, matplotlib, torch, polars or pyarrow until a function needs it."""
    code = (
        "import sys, pipelines.display;"
        "heavy = {'torch','matplotlib','polars','jinja2','dagster','numpy','pyarrow'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_table_is_written_exactly() -> None:
    """Numbers on the right with four decimals, thousands separated, None and flags in words."""
    table = display.table_md(
        ["owner", "value, nat", "tokens", "paid"],
        [["adams", 0.123456, 12345, True], ["b|c", -1e-9, None, False]],
    )
    assert table.md_str == (
        "| owner | value, nat | tokens | paid |\n"
        "| --- | ---: | ---: | --- |\n"
        "| adams | 0.1235 | 12,345 | yes |\n"
        "| b&#124;c | 0.0000 | n/a | no |"
    )


def test_intervals_and_snake_case_stay_readable() -> None:
    """What Markdown would not act on is left as it is."""
    cell = display.table_md(["x"], [["[+0.1, +0.2] of target_value (95 %)"]]).md_str.splitlines()[2]
    assert cell == "| [+0.1, +0.2] of target_value (95 %) |"


@given(st.text())
@settings(deadline=None)
def test_no_cell_can_leave_its_place(text: str) -> None:
    """Any text keeps the table at three lines of one cell, without tags, links, code or emphasis."""
    lines = display.table_md(["x"], [[text]]).md_str.split("\n")
    assert len(lines) == 3
    cell = lines[2].removeprefix("| ").removesuffix(" |")
    assert not set(cell) & set("<>|`*\\~\r\n")
    assert "](" not in cell


def test_a_link_in_a_cell_is_inert() -> None:
    """An owner named like a link or a tag shows as that text."""
    cell = display.table_md(["x"], [["[a](javascript:alert) <script>"]]).md_str.splitlines()[2]
    assert cell == "| [a&#93;(javascript:alert) &#60;script&#62; |"


def test_a_long_table_says_what_it_leaves_out() -> None:
    """Rows beyond the limit are counted, not dropped silently."""
    text = display.table_md(["x"], [[i] for i in range(100)], max_rows=10).md_str
    assert text.endswith("| 9 |\n\n90 more rows are not shown.")


def test_a_ragged_row_is_refused() -> None:
    """A row of another length names itself and both lengths."""
    with pytest.raises(ValueError, match="row 1: expected 2 cells, got 1"):
        display.table_md(["a", "b"], [[1, 2], [3]])


def test_facts_become_two_columns() -> None:
    """A mapping is a table of name and value, in its order."""
    assert display.facts_md({"live, records": 1200, "loss, nat": 3.14159}).md_str.splitlines()[
        2:
    ] == [
        "| live, records | 1,200 |",
        "| loss, nat | 3.1416 |",
    ]


@pytest.mark.parametrize(
    ("value", "expected"), [(1.23456, 1.2346), (-0.00001, 0.0), (3, 3.0), (None, None)]
)
def test_round4(value: Any, expected: Any) -> None:
    """Four decimals, no negative zero, always a float so that the UI plots it."""
    got = display.round4(value)
    assert repr(got) == repr(expected)


def test_a_picture_is_base64_markdown() -> None:
    """The bytes come back from the Markdown, and the label cannot close its bracket."""
    text = display.plot_md(PNG + b"x", alt="a](b) <i>").md_str
    assert text.startswith("![a&#93;(b) &#60;i&#62;](data:image/png;base64,")
    assert base64.b64decode(text.rpartition(",")[2].removesuffix(")")) == PNG + b"x"


def test_what_is_no_png_is_refused() -> None:
    """A wrong file is caught here, not as a broken picture in the UI."""
    with pytest.raises(ValueError, match="expected the bytes of a PNG file"):
        display.plot_md(b"<svg>")


def test_charts_are_reproducible_and_fit_the_event_log() -> None:
    """Equal data gives equal PNG bytes below 40 kB, other data other bytes."""
    curves = {
        "train": (range(1000), [5 - i / 400 for i in range(1000)]),
        "gold": ([0, 1], [5.0, 4.0]),
    }
    bars = {"early": 0.2, "middle": 0.8, "late": -0.1}
    ends = {"early": (0.15, 0.25)}
    for draw in (lambda: display.loss_png(curves), lambda: display.bars_png(bars, ends)):
        first = draw()
        assert first == draw()
        assert first.startswith(PNG)
        assert len(first) < 40_000
    assert display.bars_png(bars, ends) != display.bars_png(bars)
    assert display.plot_md(display.bars_png(bars)).md_str.startswith("![chart]")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: display.loss_png({}),
        lambda: display.loss_png({str(i): ([0], [0.0]) for i in range(9)}),
        lambda: display.loss_png({"a": ([0, 1], [0.0])}),
        lambda: display.bars_png({}),
        lambda: display.bars_png({"a": 1.0}, {"b": (0.0, 1.0)}),
    ],
)
def test_charts_without_sense_are_refused(draw: Any) -> None:
    """Nothing to draw, too many runs, ragged runs, an interval of nobody."""
    with pytest.raises(ValueError, match=r"expected|but"):
        draw()


def test_column_schema_reads_polars_and_pyarrow_alike() -> None:
    """Names, types, nullability, descriptions and tags arrive in the Columns tab in order."""
    import polars as pl
    import pyarrow as pa

    schema = display.column_schema(
        pl.Schema({"record_id": pl.Binary(), "text": pl.String()}),
        descriptions={"record_id": "row key"},
        personal=["text"],
        unique=["record_id"],
    )
    first, second = schema.columns
    assert (first.name, first.type, first.description) == ("record_id", "Binary", "row key")
    assert first.constraints.unique
    assert not second.constraints.unique
    assert (dict(first.tags), dict(second.tags)) == ({}, {"pii": ""})
    arrow = display.column_schema(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    assert (arrow.columns[0].type, arrow.columns[0].constraints.nullable) == ("int64", False)


def test_an_unknown_column_is_refused() -> None:
    """A tag on a column that was renamed is an error, so personal data cannot lose its tag."""
    with pytest.raises(ValueError, match="no such column: txt"):
        display.column_schema({"text": "String"}, personal=["txt"])


def test_dagster_accepts_the_metadata() -> None:
    """The well-known keys and all makers work on a real materialization."""
    import dagster as dg

    schema = display.column_schema({"a": "Int64"})
    metadata = {
        **display.table_metadata(3, schema, uri="versions/x.parquet"),
        "table": display.table_md(["a"], [[1]]),
        "loss": display.round4(1.23456),
    }
    result = dg.MaterializeResult(metadata=metadata)
    assert result.metadata is not None
    assert set(result.metadata) == {
        "dagster/row_count",
        "dagster/column_schema",
        "dagster/uri",
        "table",
        "loss",
    }
    assert set(display.table_metadata(3, schema)) == {"dagster/row_count", "dagster/column_schema"}
