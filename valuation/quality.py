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

Texts go through in pieces, several threads at a time, as the bytes that they are in memory; batches of a corpus that is larger than
memory are asked for as they are needed (`stream_quality`), so memory is a few batches and about 60 bytes per character of each
thread's piece, or of the longest text where one is longer. Plain ASCII is read as bytes, other texts as code points
(`valuation.characters`); only texts with characters that move under normalisation, such as combining marks and full-width forms, are
rewritten first. Cost: see README, *Measured*.

Shapes: N records, C characters, W tokens.

Source: the repetition measure follows Rae et al., "Scaling language models" (Gopher), 2112.11446,
table A1, with one n and inside one document.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from valuation.characters import (
    DAMAGED,
    MOVING,
    ascii_characters,
    find_tokens,
    text_bytes,
    text_codes,
    unicode_characters,
)
from valuation.entropy import packed_sizes
from valuation.errors import TokensError
from valuation.pieces import in_order
from valuation.shingles import ODD, mixed, normalised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from valuation.characters import Codes, Tokens

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

REPEAT_TOKENS = 8  # a power of two
RUN_CHARACTERS = 10

# (start, full) of each ramp. Measured on 1,400 files of the Python standard library, cut into
# pieces of 2,000 characters: the 99th percentile of `repeated` is below 0.4, of `runs` below 0.3.
RAMPS: dict[str, tuple[float, float]] = {
    "damaged": (0.005, 0.1),
    "repeated": (0.6, 0.95),
    "runs": (0.3, 0.8),
}

PIECE_BYTES = 1 << 19
"""Large enough that an array operation lasts longer than handing the interpreter's lock to another thread; results don't depend on it."""

_WHITE_SPACE = [ord(mark) for mark in " \t\n\r\f\u00a0\u3000"]
_FOUR = 0x01010101  # four times True
_DAMAGE = r"[\p{Cc}\p{Co}\x{FFFD}--\t\n\r\x{0C}]"
_RUN_FACTOR = 0xBF58476D1CE4E5B9
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

    series = texts if isinstance(texts, pl.Series) else pl.Series("text", texts, dtype=pl.String)
    return stream_quality([series], threads=threads)


