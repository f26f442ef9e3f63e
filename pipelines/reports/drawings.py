"""Kinds of charts that the owners' section adds to `charts`, and what that section draws with them.

A `Drawing` is a chart with everything a page or Dagster's UI says beside it; the report writes it as SVG, an asset's page
as PNG. As in `charts`, nothing differs by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.reports import charts, numbers
from pipelines.reports.charts import rows_axis, short_label
from pipelines.reports.owners import Coverage, EntropySpread, Narrowing, OwnerWorth, Strip, Worth
from pipelines.reports.parts import NotAvailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 30
_LABELLED = 12
FULL_BITS = 16.0
"""A strip's darkest cell, in bits per token; the same as in `dataworth explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart and its words."""

    draw: charts.Draw
    title: str
    told: str
    """For readers who cannot see it."""
    caption: str
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a scatter chart, with a horizontal interval."""

    label: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> charts.Draw:
    """Points with horizontal whiskers; the largest are named beside their point.

    Args:
        points: any order.
        x_label: name and unit.
        y_label: name and unit.

    Returns:
        The chart, for `charts.svg` or `charts.png`.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        for point in points:
            if point.low is not None and point.high is not None:
                axes.plot([point.low, point.high], [point.y] * 2, color=palette.muted, linewidth=1)
            negative = point.x < 0
            axes.plot(
                [point.x], [point.y], marker="s" if negative else "o", markersize=5, linestyle="none",
                color=palette.bad if negative else palette.good,
            )  # fmt: skip
        for point in sorted(points, key=lambda p: -abs(p.x))[:_LABELLED]:
            axes.annotate(
                short_label(point.label), (point.x, point.y), xytext=(4, 4), textcoords="offset points",
                color=palette.ink, fontsize=7,
            )  # fmt: skip
        axes.axvline(0, color=palette.muted, linewidth=0.9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(numbers.printable(y_label))  # a currency is what somebody wrote
        axes.margins(x=0.12, y=0.15)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.grid(visible=True, color=palette.grid, linewidth=0.7)

    return draw


def boxes(rows: Sequence[EntropySpread], x_label: str) -> charts.Draw:
    """One box per row: 5, 25, 50, 75 and 95 % of its records.

    Args:
        rows: top to bottom.
        x_label: name and unit.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        for place, row in enumerate(rows):
            axes.plot([row.low, row.high], [place, place], color=palette.ink, linewidth=1.1)
            axes.barh(
                place, row.three_quarters - row.quarter, left=row.quarter, height=0.5,
                color=palette.good, edgecolor=palette.ink, linewidth=0.8, alpha=0.55, zorder=2,
            )  # fmt: skip
            axes.plot([row.median] * 2, [place - 0.25, place + 0.25], color=palette.ink, linewidth=2, zorder=3)  # fmt: skip
        rows_axis(axes, [f"{row.owner} ({row.records})" for row in rows])
        axes.set_xlabel(x_label)
        axes.grid(visible=True, axis="x", color=palette.grid, linewidth=0.7)

    return draw


def filled(rows: Sequence[Coverage], x_label: str) -> charts.Draw:
    """Shares of a whole per row, with the counts written beside them.

    Args:
        rows: top to bottom.
        x_label: name and unit.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        for place, row in enumerate(rows):
            axes.barh(place, 100, height=0.56, color="none", edgecolor=palette.muted, linewidth=0.8)
            axes.barh(place, 100 * row.trained / row.possible, height=0.56, color=palette.good)
            axes.text(101.5, place, f"{row.trained} of {row.possible}", va="center", color=palette.ink, fontsize=7.5)  # fmt: skip
        rows_axis(axes, [f"{row.size} lot{'s' * (row.size != 1)}" for row in rows])
        axes.set_xlim(0, 118)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel(x_label)

    return draw


def ribbons(rows: Sequence[Strip], x_label: str) -> charts.Draw:
    """One strip of cells per row, darker for more.

    Args:
        rows: top to bottom.
        x_label: name and unit.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        from matplotlib.patches import Rectangle

        for place, row in enumerate(rows):
            width = 100 / len(row.bits)
            for cell, bits in enumerate(row.bits):
                axes.add_patch(
                    Rectangle(
                        (cell * width, place - 0.3), width, 0.6, facecolor=palette.good, edgecolor="none",
                        alpha=min(1.0, max(0.04, bits / FULL_BITS)),
                    )
                )  # fmt: skip
        rows_axis(axes, [f"{row.record[:10]} {row.owner}" for row in rows])
        axes.set_xlim(0, 100)
        axes.set_xlabel(x_label)

    return draw


def owner_bars(owners: Sequence[OwnerWorth]) -> Drawing:
    """Value per owner with its interval."""
    shown, left_out = _ends(owners)
    bars = [
        charts.Bar(label=o.owner, value=o.value.value, low=o.value.low, high=o.value.high)
        for o in shown
    ]
    told = "; ".join(f"{o.owner} {o.value.value:+.5f}" for o in shown)
    return Drawing(
        draw=charts.bars(bars, "value, nats of held-out loss per token (right: lowers the loss)"),
        title="Value per owner",
        told=f"Horizontal bars, largest value first: {told}.",
        caption=f"Value of each owner, its token share of the lots it stands in, with its interval.{left_out}",
        height=charts.row_height(len(bars)),
    )


def value_price(owners: Sequence[OwnerWorth], currency: str) -> Drawing:
    """Value against price; owners of one rule stand on one line, and what is off it was floored, held or offset."""
    points = [
        Point(label=o.owner, x=o.value.value, y=o.price_microunits / 1e6, low=o.value.low, high=o.value.high)
        for o in owners
        if o.price_microunits is not None
    ]  # fmt: skip
    told = "; ".join(f"{p.label} {p.x:+.5f} nats, {p.y:,.2f} {currency}" for p in points[:MAX_ROWS])
    return Drawing(
        draw=scatter(points, "value, nats of held-out loss per token", f"price, {currency}"),
        title="Value and price per owner",
        told=f"Scatter chart: {told}.",
        caption="Price against value, one point per owner, with the value's interval. Where the rule is one proportion, all points lie on one line; values below zero (squares) are paid nothing.",
        height=3.0,
    )


def entropy_boxes(rows: Sequence[EntropySpread]) -> Drawing:
    """Distribution of surprisal over each owner's records."""
    shown = rows[:MAX_ROWS]
    told = "; ".join(f"{r.owner} median {r.median:.2f}, 5 % {r.low:.2f}, 95 % {r.high:.2f}" for r in shown)  # fmt: skip
    return Drawing(
        draw=boxes(shown, "surprisal of a record, bits per token"),
        title="Entropy per owner",
        told=f"Box per owner: {told}.",
        caption="Surprisal of each owner's records (their number in brackets) under a reference that never saw them: box from 25 to 75 %, line from 5 to 95 %. Information, not worth: noise is surprising too.",
        height=charts.row_height(len(shown)),
    )


def coverage_bars(rows: Sequence[Coverage]) -> Drawing:
    """How much of all coalitions the bank holds, by size."""
    told = "; ".join(f"{r.size} lots: {r.trained} of {r.possible}" for r in rows)
    return Drawing(
        draw=filled(rows, "trained, % of all coalitions of this size"),
        title="Coverage of the coalition bank",
        told=f"Bars: {told}.",
        caption="Coalitions of lots that were retrained, by size, out of all there are. One bank serves every buyer's target and every later update.",
        height=charts.row_height(len(rows)),
    )


def narrowing_lines(part: Narrowing) -> Drawing:
    """Interval width against utility calls."""
    lines = [
        charts.Line(label="widest owner", x=part.calls, y=part.worst_width),
        charts.Line(label="mean of the owners", x=part.calls, y=part.mean_width),
    ]
    last = f"{part.calls[-1]} coalitions: mean {part.mean_width[-1]:.2e}, widest {part.worst_width[-1]:.2e}"
    return Drawing(
        draw=charts.lines(lines, "retrained coalitions (utility calls)", "interval width, nats"),
        title="Convergence of the owners' values",
        told=f"Line chart; {last}.",
        caption="Width of the owners' intervals had the valuation stopped earlier, replayed from the bank. What remains at the end is the spread over the target's records and the seeds, which no further coalition narrows.",
        height=2.6,
    )


def adding_lines(best: Sequence[float], worst: Sequence[float], mean: Sequence[float]) -> Drawing:
    """Loss as lots are added by value, and by the mean of all orders."""
    sizes = tuple(range(len(mean)))
    lines = [
        charts.Line(label="least valued first", x=sizes, y=tuple(worst)),
        charts.Line(label="mean of all orders", x=sizes, y=tuple(mean)),
        charts.Line(label="most valued first", x=sizes, y=tuple(best)),
    ]
    told = "; ".join(f"{size} lots: {b:.4f}, {m:.4f}, {w:.4f}" for size, b, m, w in zip(sizes, best, mean, worst, strict=True))  # fmt: skip
    return Drawing(
        draw=charts.lines(lines, "lots trained on", "loss on the target, nats per token"),
        title="Lots added and removed by value",
        told=f"Line chart; most valued first, mean of all orders, least valued first: {told}.",
        caption="Loss with so many lots, from the bank, every point really trained. Read from the right, lots are taken away: along the upper line the most valued first.",
        height=2.6,
    )


def strip_ribbons(rows: Sequence[Strip]) -> Drawing:
    """Where in a record the surprise sits."""
    told = "; ".join(f"{r.record[:10]} of {r.owner}: mean {sum(r.bits) / len(r.bits):.2f} bits per token" for r in rows)  # fmt: skip
    return Drawing(
        draw=ribbons(rows, "place in the record, %"),
        title="Surprisal along single records",
        told=f"Strips: {told}.",
        caption=f"Surprisal from beginning to end of one record per owner (the one of median surprisal); darker is more, full at {FULL_BITS:.0f} bits per token. Only records whose owner consents to display under an accepted licence; no word is shown.",
        height=charts.row_height(len(rows)),
    )


def drawings(part: Worth) -> dict[str, Drawing]:
    """Every chart that the section has data for, by its name on the page.

    Args:
        part: the section.

    Returns:
        Name → drawing.
    """
    found = {}
    if part.owners:
        found["owner-values"] = owner_bars(part.owners)
    if any(owner.price_microunits is not None for owner in part.owners):
        found["value-price"] = value_price(part.owners, part.currency)
    if part.entropy:
        found["entropy"] = entropy_boxes(part.entropy)
    if part.coverage:
        found["coverage"] = coverage_bars(part.coverage)
    if not isinstance(part.narrowing, NotAvailable) and part.narrowing.calls:
        found["narrowing"] = narrowing_lines(part.narrowing)
    if not isinstance(part.strips, NotAvailable) and part.strips:
        found["strips"] = strip_ribbons(part.strips)
    return found


def png(drawing: Drawing) -> bytes:
    """A drawing for an asset's page."""
    return charts.png(drawing.draw, drawing.height, dpi=80)


def _ends(owners: Sequence[OwnerWorth]) -> tuple[Sequence[OwnerWorth], str]:
    """At most `MAX_ROWS` owners, from both ends, and what that leaves out in words."""
    rows = sorted(owners, key=lambda o: (-o.value.value, o.owner))
    if len(rows) <= MAX_ROWS:
        return rows, ""
    half = MAX_ROWS // 2
    return (
        [*rows[:half], *rows[-half:]],
        f" The {MAX_ROWS} at the ends of {numbers.integer(len(rows))} are drawn; the table has all.",
    )
