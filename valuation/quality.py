"""Quality: a few reported defects of a text, and a score that only defects can lower.

Popular quality filters punish what code and mathematics are made of: symbols, digits, short lines,
rare words, missing stop words. This one looks only for damage that no kind of text has on purpose:

========================  ===================================================================
component                 share of ...
========================  ===================================================================
``damaged``               characters that are control codes, private use, U+FFFD or mojibake
``repeated``              runs of eight tokens that stood in the same text before
``runs``                  characters, white space apart, inside a run of ten or more equal ones
``distinct`` (reported)   tokens that are different; falls with length, so it isn't scored
``deflate`` (reported)    bytes left by deflate; low for code as well, so it isn't scored
========================  ===================================================================

    score = Π_c (1 - ramp(c)),   ramp(x) = clip((x - start) / (full - start), 0, 1)

over the three scored components. Each ramp starts above what clean code, tables and verse show.

What it does not show: whether a text is true, useful or well written; fluent nonsense scores 1.
Random letters score 1 as well: they show in the surprisal (`valuation.entropy`), not here. The
score is evidence beside the values and never a factor of a price.

Shapes: N records.

Source: the repetition measure follows Rae et al., "Scaling language models" (Gopher), 2112.11446,
table A1, with one n and inside one document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.entropy import deflate_bytes
from valuation.shingles import shingle_hashes, token_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

REPEAT_TOKENS = 8
RUN_CHARACTERS = 10

# (start, full) of each ramp. Measured on 1,400 files of the Python standard library, cut into
# pieces of 2,000 characters: the 99th percentile of `repeated` is below 0.4, of `runs` below 0.3.
RAMPS: dict[str, tuple[float, float]] = {
    "damaged": (0.005, 0.1),
    "repeated": (0.6, 0.95),
    "runs": (0.3, 0.8),
}

_WHITE_SPACE = np.array([ord(mark) for mark in " \t\n\r\f\u00a0\u3000"], dtype=np.uint32)
_DAMAGE = r"[\p{Cc}\p{Co}\x{FFFD}--\t\n\r\x{0C}]"
# UTF-8 that was decoded as Windows-1252: a lead byte shown as a letter, then a continuation byte.
_MOJIBAKE = r"[ÂÃ][\x{80}-\x{BF}]|â€[\x{80}-\x{2122}]"


@dataclass(frozen=True, slots=True)
class Quality:
    """Components and score of each record, all in [0, 1]."""

    damaged_N: Floats
    """Share of characters that are damaged."""
    repeated_N: Floats
    """Share of eight-token runs that repeat an earlier run of the text."""
    runs_N: Floats
    """Share of characters inside runs of ten or more equal characters."""
    distinct_N: Floats
    """Distinct over all tokens; reported, not scored."""
    deflate_N: Floats
    """Deflated over raw bytes, at most 1; reported, not scored."""
    score_N: Floats
    """1 for a text without defects, 0 for one that is nothing else or is empty."""


def text_quality(texts: Sequence[str]) -> Quality:
    """Look for defects in texts.

    Args:
        texts: N texts.

    Returns:
        Components and scores, one entry per text.
    """
    import polars as pl

    series = pl.Series("text", texts, dtype=pl.String)
    characters_N = series.str.len_chars().to_numpy().astype(np.float64)
    bytes_N = series.str.len_bytes().to_numpy().astype(np.float64)
    broken_N = (
        series.str.count_matches(_DAMAGE) + 2 * series.str.count_matches(_MOJIBAKE)
    ).to_numpy()
    damaged_N = np.minimum(broken_N / np.maximum(characters_N, 1), 1.0)
    runs_N = _run_characters(texts) / np.maximum(characters_N, 1)
    tokens_W, lengths = token_hashes(texts)
    repeated_N = 1.0 - _distinct_share(*shingle_hashes(tokens_W, lengths, REPEAT_TOKENS))
    deflate_N = np.minimum(deflate_bytes(texts) / np.maximum(bytes_N, 1), 1.0)
    components = {"damaged": damaged_N, "repeated": repeated_N, "runs": runs_N}
    score_N = np.where(characters_N > 0, 1.0, 0.0)
    for name, (start, full) in RAMPS.items():
        score_N = score_N * (1.0 - np.clip((components[name] - start) / (full - start), 0.0, 1.0))
    return Quality(
        damaged_N=damaged_N,
        repeated_N=repeated_N,
        runs_N=runs_N,
        distinct_N=_distinct_share(*shingle_hashes(tokens_W, lengths, 1)),
        deflate_N=deflate_N,
        score_N=score_N,
    )


def _distinct_share(hash_H: NDArray[np.uint64], offsets: NDArray[np.int64]) -> Floats:
    """Distinct over all shingles of each text; 1 where there are none."""
    lengths = np.diff(offsets)
    text_H = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    # Text above, 40 bits of the hash below: one plain sort of integers finds what is distinct in
    # each text. Two different shingles of a text of 2,000 tokens collide with chance 2e-6.
    key_H = np.sort(text_H << np.uint64(40) | hash_H >> np.uint64(24))
    new_H = np.ones(len(key_H), dtype=np.bool_)
    new_H[1:] = key_H[1:] != key_H[:-1]
    distinct = key_H[new_H] >> np.uint64(40)
    counts = np.bincount(distinct.astype(np.int64), minlength=len(lengths))
    return np.where(lengths > 0, counts / np.maximum(lengths, 1), 1.0)


def _run_characters(texts: Sequence[str]) -> Floats:
    """Characters of each text in a run of RUN_CHARACTERS or more equal ones, white space apart."""
    return np.array([_in_runs(text) for text in texts], dtype=np.float64)


def _in_runs(text: str) -> int:
    if not text:
        return 0
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    borders = np.flatnonzero(np.diff(codes)) + 1
    lengths = np.diff(np.concatenate([[0], borders, [len(codes)]]))
    first = codes[np.concatenate([[0], borders])]
    # Indentation is made of runs of spaces, and code is not to pay for it.
    counted = (lengths >= RUN_CHARACTERS) & ~np.isin(first, _WHITE_SPACE)
    return int(lengths[counted].sum())
