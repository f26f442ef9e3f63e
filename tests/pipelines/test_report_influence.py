"""The influence section: what it says of records, and what its pictures hold."""

import dataclasses

from pipelines.display import heat_png
from pipelines.reports import HeatCell, Influence, Judged, render
from pipelines.reports.influence import limited
from pipelines.steps.judgement import CONTROL, FEW_SUBSETS, FORMAT
from tests.pipelines.report_sample import Page, sample
from valuation.judgement import CONTROL as JUDGES_CONTROL
from valuation.judgement import FORMAT as JUDGES_FORMAT
from valuation.judgement import MIN_SUBSETS


def test_influence_says_what_is_not_distinguishable_and_shows_no_text() -> None:
    """Both ends of the list stand with intervals; what the correction doesn't leave standing is called so; the maps have numbers."""
    text = Page(render(sample())).text
    assert "38 of 613 scored records are distinguishable from 0, over 47 held-out records" in text
    assert text.count("not distinguishable from 0") == 1
    assert "adams on lincoln -2.20e-05" in text
    assert "step 3: drop -4.00e-03, credit 9.00e-03, residual -1.30e-02" in text


def test_the_judgement_shows_scores_gaps_and_what_too_few_retrainings_cannot_tell() -> None:
    """Score less BM25's, top removal and both curves with their intervals; under ten subsets no score and no picture of it."""
    data = sample()
    page = Page(render(data))
    assert "Score less BM25's: +0.22 [+0.12, +0.31]" in page.text
    assert "of the 512 scored records, of which 17 have a value distinct from 0" in page.text
    assert "loses +0.0123 [+0.0011, +0.0235] nats more" in page.text
    assert (
        "taken away 50 % +0.0500 [\u22120.0010, +0.0610] \u22120.0500 [\u22120.0700, +0.0020]"
        in page.text
    )
    assert "most valued first 5.1100, 5.1500" in page.text
    assert "10 of the halves were retrained once more" in page.text
    assert "expected at 0.71 [0.55, 0.82] or lower, and on the target as a whole at 0.68 [0.21, 0.90] or lower" in page.text  # fmt: skip
    assert "random +0.01; at most 0.71" in page.text
    assert "inrun.trapezoid +0.17" in page.text
    assert "it judges the method. The credits published above are of another training" in page.text
    part = data.influence
    assert isinstance(part, Influence)
    assert isinstance(part.judged, Judged)
    once = dataclasses.replace(part.judged, ceiling=None, ceiling_whole=None, again=0)
    text = Page(
        render(dataclasses.replace(data, influence=dataclasses.replace(part, judged=once)))
    ).text
    assert "How high a score could be was not measured" in text
    assert "at most 0.71" not in text
    few = dataclasses.replace(part.judged, scores=(), whole=(), curve=(), top=None, subsets=3)
    text = Page(
        render(dataclasses.replace(data, influence=dataclasses.replace(part, judged=few)))
    ).text
    assert "So few retrainings rank nothing" in text
    assert "Score less BM25" not in text
    assert "taken away" not in text
    assert (FEW_SUBSETS, CONTROL, FORMAT) == (MIN_SUBSETS, JUDGES_CONTROL, JUDGES_FORMAT)


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