def stream_quality(batches: Iterable[pl.Series], *, threads: int = 1) -> Quality:
    """Look for defects in texts that come in batches.

    Args:
        batches: series of strings; the next is asked for when a thread will soon have nothing to do.
        threads: pieces that are looked at at the same time; results depend neither on it nor on the batches.

    Returns:
        Components and scores, one entry per text.

    Raises:
        TokensError: fewer threads than one, or a text that is null.
    """
    found = list(in_order(_numbered_quality, _pieces(batches), threads))
    num = sum(len(at_N) for at_N, _ in found)
    whole = Quality(*np.empty((len(fields(Quality)), num)))
    for at_N, part in found:
        for field in fields(Quality):
            getattr(whole, field.name)[at_N] = getattr(part, field.name)
    return whole


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some texts, all of them ASCII or none."""

    texts: pl.Series
    plain: bool
    at_N: Integers
    """Their numbers among all texts."""


def _pieces(batches: Iterable[pl.Series]) -> Iterator[_Piece]:
    """Texts of each batch in pieces of about PIECE_BYTES."""
    begin = 0
    for texts in batches:
        if texts.null_count():
            raise TokensError(f"texts: expected strings, got {texts.null_count()} nulls")
        size_N = texts.str.len_bytes().to_numpy().astype(np.int64)
        plain_N = texts.str.len_chars().to_numpy() == size_N
        for plain in (True, False):
            at_S = np.flatnonzero(plain_N == plain)
            # A byte more than each has: empty ones must not all fall into one piece.
            end_S = np.cumsum(size_N[at_S] + 1)
            marks = np.arange(PIECE_BYTES, end_S[-1] if len(at_S) else 0, PIECE_BYTES)
            for a, b in pairwise(
                np.unique([0, *np.searchsorted(end_S, marks), len(at_S)]).tolist()
            ):
                yield _Piece(texts[at_S[a:b]], plain, begin + at_S[a:b])
        begin += len(texts)


def _numbered_quality(piece: _Piece) -> tuple[Integers, Quality]:
    return piece.at_N, _piece_quality(piece)


def _piece_quality(piece: _Piece) -> Quality:
    """Components and score of a few texts."""
    byte_C, border_N1 = text_bytes(piece.texts)
    size_N = np.diff(border_N1)
    if piece.plain:
        characters_N = size_N
        broken_N, inside_N, distinct_N, repeated_N = _plain(byte_C, border_N1)
    else:
        characters_N, broken_N, inside_N, distinct_N, repeated_N = _other(piece.texts)
    damaged_N = np.minimum(broken_N / np.maximum(characters_N, 1), 1.0)
    runs_N = inside_N / np.maximum(characters_N, 1)
    packed_N = np.minimum(packed_sizes(byte_C, border_N1) / np.maximum(size_N, 1), 1.0)
    components = {"damaged": damaged_N, "repeated": repeated_N, "runs": runs_N}
    score_N = np.where(characters_N > 0, 1.0, 0.0)
    for name, (start, full) in RAMPS.items():
        score_N = score_N * (1.0 - np.clip((components[name] - start) / (full - start), 0.0, 1.0))
    return Quality(damaged_N, repeated_N, runs_N, distinct_N, packed_N, score_N)


def _plain(
    byte_C: NDArray[np.uint8], border_N1: Integers
) -> tuple[Integers, Integers, Floats, Floats]:
    """Damaged characters, those in runs, and the shares of distinct and repeated tokens of ASCII texts."""
    # Of the control codes, tab (9), line feed (10), form feed (12) and carriage return (13) are no damage.
    broken_C = (byte_C < 32) & (byte_C - np.uint8(9) > 4) | (byte_C == 11) | (byte_C == 127)
    tokens = find_tokens(ascii_characters(byte_C, border_N1))
    return _each(broken_C, border_N1), _run_characters(byte_C, border_N1), *_shares(tokens)


def _other(texts: pl.Series) -> tuple[Integers, Integers, Integers, Floats, Floats]:
    """Characters and the same of texts with others than ASCII."""
    code_C, border_N1 = text_codes(texts)
    characters, flag_C = unicode_characters(code_C, border_N1)
    broken_N = _each((flag_C & np.uint8(DAMAGED)) > 0, border_N1)
    # The first two characters of every match are looked for in all texts, the matches in what is left.
    lead_C = ((code_C == 0xC2) | (code_C == 0xC3))[:-1] & (code_C[1:] - np.uint32(0x80) < 0x40)
    lead_C |= (code_C[:-1] == 0xE2) & (code_C[1:] == 0x20AC)
    if lead_C.any():
        at_S = np.flatnonzero(_each(lead_C, border_N1))
        broken_N[at_S] += 2 * texts[at_S].str.count_matches(_MOJIBAKE).to_numpy().astype(np.int64)
    distinct_N, repeated_N = _shares(find_tokens(characters))
    at_S = np.flatnonzero(_each((flag_C & np.uint8(MOVING)) > 0, border_N1))
    if len(at_S):
        again, _ = unicode_characters(*text_codes(normalised(texts[at_S])))
        distinct_N[at_S], repeated_N[at_S] = _shares(find_tokens(again))
    runs_N = _run_characters(code_C, border_N1)
    return np.diff(border_N1), broken_N, runs_N, distinct_N, repeated_N


def _each(found_C: NDArray[np.bool_], border_N1: Integers) -> Integers:
    """How many of each text's characters were found."""
    return np.diff(np.searchsorted(np.flatnonzero(found_C), border_N1))


