"""Quality: damage lowers the score, and code, mathematics, verse and tables are not damage."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap

import numpy as np
import pytest

from valuation import text_quality

PROSE = (
    "Fourscore and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in liberty, and dedicated to the proposition that all men are created equal. Now we "
    "are engaged in a great civil war, testing whether that nation can long endure."
)
MATHS = r"""Let $f \colon \mathbb{R} \to \mathbb{R}$ be $C^2$. Then
\[ f(x+h) = f(x) + h f'(x) + \tfrac{h^2}{2} f''(\xi), \qquad \xi \in (x, x+h). \]
\begin{align} \int_0^1 x^n \, dx &= \frac{1}{n+1}, & \sum_{k=1}^{n} k &= \frac{n(n+1)}{2},\\
e^{i\pi} + 1 &= 0, & \det(A - \lambda I) &= 0. \end{align}"""
SUMS = "\n".join(
    f"{a} + {b} = {a + b}; {a} * {b} = {a * b}"
    for a, b in zip(range(12, 40), range(97, 40, -2), strict=False)
)
VERSE = "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\nCould frame thy fearful symmetry?"
TABLE = "id,name,amount\n" + "\n".join(f"{i},row-{i},{i * 37 % 1000}.50" for i in range(60))


def score(text):
    """The score of one text."""
    return float(text_quality([text]).score_N[0])


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        MATHS,
        SUMS,
        VERSE,
        TABLE,
        json.dumps({"a": [1, 2, {"b": None}], "c": "d"}, indent=4),
        inspect.getsource(ast)[:4000],
        inspect.getsource(textwrap),
        "def f(x):\n" + " " * 60 + "return {k: v for k, v in x.items() if v is not None}\n",
        "Le garçon a mangé une pâtisserie à l'hôtel, où il fêtait Noël avec sa sœur.",
        "東京都は日本の首都であり、人口は約千四百万人である。",
        "😀 ok, see you at 5! 👍🏽",
        "x",
    ],
    ids=[
        "prose",
        "latex",
        "sums",
        "verse",
        "csv",
        "json",
        "code",
        "code2",
        "deep",
        "french",
        "japanese",
        "emoji",
        "one",
    ],
)
def test_honest_text_of_any_kind_scores_one(text):
    """Symbols, digits, short lines and rare letters are not defects."""
    assert score(text) == 1.0


def test_python_code_is_hardly_ever_punished():
    """Of 2,000-character pieces of standard library modules at least 97 % score exactly 1."""
    import argparse
    import collections
    import csv
    import decimal
    import email.message
    import logging
    import typing

    modules = [
        argparse,
        collections,
        csv,
        decimal,
        email.message,
        logging,
        typing,
        ast,
        inspect,
        json,
    ]
    sources = [inspect.getsource(module) for module in modules]
    pieces = [text[i : i + 2000] for text in sources for i in range(0, len(text), 2000)]
    scores = text_quality(pieces).score_N
    assert len(pieces) > 100
    assert (scores == 1).mean() >= 0.97


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("buy cheap pills online now today only, click here for the best offer! " * 40, 0.05),
        ("a" * 2000, 0.0),
        ("=" * 1500 + PROSE, 0.2),
        (PROSE.replace("e", "\ufffd"), 0.1),
        (PROSE.replace(" ", "\x00"), 0.0),
        ("élève à Orléans, où la forêt fut brûlée. ".encode().decode("cp1252", "replace"), 0.0),
        ("", 0.0),
    ],
    ids=["spam", "letter", "ruler", "replaced", "nul", "mojibake", "empty"],
)
def test_damage_lowers_the_score(text, most):
    """Repetition, long runs, broken encodings and control codes are found."""
    assert score(text) <= most


@pytest.mark.parametrize("kind", [PROSE, MATHS, SUMS])
def test_more_damage_never_raises_the_score(kind):
    """Replacing more and more characters by U+FFFD only ever lowers the score."""
    generator = np.random.default_rng(0)
    order = generator.permutation(len(kind))
    texts = []
    for share in (0, 0.01, 0.03, 0.06, 0.12, 0.5):
        broken = set(order[: int(share * len(kind))].tolist())
        texts.append("".join("\ufffd" if i in broken else c for i, c in enumerate(kind)))
    scores = text_quality(texts).score_N
    assert (np.diff(scores) <= 0).all()
    assert scores[0] == 1
    assert scores[-1] == 0


def test_components_are_shares_by_hand():
    """Golden values: 12 of 24 characters in a run, 1 of 24 damaged, 3 distinct tokens of 6."""
    quality = text_quality(
        ["x" * 12 + " " + "abcdefghij" + "\x01", "a b c a b c", "a b c d e f g h " * 2]
    )
    assert quality.runs_N[0] == pytest.approx(12 / 24)
    assert quality.damaged_N[0] == pytest.approx(1 / 24)
    assert quality.distinct_N[1] == pytest.approx(0.5)
    assert quality.repeated_N[2] == pytest.approx(1 - 8 / 9)  # nine runs of eight, eight different
    assert ((quality.packed_N > 0) & (quality.packed_N <= 1)).all()


def test_each_text_is_judged_alone():
    """The neighbours in the batch don't change a score."""
    texts = [PROSE, "", "a" * 50, SUMS, PROSE]
    together = text_quality(texts)
    for index, text in enumerate(texts):
        alone = text_quality([text])
        for name in ("damaged_N", "repeated_N", "runs_N", "distinct_N", "packed_N", "score_N"):
            assert getattr(together, name)[index] == getattr(alone, name)[0]
    assert len(text_quality([]).score_N) == 0
