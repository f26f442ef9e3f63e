"""Quality doesn't punish minority styles: code, mathematics, verse, prompts and other scripts score like plain prose."""

from __future__ import annotations

import numpy as np
import pytest
from valuation_styles import DATA, measured, styles

from valuation import text_quality
from valuation.characters import kinds_below

MARGIN = 0.01
"""Of the mean score, against plain prose; fixed before the table was made. The worst tenth may lose 0.1."""


@pytest.mark.skipif(not DATA.exists(), reason=f"the sets in {DATA} are not there")
def test_no_style_scores_below_plain_prose():
    """The mean of each style is at most 0.01 below that of prose, and its worst tenth at least 0.9."""
    table = {name: measured(texts) for name, texts in styles().items()}
    prose = table["prose (addresses)"][1]
    assert len(table) == 19
    assert all(row[0] >= 50 for row in table.values())
    lower = {name: row[1] - prose for name, row in table.items() if row[1] < prose - MARGIN}
    assert not lower, "means below prose's"
    assert not {name: row[4] for name, row in table.items() if row[4] < 0.9}, "worst tenths"


def test_a_filter_that_punishes_symbols_would_be_seen(monkeypatch):
    """Negative control: were marks counted as damage, code would fall below prose by more than the margin."""
    code = ["def f(x):\n    return {k: v for k, v in x.items()}\n" * 2]
    prose = ["It is true that all of them came home, and nobody asked why."]
    monkeypatch.setattr("valuation.characters.DAMAGE", r"[^\w\s.,]")
    monkeypatch.setattr("valuation.characters.kinds_below", kinds_below.__wrapped__)
    code, prose = (["é " + text for text in texts] for texts in (code, prose))
    assert measured(code)[1] < measured(prose)[1] - MARGIN


def test_what_is_punished_is_known():
    """Stated, not hidden: a song that is mostly refrain loses, one with verses between does not."""
    refrain = "She'll be coming round the mountain when she comes, when she comes, singing oh my darling. "
    verse = "Verse {} tells of another {} on the long road home where {} waited by the door. "
    words = ["horse", "river", "winter", "lantern", "brother", "wagon", "morning", "harvest"]
    song = "".join(refrain + verse.format(i, words[i], words[-1 - i]) for i in range(len(words)))
    scores = text_quality([song, refrain * 12]).score_N
    assert scores[0] == 1
    assert scores[1] < 0.5
    assert np.isfinite(scores).all()
