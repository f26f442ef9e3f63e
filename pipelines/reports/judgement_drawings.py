"""What the report and the judge's page draw of a judgement: scores under their ceiling, and losses along the curves."""

from pipelines.reports import charts, numbers
from pipelines.reports.drawings import Drawing
from pipelines.reports.influence import Judged, MethodScore
from pipelines.reports.parts import Estimate

_ARMS = {"top": "most valued first", "bottom": "least valued first", "random": "any order"}


def judgement_drawings(part: Judged) -> dict[str, Drawing]:
    """Every picture that a judgement has numbers for, by its name on the page.

    Args:
        part: The judgement.

    Returns:
        Name → drawing; no scores where so few subsets were retrained that a rank tells nothing.
    """
    found = {}
    if part.scores:
        found["judged"] = score_bars(part)
        found["judged-whole"] = whole_bars(part)
    for name, removed in (("removal", True), ("addition", False)):
        if any(point.removed == removed for point in part.curve):
            found[name] = curve_lines(part, removed=removed)
    return found


def score_bars(part: Judged) -> Drawing:
    """Linear datamodeling score of every method, with its interval and the ceiling."""
    return _bars(
        part.scores, part.ceiling, "Score of each method",
        "Rank correlation of what each method foretold for a subset with the loss that its retraining had, mean over held-out records, with its interval",
    )  # fmt: skip


def whole_bars(part: Judged) -> Drawing:
    """The same of the target as a whole, where in-run credit stands too."""
    return _bars(
        part.whole, part.ceiling_whole, "Score of each method on the target as a whole",
        "The same of the sum over held-out records, one correlation in place of one per record: the question that in-run credit answers. Noisier, because nothing is averaged",
    )  # fmt: skip


def _bars(
    scores: tuple[MethodScore, ...], ceiling: Estimate | None, title: str, caption: str
) -> Drawing:
    bars = [
        charts.Bar(label=row.method.partition("(")[0], value=row.score.value, low=row.score.low, high=row.score.high)
        for row in scores
    ]  # fmt: skip
    told = "; ".join(f"{row.method} {numbers.signed(row.score.value, 2)}" for row in scores)
    limit, more = None, ""
    if ceiling is not None:
        limit = charts.Limit(value=ceiling.value, low=ceiling.low, high=ceiling.high)
        told += f"; at most {numbers.fixed(ceiling.value, 2)}"
        more = " Dashed: an upper bound of what scores reach on average that know the expected loss and not the training's seed; loose where held-out records differ in noise; its interval is shaded."
    return Drawing(
        draw=charts.bars(bars, "linear datamodeling score (right: foretells better)", limit),
        title=title,
        told=f"Horizontal bars: {told}.",
        caption=f"{caption}. The last row is a random draw at a wider level: an interval without 0 there means a broken judge.{more}",
        height=charts.row_height(len(bars)),
    )


def curve_lines(part: Judged, *, removed: bool) -> Drawing:
    """Loss as a share of the scored records is taken away from all, or given alone."""
    points = [point for point in part.curve if point.removed == removed]
    shares = [point.percent for point in points]
    arms = {name: [float(getattr(point, arm)) for point in points] for arm, name in _ARMS.items()}
    told = "; ".join(
        f"{name} {', '.join(numbers.fixed(loss, 4) for loss in losses)}"
        for name, losses in arms.items()
    )
    order = (
        "The line of the most valued should lie on top, that of the least valued at the bottom"
        if removed
        else "The line of the most valued should lie at the bottom, that of the least valued on top"
    )
    return Drawing(
        draw=charts.lines(
            [charts.Line(label=name, x=shares, y=losses) for name, losses in arms.items()],
            f"scored records {'taken away' if removed else 'given alone'}, %", "loss, nats per token",
        ),
        title="Removal curves" if removed else "Addition curves",
        told=f"Line chart at {', '.join(map(str, shares))} %: {told}.",
        caption=f"Loss of proxies retrained {'without' if removed else 'with nothing but'} a share of the scored records, mean over seeds. {order}; the table has the intervals.",
        height=2.6,
    )  # fmt: skip
