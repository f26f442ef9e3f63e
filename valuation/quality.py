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
``packed`` (reported)     bytes left by zstd; low for code as well, so it isn't scored
========================  ===================================================================

    score = Π_c (1 - ramp(c)),   ramp(x) = clip((x - start) / (full - start), 0, 1)

over the three scored components. Each ramp starts above what clean code, tables and verse show.

What it does not show: whether a text is true, useful or well written; fluent nonsense scores 1.
Random letters score 1 as well: they show in the surprisal (`valuation.entropy`), not here. The
score is evidence beside the values and never a factor of a price.

Texts go through in pieces of half a million characters, so memory is the texts' and about 60 bytes per character of a piece,
or of the longest text where one is longer. Plain ASCII is read as bytes, other texts as code points (`valuation.characters`); only
texts with characters that move under normalisation, such as combining marks and full-width forms, are rewritten first. Cost: see README, *Measured*.

Shapes: N records, C characters, W tokens.

Source: the repetition measure follows Rae et al., "Scaling language models" (Gopher), 2112.11446,
table A1, with one n and inside one document.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from valuation.characters import ascii_codes, find_tokens, powers, unicode_codes
from valuation.entropy import packed_bytes
from valuation.errors import TokensError
from valuation.shingles import ODD, mixed, normalised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    from numpy.typing import NDArray

    from valuation.characters import Codes, Tokens

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

PIECE_CHARACTERS = 1 << 19
"""Arrays of a piece stay in the processor's cache; results don't depend on it."""

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
    packed_N: Floats
    """Bytes after zstd over raw bytes, at most 1; reported, not scored."""
    score_N: Floats
    """1 for a text without defects, 0 for one that is nothing else or is empty."""


def text_quality(texts: Sequence[str] | pl.Series, *, threads: int = 1) -> Quality:
    """Look for defects in texts.

    Args:
        texts: N texts, as a sequence or a polars series of strings.
        threads: pieces that are looked at at the same time; results don't depend on it.

    Returns:
        Components and scores, one entry per text.

    Raises:
        TokensError: fewer threads than one.
    """
    import polars as pl

    if threads < 1:
        raise TokensError(f"threads: expected at least 1, got {threads}")
    series = texts if isinstance(texts, pl.Series) else pl.Series("text", texts, dtype=pl.String)
    ends_N = np.cumsum(series.str.len_bytes().to_numpy().astype(np.int64) + 1)
    marks = np.arange(PIECE_CHARACTERS, ends_N[-1] if len(ends_N) else 0, PIECE_CHARACTERS)
    cuts = np.unique([0, *np.searchsorted(ends_N, marks), len(series)])
    pieces = [series[a:b] for a, b in pairwise(cuts.tolist())]
    if threads == 1:
        found = [_piece_quality(piece) for piece in pieces]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(_piece_quality, pieces))
    empty = [np.empty(0)]
    return Quality(**{
        field.name: np.concatenate([getattr(part, field.name) for part in found] or empty) for field in fields(Quality)
    })  # fmt: skip


def _piece_quality(series: pl.Series) -> Quality:
    """Components and score of a few texts."""
    texts = series.to_list()
    characters_N = series.str.len_chars().to_numpy().astype(np.float64)
    bytes_N = series.str.len_bytes().to_numpy().astype(np.float64)
    broken_N, runs_N, repeated_N, distinct_N = np.zeros((4, len(texts)))
    plain_N = characters_N == bytes_N
    for at_S, read in ((np.flatnonzero(plain_N), _plain), (np.flatnonzero(~plain_N), _other)):
        if len(at_S):
            broken_N[at_S], runs_N[at_S], tokens = read([texts[at] for at in at_S])
            distinct_N[at_S], repeated_N[at_S] = _shares(tokens)
    damaged_N = np.minimum(broken_N / np.maximum(characters_N, 1), 1.0)
    runs_N = runs_N / np.maximum(characters_N, 1)
    packed_N = np.minimum(packed_bytes(texts) / np.maximum(bytes_N, 1), 1.0)
    components = {"damaged": damaged_N, "repeated": repeated_N, "runs": runs_N}
    score_N = np.where(characters_N > 0, 1.0, 0.0)
    for name, (start, full) in RAMPS.items():
        score_N = score_N * (1.0 - np.clip((components[name] - start) / (full - start), 0.0, 1.0))
    return Quality(damaged_N, repeated_N, runs_N, distinct_N, packed_N, score_N)


def _plain(texts: list[str]) -> tuple[Floats, Floats, Tokens]:
    """Damaged characters, characters in runs and tokens of ASCII texts."""
    codes_C, borders_N1, known = ascii_codes(texts)
    # Of the control codes, tab (9), line feed (10), form feed (12) and carriage return (13) are no damage.
    broken_C = (codes_C < 32) & (codes_C - np.uint8(9) > 4) | (codes_C == 11) | (codes_C == 127)
    broken_N = (
        np.add.reduceat(broken_C, borders_N1[:-1], dtype=np.float64)
        if broken_C.any()
        else np.zeros(len(texts))
    )
    return broken_N, _run_characters(codes_C, borders_N1), find_tokens(codes_C, borders_N1, known)


