"""Everything that Dagster's UI shows as metadata, in one place.

What the UI does with it (looked at, 1.13): short Markdown tables render inline and carry the
headline; a Markdown picture hides behind a link and lives in the event log, so it stays small; every
float becomes a plot over time, so names must not change and long tails are rounded; a column schema
fills the Columns tab. Only numbers, ids, counts and charts come this way: never a row of data, for
the event log outlives an erasure.

Dagster and matplotlib load when a function needs them, so importing this module is cheap.
"""

import re
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster import MarkdownMetadataValue, TableSchema

    from pipelines.reports.influence import Influence

MAX_ROWS = 30
"""Longest Markdown table: a longer one drowns the page, and says how many rows it left out."""


def round4(value: float | None) -> float | None:
    """A number as the UI shows it: four decimals, no negative zero.

    Args:
        value: Any number; None stays None.

    Returns:
        The rounded float, so that the UI plots it over time.
    """
    return None if value is None else round(float(value), 4) + 0.0


def plot_md(png: bytes, alt: str = "chart") -> "MarkdownMetadataValue":
    """A picture as Markdown metadata.

    Args:
        png: Bytes of a PNG file; keep it below about 30 kB, it is stored in the event log.
        alt: What the picture shows, for readers who cannot see it.

    Returns:
        Metadata with the picture inside as base64.

    Raises:
        ValueError: The bytes are not a PNG.
    """
    if not png.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"expected the bytes of a PNG file, got {png[:8]!r}")
    label = _cell(alt).replace("[", "&#91;").replace("]", "&#93;")
    return markdown(f"![{label}](data:image/png;base64,{b64encode(png).decode()})")


