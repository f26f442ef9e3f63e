"""The influence section: what it says of records, and what its pictures hold."""

from pipelines.display import heat_png
from pipelines.reports import HeatCell, Influence, render
from pipelines.reports.influence import limited
from tests.pipelines.report_sample import Page, sample


def test_influence_says_what_is_not_distinguishable_and_shows_no_text() -> None:
    """Both ends of the list stand with intervals; what the correction doesn't leave standing is called so; the maps have numbers."""
    text = Page(render(sample())).text
    assert "38 of 613 scored records are distinguishable from 0, over 47 held-out records" in text
    assert text.count("not distinguishable from 0") == 1
    assert "adams on lincoln -2.20e-05" in text
    assert "step 3: drop -4.00e-03, credit 9.00e-03, residual -1.30e-02" in text


def test_a_heat_map_keeps_the_owners_of_the_largest_numbers() -> None:
    """Rows and columns beyond the limit are those of the smallest sums; a pair that is missing counts 0."""
    cells = tuple(
        HeatCell(owner=owner, target_owner=target, value=value)
        for owner, target, value in (
            ("b", "x", -3.0),
            ("a", "y", 2.0),
            ("c", "x", 0.1),
            ("a", "z", 0.2),
        )
    )
    assert limited(cells, 2) == (["a", "b"], ["x", "y"], [[0.0, 2.0], [-3.0, 0.0]])
    part = sample().influence
    assert isinstance(part, Influence)
    assert heat_png(part).startswith(b"\x89PNG")