def _other(texts: list[str]) -> tuple[Floats, Floats, Tokens]:
    """The same of texts with other characters."""
    import polars as pl

    series = pl.Series(texts, dtype=pl.String)
    broken_N = (
        series.str.count_matches(_DAMAGE) + 2 * series.str.count_matches(_MOJIBAKE)
    ).to_numpy()
    codes_C, borders_N1, known = unicode_codes(texts)
    runs_N = _run_characters(codes_C, borders_N1)
    moving_N = np.add.reduceat(known.moving_K[codes_C], borders_N1[:-1], dtype=np.int64) > 0
    if moving_N.any():
        moving = iter(normalised(series.filter(pl.Series(moving_N))).to_list())
        texts = [
            next(moving) if moves else text for text, moves in zip(texts, moving_N, strict=True)
        ]
        codes_C, borders_N1, known = unicode_codes(texts)
    return broken_N.astype(np.float64), runs_N, find_tokens(codes_C, borders_N1, known)


def _run_characters(codes_C: Codes, borders_N1: NDArray[np.int64]) -> Floats:
    """Characters of each text in a run of RUN_CHARACTERS or more equal ones, white space apart.

    A line end stands behind each text, so no run of another character goes over a border.
    """
    num = len(borders_N1) - 1
    same = codes_C[1:] == codes_C[:-1]
    # After doubling k to 1, 2, 4 … entry i says that characters i .. i + k are equal.
    long, reach = same, 1
    while reach < RUN_CHARACTERS - 1 and len(long):
        step = min(reach, RUN_CHARACTERS - 1 - reach)
        long = long[:-step] & long[step:]
        reach += step
    begin_R = np.flatnonzero(long)
    # Indentation is made of runs of spaces, and code is not to pay for it.
    begin_R = begin_R[~np.isin(codes_C[begin_R], _WHITE_SPACE)]
    if not len(begin_R):
        return np.zeros(num)
    inside_C = np.zeros(len(codes_C) + 1, np.int32)
    np.add.at(inside_C, begin_R, 1)
    np.add.at(inside_C, begin_R + RUN_CHARACTERS, -1)
    return np.add.reduceat(np.cumsum(inside_C)[:-1] > 0, borders_N1[:-1], dtype=np.float64)


def _shares(tokens: Tokens) -> tuple[Floats, Floats]:
    """Distinct over all tokens of each text, and the share of runs of REPEAT_TOKENS that stood before."""
    hash_W, length_N = tokens.hash_W, tokens.length_N
    num = len(length_N)
    text_W = np.repeat(np.arange(num), length_N)
    extra_N, shared_W = _repeats(hash_W, text_W, num)
    distinct_N = np.where(length_N > 0, 1.0 - extra_N / np.maximum(length_N, 1), 1.0)
    # A run stands in the text twice only if all its tokens do, so only such runs are looked up.
    begin_W, reach = shared_W, 1
    while reach < REPEAT_TOKENS and len(begin_W):
        step = min(reach, REPEAT_TOKENS - reach)
        begin_W = begin_W[:-step] & begin_W[step:]
        reach += step
    begin_H = np.flatnonzero(begin_W)
    text_H = text_W[begin_H]
    inside_H = begin_H + REPEAT_TOKENS <= np.cumsum(length_N)[text_H]
    begin_H, text_H = begin_H[inside_H], text_H[inside_H]
    prefix_W1 = np.zeros(len(hash_W) + 1, np.uint64)
    np.cumsum(hash_W * powers(len(hash_W)), out=prefix_W1[1:])
    run_H = prefix_W1[begin_H + REPEAT_TOKENS] - prefix_W1[begin_H]
    run_H *= powers(len(hash_W), inverse=True)[begin_H]
    extra_N, _ = _repeats(run_H, text_H, num)
    # A text of fewer tokens is one run, and nothing repeats.
    return distinct_N, extra_N / np.maximum(length_N - (REPEAT_TOKENS - 1), 1)


def _repeats(
    hash_H: NDArray[np.uint64], text_H: NDArray[np.int64], num: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """How many hashes of each text are one too many, and whether each stands in its text more than once."""
    # One table for all texts of a piece: a hash of another text is another key.
    key_H = hash_H ^ mixed(np.arange(1, num + 1, dtype=np.uint64))[text_H]
    shared_H = np.zeros(len(key_H), np.bool_)
    extra_N, number_H = np.zeros(num), np.arange(len(key_H))
    while len(key_H):
        # Every key writes its place into its slot and one of them stays. Its equals are found, and the others, about one in ten,
        # take another slot in the next round. Three times as fast as sorting.
        bits = (2 * len(key_H)).bit_length()
        slot_H = ((key_H * ODD) >> np.uint64(64 - bits)).astype(np.int64)
        place_H = np.arange(len(key_H), dtype=np.int32)
        table = np.empty(1 << bits, np.int32)
        table[slot_H] = place_H
        stays_H = table[slot_H]
        equal_H = key_H[stays_H] == key_H
        twin_D = np.flatnonzero(equal_H & (stays_H != place_H))
        number_D = number_H[twin_D]
        extra_N += np.bincount(text_H[number_D], minlength=num)
        shared_H[number_D] = True
        shared_H[number_H[stays_H[twin_D]]] = True
        left_H = ~equal_H
        key_H, number_H = mixed(key_H[left_H]), number_H[left_H]
    return extra_N, shared_H