def table_md(
    columns: Sequence[str], rows: Sequence[Sequence[object]], max_rows: int = MAX_ROWS
) -> "MarkdownMetadataValue":
    """A short table as Markdown metadata; numbers stand on the right, floats have four decimals.

    Args:
        columns: Names of the columns, with their units.
        rows: One sequence per row, as long as `columns`; None shows as n/a.
        max_rows: Rows beyond this are counted in a last line instead of shown.

    Returns:
        Metadata that the UI renders inline; markup inside a cell is inert.

    Raises:
        ValueError: A row has another length than `columns`.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number}: expected {len(columns)} cells, got {len(row)}")
    shown = rows[:max_rows]
    right = [
        bool(shown) and all(row[place] is None or _is_number(row[place]) for row in shown)
        for place in range(len(columns))
    ]
    lines = [
        _row(_cell(name) for name in columns),
        _row("---:" if flag else "---" for flag in right),
        *(_row(_cell(_text(value)) for value in row) for row in shown),
    ]
    if len(rows) > len(shown):
        lines += ["", f"{len(rows) - len(shown)} more rows are not shown."]
    return markdown("\n".join(lines))


def facts_md(facts: Mapping[str, object]) -> "MarkdownMetadataValue":
    """Names and values as a two-column table.

    Args:
        facts: Values by name, in the order shown; put the unit into the name.

    Returns:
        Metadata that the UI renders inline.
    """
    return table_md(["", "value"], [[name, value] for name, value in facts.items()])


def markdown(text: str) -> "MarkdownMetadataValue":
    """Markdown metadata; the caller answers for markup inside."""
    from dagster import MetadataValue

    return MetadataValue.md(text)


def loss_png(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    y_label: str = "loss, nats per token (lower is better)",
) -> bytes:
    """Loss curves as a PNG.

    Args:
        curves: ``(steps, losses)`` by the name of the run; at most five.
        y_label: Name, unit and direction of the vertical axis.

    Returns:
        PNG bytes; equal data gives equal bytes.

    Raises:
        ValueError: A run has another count of steps than of losses, or there are no or too many.
    """
    from pipelines.reports import charts

    if not 1 <= len(curves) <= len(charts.PAPER.series):
        raise ValueError(f"expected 1 to {len(charts.PAPER.series)} runs, got {len(curves)}")
    for name, (steps, losses) in curves.items():
        if len(steps) != len(losses):
            raise ValueError(f"{name}: {len(steps)} steps but {len(losses)} losses")
    lines = [charts.Line(label=name, x=x, y=y) for name, (x, y) in curves.items()]
    return charts.png(charts.lines(lines, "step", y_label))


def bars_png(
    values: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    x_label: str = "value, nats of held-out loss (right: lowers the loss)",
) -> bytes:
    """Horizontal bars with intervals as a PNG, in the order given, top first.

    Args:
        values: Value by name; at most `MAX_ROWS` are drawn.
        intervals: ``(low, high)`` by name; a name without one gets no whisker.
        x_label: Name, unit and direction of the axis.

    Returns:
        PNG bytes; equal data gives equal bytes.

    Raises:
        ValueError: There is nothing to draw, or an interval belongs to no value.
    """
    from pipelines.reports import charts

    known = intervals or {}
    if not values or set(known) - set(values):
        names = sorted(set(known) - set(values))
        raise ValueError(f"expected values, and intervals of these only; got extra {names}")
    bars = []
    for name, value in list(values.items())[:MAX_ROWS]:
        low, high = known.get(name, (None, None))
        bars.append(charts.Bar(label=name, value=value, low=low, high=high))
    return charts.png(charts.bars(bars, x_label), charts.row_height(len(bars)))


def heat_png(part: "Influence", most: int = 12) -> bytes:
    """Owner against target as a PNG.

    Args:
        part: The influence section of a report.
        most: Owners drawn on each side, those with the largest numbers.

    Returns:
        PNG bytes; equal data gives equal bytes.
    """
    from pipelines.reports import charts
    from pipelines.reports.influence import limited

    rows, columns, values = limited(part.heat, most)
    draw = charts.heat(rows, columns, values, "nats per held-out token (columns: whose records)")
    return charts.png(
        draw, charts.row_height(len(rows)) + 0.5, dpi=80
    )  # many small texts: keep it light


def column_schema(
    schema: Any,
    *,
    descriptions: Mapping[str, str] | None = None,
    personal: Collection[str] = (),
    unique: Collection[str] = (),
) -> "TableSchema":
    """The Columns tab from a polars or pyarrow schema; goes under ``dagster/column_schema``.

    Args:
        schema: A polars schema (a mapping of names to types) or a pyarrow schema.
        descriptions: What a column holds, by name.
        personal: Columns that may hold personal data; tagged ``pii``.
        unique: Columns without repeated values.

    Returns:
        Dagster's table schema, columns in order.

    Raises:
        ValueError: A description, tag or chip names a column that is not there.
    """
    from dagster import TableColumn, TableColumnConstraints, TableSchema

    told = descriptions or {}
    columns = list(_columns(schema))
    unknown = ({*told, *personal, *unique}) - {name for name, _, _ in columns}
    if unknown:
        raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
    return TableSchema(
        columns=[
            TableColumn(
                name=name,
                type=kind,
                description=told.get(name),
                constraints=TableColumnConstraints(nullable=nullable, unique=name in unique),
                tags={"pii": ""} if name in personal else None,
            )
            for name, kind, nullable in columns
        ]
    )


def table_metadata(num_rows: int, schema: "TableSchema", uri: str | None = None) -> dict[str, Any]:
    """The keys that Dagster knows for a table.

    Args:
        num_rows: Rows written.
        schema: From `column_schema`.
        uri: Where the table lies; a path relative to the home, never one of a person's machine.

    Returns:
        Metadata, ready to be merged into that of an asset.
    """
    found: dict[str, Any] = {"dagster/row_count": num_rows, "dagster/column_schema": schema}
    return found if uri is None else {**found, "dagster/uri": uri}


def _columns(schema: Any) -> Iterator[tuple[str, str, bool]]:
    """Name, type and nullable of each column; told apart by shape, so neither library is loaded."""
    if isinstance(schema, Mapping):  # polars.Schema is an ordered dict, always nullable
        for name, kind in schema.items():
            yield name, str(kind), True
    else:
        for field in schema:
            yield field.name, str(field.type), field.nullable


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{round4(value):.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# What Markdown or HTML would act on: markup signs, underscores at the edge of a word, link brackets.
# Intervals such as [0.1, 0.2] and names_like_this stay readable in the raw text.
_ACTIVE = re.compile(r"[&<>|`*\\~]|(?<!\w)_|_(?!\w)|\](?=[(\[:])")


def _cell(text: str) -> str:
    """Text that Markdown and HTML leave as it is: markup becomes entities, lines become one."""
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", " ".join(text.split()))


def _row(cells: Iterator[str] | Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
