"""The pictures of a report: drawn once, written as inline SVG for the page or PNG for Dagster's UI.

A chart is a function ``(axes, palette) -> None``; `svg` and `png` supply the figure. Nothing of
pyplot is used, so no window, no global figure list. The bytes depend on the data only: matplotlib's
default style (whatever a user's ``matplotlibrc`` says), a fixed hash salt, no date, no creator.

In SVG the colours are stand-ins (``THEME``) that become CSS variables, so one picture serves light,
dark and print; text stays text and takes the page's font; ids get the chart's name as a prefix, since
several pictures share one HTML page.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from pipelines.reports.numbers import printable

WIDTH_IN = 6.6
_MAX_POINTS = 400
_LABEL_CHARS = 28


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by what they mean. Series differ in dash and marker too, never in colour alone."""

    ink: str
    muted: str
    grid: str
    good: str
    bad: str
    series: tuple[str, ...]


PAPER = Palette(
    ink="#1b2430",
    muted="#5b6675",
    grid="#dfe4ea",
    good="#1f5fa8",
    bad="#b4531a",
    series=("#1f5fa8", "#b4531a", "#2e7d5b", "#7a4fa3", "#5b6675"),
)
"""For PNG on white. Blue and orange stay apart for every common colour blindness."""

_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--grid",
    "#040404": "--good",
    "#050505": "--bad",
    "#060606": "--series-3",
    "#070707": "--series-4",
}
THEME = Palette(
    ink="#010101",
    muted="#020202",
    grid="#030303",
    good="#040404",
    bad="#050505",
    series=("#040404", "#050505", "#060606", "#070707", "#020202"),
)
"""Stand-ins that `svg` replaces by CSS variables of the page."""

