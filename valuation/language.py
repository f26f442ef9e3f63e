"""Which language a text is in, coarsely: by its script, and for Latin letters by its commonest words.

    script   = the one of most letters (Latin, Cyrillic, Greek, Arabic, Hebrew, Han, kana, Hangul, Devanagari)
    language = the word list that most words stand in, if at least 8 % of the words stand in it

It serves tables that ask whether a kind of text is worth or paid less than others, and nothing that decides
about one record. When it is wrong: short texts, texts in two languages, names and lists, and languages without a list
here, which are called ``other (Latin)``. Texts with few letters (code, tables, sums) are ``few letters``.

Shapes: N texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SHARE = 0.08
"""Function words make up a third of running text in each of these languages; in another one, a few per cent."""
MIN_LETTERS = 0.5
"""Of the characters that are not white space."""

_SCRIPTS = {
    "Latin": r"\p{Latin}", "Cyrillic": r"\p{Cyrillic}", "Greek": r"\p{Greek}", "Arabic": r"\p{Arabic}", "Hebrew": r"\p{Hebrew}",
    "Han": r"\p{Han}", "kana": r"[\p{Hiragana}\p{Katakana}]", "Hangul": r"\p{Hangul}", "Devanagari": r"\p{Devanagari}",
}  # fmt: skip
_WORDS = {
    "English": "the of and to in that is it for was with as be on by this are not have which or from at but",
    "German": "der die das und den von zu mit sich des auf für ist im dem nicht ein eine als auch es an werden aus",
    "French": "le la les des et du une que est dans qui pour au pas sur par plus ne se ce il sont avec en",
    "Spanish": "el los las del que en y por con para una su se es al lo como más pero sus le ya este",
    "Italian": "il di che la per un una non sono del della con le si i gli nel dei da al più anche alla",
    "Portuguese": "o os as do da dos das que em um uma para com não por se na no mais ao foi como é seu",
    "Dutch": "de het een van en dat niet te zijn op voor met aan er die ook als bij maar om naar hij uit",
}


def languages_of(texts: Sequence[str]) -> list[str]:
    """The language of each text.

    Args:
        texts: N texts.

    Returns:
        N names: a language, a script, ``other (Latin)`` or ``few letters``.
    """
    import polars as pl

    series = pl.Series("text", texts, dtype=pl.String)
    words = series.str.to_lowercase().str.extract_all(r"\p{L}+")
    counts = {name: series.str.count_matches(mark) for name, mark in _SCRIPTS.items()}
    frame = pl.DataFrame(
        {
            "solid": series.str.count_matches(r"\S"),
            "words": words.list.len(),
            **counts,
            **{
                language: words.list.eval(pl.element().is_in(known.split())).list.sum()
                for language, known in _WORDS.items()
            },
        }
    )
    return [_named(row) for row in frame.iter_rows(named=True)]


def _named(row: dict[str, int]) -> str:
    letters = sum(row[script] for script in _SCRIPTS)
    if letters < MIN_LETTERS * row["solid"] or not letters:
        return "few letters"
    script = max(_SCRIPTS, key=lambda name: row[name])
    if row["kana"] and script in ("Han", "kana"):
        return "Japanese"
    if script != "Latin":
        return script
    language = max(_WORDS, key=lambda name: row[name] or 0)
    known = (row[language] or 0) >= MIN_SHARE * max(row["words"], 1)
    return language if known else "other (Latin)"
