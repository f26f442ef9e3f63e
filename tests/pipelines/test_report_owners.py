"""The owners' section: what it shows, what it refuses, and that its numbers are those of the bank."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.reports import (
    Coverage,
    EntropySpread,
    Estimate,
    Narrowing,
    NotAvailable,
    ReportError,
    Valuation,
    Worth,
    render,
)
from pipelines.reports.drawings import drawings, png
from tests.pipelines.report_sample import Page, sample


def _worth() -> Worth:
    part = sample().worth
    assert isinstance(part, Worth)
    return part


def test_every_chart_of_the_section_stands_on_the_page_with_its_numbers_in_words() -> None:
    """Six pictures, each with a description that holds what it draws; and the worst owner beside the mean."""
    html = render(sample())
    for name in ("owner-values", "value-price", "entropy", "coverage", "narrowing", "strips"):
        assert f'aria-labelledby="chart-{name}-title chart-{name}-desc"' in html, name
    text = Page(html).text
    for told in (
        "washington +0.77130; adams -0.02110",
        "adams -0.02110 nats, 0.00 EUR",
        "adams median 7.34, 5 % 5.12, 95 % 9.57",
        "2 lots: 5 of 6",
        "16 coalitions: mean 8.30e-02, widest 9.40e-02",
        "of adams: mean 11.90 bits per token",
    ):
        assert told in text, told
    row = text[text.index("Era: value and price") :]
    assert "1750-1799 122 of 2 +0.75020 [+0.70010, +0.80030]" in row
    assert "\u221226,400.0 adams" in row or "-26,400.0 adams" in row, row[:400]
    assert "13.691" in row


def test_what_is_missing_is_said_and_not_drawn() -> None:
    """No display consent and nothing to converge: two sentences instead of two pictures; without prices no price chart."""
    part = replace(
        _worth(),
        currency="",
        owners=tuple(replace(owner, price_microunits=None) for owner in _worth().owners),
        strips=NotAvailable(reason="no consent to display"),
        narrowing=NotAvailable(reason="one lot"),
    )
    assert set(drawings(part)) == {"owner-values", "entropy", "coverage"}
    text = Page(render(replace(sample(), worth=part))).text
    assert "Surprisal along records: not available: no consent to display" in text
    assert "Convergence: not available: one lot" in text


def test_a_value_whose_interval_holds_zero_says_so_beside_it() -> None:
    """An owner's and a lot's: silent as long as the interval is on one side, a sentence when it reaches zero."""
    told = "not distinguishable from 0 at 95 %"
    part, lots = _worth(), sample().valuation
    assert isinstance(lots, Valuation)
    wide = Estimate(value=0.01, se=0.01, low=0.0, high=0.02, n=513)
    owner, lot = replace(part.owners[0], value=wide), replace(lots.groups[0], value=wide)
    clear = replace(wide, low=0.001)
    counts = []
    for value in (clear, wide):
        owners = (replace(owner, value=value), *part.owners[1:])
        groups = (replace(lot, value=value), *lots.groups[1:])
        page = replace(sample(), worth=replace(part, owners=owners), valuation=replace(lots, groups=groups))  # fmt: skip
        counts.append(Page(render(page)).text.count(told))
    assert counts[1] == counts[0] + 2


def test_every_drawing_is_a_picture_for_the_asset_page_too() -> None:
    """The same drawing gives the same PNG twice, and stays small enough for an event log."""
    for name, drawing in drawings(_worth()).items():
        found = png(drawing)
        assert found == png(drawing), name
        assert len(found) < 30_000, name


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: EntropySpread(owner="a", records=1, low=2, quarter=1, median=3, three_quarters=4, high=5),
        lambda: Coverage(size=1, trained=3, possible=2),
        lambda: Narrowing(calls=(1, 2), mean_width=(0.1,), worst_width=(0.1, 0.2)),
    ],
)  # fmt: skip
def test_parts_that_contradict_themselves_are_refused(wrong) -> None:
    """Quantiles out of order, more trained than possible, a curve of another length."""
    with pytest.raises(ReportError):
        wrong()


def test_a_finished_run_shows_its_own_bank_and_only_what_may_be_displayed(tiny_home: Path) -> None:
    """At tiny: all coalitions of every size, owners' prices are the pool, classes of a kind add up, no strip of the registry."""
    text = (tiny_home / "reports" / "latest.json").read_text()
    from pipelines.reports import ReportData

    part = ReportData.from_json(text).worth
    assert isinstance(part, Worth)
    assert [(row.trained, row.possible) for row in part.coverage] == [(1, 1), (3, 3), (3, 3), (1, 1)]  # fmt: skip
    assert sum(owner.price_microunits or 0 for owner in part.owners) == 1_000_000_000
    total = sum(owner.value.value for owner in part.owners)
    for kind in ("language", "era", "length", "owner"):
        rows = [row for row in part.fairness if row.by == kind]
        assert rows, kind
        assert sum(row.value.value for row in rows) == pytest.approx(total, abs=1e-12), kind
        assert sum(row.price_rate * row.tokens / 1000 for row in rows) == pytest.approx(1e9)
        assert all(row.worst_value_rate <= row.value_rate + 1e-15 for row in rows), kind
    assert not isinstance(part.strips, NotAvailable)
    assert {strip.owner for strip in part.strips} == {"jefferson", "roosevelt-32", "washington", "wilson"}  # fmt: skip
    assert not isinstance(part.narrowing, NotAvailable)
    assert part.narrowing.calls[-1] == 8
    # Not the narrowest of all: with two seeds their spread is itself an estimate, and may come out larger with more trainings.
    widths = [owner.value.high - owner.value.low for owner in part.owners]
    assert part.narrowing.mean_width[-1] == pytest.approx(sum(widths) / len(widths), rel=1e-12)
    assert part.narrowing.worst_width[-1] == pytest.approx(max(widths), rel=1e-12)