Draw = Callable[["Axes", Palette], None]
_DASHES = ("-", "--", "-.", ":", (0, (1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a line chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its interval."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a bar could reach at most, with its interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Shares of one row, None where there is none; one per series of the chart."""

    label: str
    shares: tuple[float | None, ...]


def lines(series: Sequence[Line], x_label: str, y_label: str) -> Draw:
    """A line chart; at most 400 points are drawn per line, the last one always.

    Args:
        series: Lines, at most five; each needs as many x as y.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.

    Returns:
        The chart, for `svg` or `png`.
    """

    def draw(axes: "Axes", palette: Palette) -> None:
        for number, line in enumerate(series):
            keep = thinned(len(line.x))
            axes.plot(
                [line.x[i] for i in keep],
                [line.y[i] for i in keep],
                color=palette.series[number % len(palette.series)],
                linestyle=_DASHES[number % len(_DASHES)],
                linewidth=1.6,
                marker="o" if len(keep) == 1 else None,
                label=short_label(line.label),
            )
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(visible=True, color=palette.grid, linewidth=0.7)
        if len(series) > 1:
            axes.legend(frameon=False, labelcolor=palette.ink)

    return draw


def bars(rows: Sequence[Bar], x_label: str, limit: Limit | None = None) -> Draw:
    """Horizontal bars from zero, with whiskers; negative bars are hatched as well as coloured.

    Args:
        rows: Top to bottom.
        x_label: Name, unit and direction of the axis.
        limit: Drawn as a dashed line across all bars, its interval shaded.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: Palette) -> None:
        if limit is not None:
            if limit.low is not None and limit.high is not None:
                axes.axvspan(limit.low, limit.high, color=palette.muted, alpha=0.15, linewidth=0)
            axes.axvline(limit.value, color=palette.ink, linestyle="--", linewidth=1.2)
        for place, row in enumerate(rows):
            negative = row.value < 0
            axes.barh(
                place,
                row.value,
                height=0.56,
                color="none" if negative else palette.good,
                edgecolor=palette.bad if negative else palette.good,
                hatch="////" if negative else None,
                linewidth=1.0,
            )
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [place, place], color=palette.ink, linewidth=1.3)
                for end in (row.low, row.high):
                    axes.plot(
                        [end, end], [place - 0.15, place + 0.15], color=palette.ink, linewidth=1.3
                    )
        axes.axvline(0, color=palette.muted, linewidth=0.9)
        rows_axis(axes, [row.label for row in rows])
        axes.set_xlabel(x_label)
        axes.grid(visible=True, axis="x", color=palette.grid, linewidth=0.7)

    return draw


def dots(rows: Sequence[Dots], names: Sequence[str], x_label: str) -> Draw:
    """One row per item, one marker per series on an axis of shares from 0 to 100 %.

    Args:
        rows: Top to bottom.
        names: Names of the series, in the order of `Dots.shares`.
        x_label: Name and direction of the axis.

    Returns:
        The chart.
    """
    markers = ("s", "o", "D", "^")

    def draw(axes: "Axes", palette: Palette) -> None:
        for number, name in enumerate(names):
            shift = 0.2 * (number - (len(names) - 1) / 2)  # equal shares must not hide each other
            points = [
                (100 * share, place + shift)
                for place, row in enumerate(rows)
                if (share := row.shares[number]) is not None
            ]
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                marker=markers[number % len(markers)],
                s=34,
                facecolor=palette.series[number] if number != len(names) - 1 else "none",
                edgecolor=palette.series[number],
                linewidth=1.4,
                label=name,
                zorder=3,
            )
        rows_axis(axes, [row.label for row in rows])
        axes.set_xlim(-2.5, 102.5)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel(x_label)
        axes.grid(visible=True, axis="both", color=palette.grid, linewidth=0.7)
        axes.legend(
            frameon=False,
            labelcolor=palette.ink,
            ncols=len(names),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.2,
            handletextpad=0.3,
        )

    return draw


def heat(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], x_label: str, *, harm: bool = False
) -> Draw:  # fmt: skip
    """A map of numbers: colour by sign, strength by size, and the number itself in every cell.

    Args:
        rows: Names, top to bottom.
        columns: Names, left to right.
        values: One sequence per row, as long as `columns`; None is an empty cell with a dash.
        x_label: Name, unit and direction; a power of ten is put in front when the numbers are small.
        harm: Whether a positive number is bad news, so that it gets the colour of losses.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: Palette) -> None:
        from matplotlib.patches import Rectangle

        largest = max((abs(value) for row in values for value in row if value is not None), default=0.0)  # fmt: skip
        power = math.floor(math.log10(largest)) if largest > 0 else 0
        for place, row in enumerate(values):
            for column, one in enumerate(row):
                value = one or 0.0
                colour = palette.bad if (value < 0) != harm else palette.good
                strength = 0.75 * abs(value) / largest if largest > 0 else 0.0
                axes.add_patch(
                    Rectangle(
                        (column - 0.5, place - 0.5),
                        1,
                        1,
                        facecolor=colour,
                        alpha=strength,
                        edgecolor="none",
                    )
                )
                axes.text(
                    column,
                    place,
                    "\N{EN DASH}" if one is None else f"{value / 10**power:+.1f}",
                    ha="center",
                    va="center",
                    color=palette.ink,
                    fontsize=7,
                )
        rows_axis(axes, rows)
        axes.set_xticks(
            range(len(columns)),
            [short_label(name)[:14] for name in columns],
            rotation=35,
            ha="right",
            fontsize=7,
        )
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_xlabel(x_label if power == 0 else f"10^{power} {x_label}")

    return draw


def row_height(num_rows: int) -> float:
    """Height in inches of a chart with one row per item."""
    return 0.85 + 0.3 * max(1, num_rows)


def thinned(size: int) -> list[int]:
    """Which of `size` points are drawn: an even stride, and the last one always."""
    stride = max(1, -(-size // _MAX_POINTS))
    keep = list(range(0, size, stride))
    if keep and keep[-1] != size - 1:
        keep.append(size - 1)
    return keep


def svg(draw: Draw, name: str, title: str, description: str, height_in: float = 2.6) -> str:
    """Write a chart as an SVG element for inlining in HTML.

    Args:
        draw: The chart.
        name: Unique on the page, lower-case letters and hyphens; prefixes the ids.
        title: Short accessible name.
        description: What a reader who cannot see the picture needs to know.
        height_in: Height in inches; the width is `WIDTH_IN`.

    Returns:
        ``<svg role="img" ...>...</svg>`` without any address, script, date or style sheet.
    """
    buffer = io.StringIO()
    with _figure(draw, THEME, height_in, transparent=True) as figure:
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # \b.*? with DOTALL is safe here: matplotlib writes each of these elements once, unnested.
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    # Tags only: what looks like an attribute inside a label is somebody's name.
    text = re.sub(r"<[^>]+>", lambda tag: _inline(tag[0], name), text)
    text = re.sub(r"\n\s*", "\n", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes a viewBox"
    head = (
        f'<svg {box[0]} role="img" aria-labelledby="{name}-title {name}-desc">\n'
        f'<title id="{name}-title">{escape(title)}</title>\n'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return head + text[text.index(">") + 1 :].rstrip()


def png(draw: Draw, height_in: float = 2.6, dpi: int = 110) -> bytes:
    """Write a chart as a PNG on white.

    Args:
        draw: The chart.
        height_in: Height in inches.
        dpi: Pixels per inch; 110 keeps a chart near 15 kB, as it lives in an event log.

    Returns:
        The bytes of the file; equal data gives equal bytes.
    """
    buffer = io.BytesIO()
    with _figure(draw, PAPER, height_in, transparent=False) as figure:
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _inline(tag: str, name: str) -> str:
    """One tag of matplotlib's SVG, made fit for a page with other pictures and its own fonts."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    for stand_in, variable in _VARIABLES.items():
        tag = tag.replace(stand_in, f"var({variable})")
    return tag


@contextmanager
def _figure(
    draw: Draw, palette: Palette, height_in: float, *, transparent: bool
) -> "Iterator[Figure]":
    """A drawn figure inside the settings that it must also be saved under."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {
        "font.family": "DejaVu Sans",  # ships with matplotlib: the layout is the same everywhere
        "font.size": 8.5,
        "axes.edgecolor": palette.muted,
        "axes.labelcolor": palette.muted,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "ytick.labelcolor": palette.ink,
        "hatch.linewidth": 0.7,
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "text.parse_math": False,  # an owner id may hold dollar signs
    }
    with style.context(["default", settings]), warnings.catch_warnings():
        # Only the measuring font lacks the glyph; the page's own fonts draw it.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        if transparent:
            figure.patch.set_visible(False)
            axes.patch.set_visible(False)
        draw(axes, palette)
        yield figure


def rows_axis(axes: "Axes", labels: Sequence[str]) -> None:
    """Rows from top to bottom, named on the left."""
    axes.set_yticks(range(len(labels)), [short_label(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def short_label(label: str) -> str:
    """A label that fits beside a chart, control characters made visible."""
    text = printable(label)
    # matplotlib hides legend entries that begin with an underscore.
    text = f" {text}" if text.startswith("_") else text
    return text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…"