def _run_characters(code_C: Codes, border_N1: Integers) -> Integers:
    """Characters of each text in a run of RUN_CHARACTERS or more equal ones, white space apart."""
    # Entry 4 + i says that characters i and i + 1 are equal; the first four and the last four entries say nothing.
    same_C = np.zeros(4 * (len(code_C) // 4 + 3), np.bool_)
    np.equal(code_C[1:], code_C[:-1], out=same_C[4 : 4 + max(len(code_C) - 1, 0)])
    inner = border_N1[(border_N1 > 0) & (border_N1 < len(code_C))]
    same_C[inner + 3] = False
    # Nine in a row hold a whole block of four, wherever they begin, and end within three entries of the first and the last of them.
    whole_B = np.flatnonzero(same_C.view(np.uint32) == _FOUR)
    # Indentation is made of runs of spaces, and code is not to pay for it.
    whole_B = whole_B[~_white(code_C[4 * whole_B - 4])]
    apart_B = whole_B[1:] != whole_B[:-1] + 1
    first_R = 4 * whole_B[np.append(True, apart_B)[: len(whole_B)]]
    end_R = 4 * whole_B[np.append(apart_B, True)[: len(whole_B)]] + 4
    for _ in range(3):
        first_R -= same_C[first_R - 1]
        end_R += same_C[end_R]
    size_R = end_R - first_R + 1
    long_R = size_R >= RUN_CHARACTERS
    text_R = np.searchsorted(border_N1, first_R[long_R] - 4, side="right") - 1
    total_N = np.bincount(text_R, weights=size_R[long_R], minlength=len(border_N1) - 1)
    return total_N.astype(np.int64)


def _white(code_R: Codes) -> NDArray[np.bool_]:
    """Whether characters are white space."""
    white_R = code_R == _WHITE_SPACE[0]
    for mark in _WHITE_SPACE[1:]:
        white_R |= code_R == mark
    return white_R


def _shares(tokens: Tokens) -> tuple[Floats, Floats]:
    """Distinct over all tokens of each text, and the share of runs of REPEAT_TOKENS that stood before."""
    hash_W, length_N = tokens.hash_W, tokens.length_N
    border_N1 = np.concatenate([[0], np.cumsum(length_N)])
    # One table for all texts of a piece: a hash of another text is another key.
    key_W = hash_W ^ np.repeat(mixed(np.arange(1, len(length_N) + 1, dtype=np.uint64)), length_N)
    extra_W, shared_W = _repeats(key_W)
    distinct_N = np.where(
        length_N > 0, 1.0 - _each(extra_W, border_N1) / np.maximum(length_N, 1), 1.0
    )
    # A run stands in the text twice only if all its tokens do, so only such runs are looked up.
    begin_W, reach = shared_W, 1
    while reach < REPEAT_TOKENS and len(begin_W):
        step = min(reach, REPEAT_TOKENS - reach)
        begin_W = begin_W[:-step] & begin_W[step:]
        reach += step
    # Those that begin among the last tokens of a text end in the next one.
    over_X = np.subtract.outer(border_N1[1:], np.arange(1, REPEAT_TOKENS)).ravel()
    begin_W[over_X[(over_X >= 0) & (over_X < len(begin_W))]] = False
    begin_H = np.flatnonzero(begin_W)
    # The keys, not the hashes: they say which text a run is of. Runs of 2, 4, 8 tokens, each from two of half as many.
    run_W, width, factor = key_W, 1, _RUN_FACTOR
    while width < REPEAT_TOKENS:
        longer_W = run_W[width:] * np.uint64(factor)
        longer_W += run_W[:-width]
        run_W, width, factor = longer_W, 2 * width, factor * factor % (1 << 64)
    run_H = run_W[begin_H]
    extra_H, _ = _repeats(mixed(run_H))
    extra_N = np.diff(np.searchsorted(begin_H[extra_H], border_N1))
    # A text of fewer tokens is one run, and nothing repeats.
    return distinct_N, extra_N / np.maximum(length_N - (REPEAT_TOKENS - 1), 1)


def _repeats(key_H: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each key is one too many, all equal ones but one, and whether it stands there more than once."""
    extra_H, shared_H = np.zeros((2, len(key_H)), np.bool_)
    number_H: Integers | None = None
    while len(key_H):
        # Every key writes its place into its slot and one of them stays. Its equals are found, and the others, about one in ten,
        # take another slot in the next round. Four times as fast as sorting.
        bits = (2 * len(key_H)).bit_length()
        slot_H = ((key_H * ODD) >> np.uint64(64 - bits)).view(np.int64)
        place_H = np.arange(len(key_H), dtype=np.int32)
        table = np.empty(1 << bits, np.int32)
        table[slot_H] = place_H
        stays_H = table[slot_H]
        equal_H = key_H[stays_H] == key_H
        left_H = np.flatnonzero(~equal_H)
        equal_H &= stays_H != place_H
        twin_D: Integers = np.flatnonzero(equal_H)
        stays_D: Integers = stays_H[twin_D].astype(np.int64)
        if number_H is not None:
            twin_D, stays_D = number_H[twin_D], number_H[stays_D]
        extra_H[twin_D] = True
        shared_H[twin_D] = True
        shared_H[stays_D] = True
        key_H, number_H = mixed(key_H[left_H]), left_H if number_H is None else number_H[left_H]
    return extra_H, shared_H
