r"""Texts as arrays of characters: where tokens begin and end, and a hash of each, without one Python object per token.

`valuation.shingles` says what a token is and cuts texts with a regular expression; this module finds the same tokens in the same
texts with array arithmetic. A character is of one of four kinds, and only its kind and its neighbours decide:

    mark     neither \w nor \s, or a letter of a script without spaces that is no \w     a token of its own
    single   a letter of a script that writes without spaces                            a token of its own, unless a word has begun
    letter   any other \w                                                               goes on to the end of its run of \w
    space    \s                                                                         no token

The hash of the token that begins at s is a difference of prefix sums up to the next token's beginning e, the same wherever it stands:

    H_i = Σ_{j<i} val(c_j) · M^j mod 2^64,    h = (H_e - H_s) · M^-s,    val(c) = mix(c + 1), and 0 for a space

Only tokens of the same text and call are comparable, and whoever knows M can make two tokens collide (Thue-Morse words do for every M);
what that buys is a text that looks more repetitive than it is. Clusters, which compare owners, keep the hashes of `valuation.shingles`.

Shapes: C characters of all texts, with a line end after each; N texts; W tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from valuation.shingles import FORMAT, ODD, SPACELESS, mixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Codes = NDArray[np.unsignedinteger]

SPACE, LETTER, SINGLE, MARK = 0, 1, 2, 3
BASIC = 0x10000
"""Characters of the basic plane have a table; the others are classified when they are met."""
KEPT_BITS = 20
_INVERSE = np.uint64(pow(int(ODD), -1, 1 << 64))
# Characters whose normal form or lower case depends on their neighbours: combining marks, Hangul and Kirat Rai vowels, and the sigma
# that is written otherwise at a word's end. Format characters are taken out, which moves all others.
_MOVING = rf"^[\p{{M}}{FORMAT}\x{{1160}}-\x{{11FF}}\x{{16D63}}-\x{{16D6A}}Σ]$"


@dataclass(frozen=True, slots=True)
class Kinds:
    """What is known of some characters; all arrays have one entry per character."""

    kind_K: NDArray[np.uint8]
    """SPACE, LETTER, SINGLE or MARK, of the lower-case form."""
    value_K: NDArray[np.uint64]
    """val of the lower-case form."""
    moving_K: NDArray[np.bool_]
    """Texts with this character have to be normalised as a whole."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of some texts."""

    hash_W: NDArray[np.uint64]
    """Hash of each token."""
    length_N: NDArray[np.int64]
    """Tokens of each text."""


def kinds_of(codes_K: Codes) -> Kinds:
    """Classify characters, each alone.

    Args:
        codes_K: code points, no surrogates.

    Returns:
        The kinds of their lower-case forms.
    """
    import polars as pl

    chars = pl.Series(
        "char", list(codes_K.astype("<u4").tobytes().decode("utf-32-le")), dtype=pl.String
    )
    lower = chars.str.to_lowercase()
    single = lower.str.contains(f"^[{SPACELESS}]$")
    word = lower.str.contains(r"^\w$")
    kind = np.full(len(codes_K), MARK, np.uint8)
    kind[lower.str.contains(r"^\s$").to_numpy()] = SPACE
    kind[word.to_numpy()] = LETTER
    kind[(word & single).to_numpy()] = SINGLE
    moving = (
        (chars.str.normalize("NFKC") != chars)
        | chars.str.contains(_MOVING)
        | (lower.str.len_chars() != 1)
    )
    lower_K = np.frombuffer(
        "".join(text[0] for text in lower).encode("utf-32-le"), dtype="<u4"
    ).astype(np.uint64)
    value = np.where(kind == SPACE, np.uint64(0), mixed((lower_K + np.uint64(1)) * ODD))
    return Kinds(kind, value, moving.to_numpy())


@lru_cache(maxsize=1)
def _ascii() -> Kinds:
    return kinds_of(np.arange(128, dtype=np.uint32))


@lru_cache(maxsize=1)
def _basic() -> Kinds:
    surrogates = np.zeros(0xE000 - 0xD800, np.uint8)
    low = kinds_of(np.arange(0xD800, dtype=np.uint32))
    high = kinds_of(np.arange(0xE000, BASIC, dtype=np.uint32))
    return Kinds(*(
        np.concatenate([getattr(low, name), surrogates.astype(getattr(low, name).dtype), getattr(high, name)])
        for name in ("kind_K", "value_K", "moving_K")
    ))  # fmt: skip


def ascii_codes(texts: Sequence[str]) -> tuple[Codes, NDArray[np.int64], Kinds]:
    """ASCII texts as bytes.

    Args:
        texts: N texts without any other character.

    Returns:
        Codes with a line end after each text, N + 1 borders, and the table that the codes are indices of.
    """
    codes_C = np.frombuffer("\n".join([*texts, ""]).encode("ascii"), np.uint8)
    return codes_C, _borders(texts), _ascii()


def unicode_codes(texts: Sequence[str]) -> tuple[Codes, NDArray[np.int64], Kinds]:
    """Texts of any characters as indices of a table.

    Args:
        texts: N texts.

    Returns:
        Indices with a line end after each text, N + 1 borders, and their table. In the basic plane the index is the code point.
    """
    codes_C = np.frombuffer("\n".join([*texts, ""]).encode("utf-32-le"), "<u4")
    known = _basic()
    above_C = codes_C >= BASIC
    if above_C.any():
        met_K, at_A = np.unique(codes_C[above_C], return_inverse=True)
        codes_C = codes_C.copy()
        codes_C[above_C] = BASIC + at_A
        more = kinds_of(met_K)
        known = Kinds(*(
            np.concatenate([getattr(known, name), getattr(more, name)]) for name in ("kind_K", "value_K", "moving_K")
        ))  # fmt: skip
    return codes_C, _borders(texts), known


def find_tokens(codes_C: Codes, borders_N1: NDArray[np.int64], known: Kinds) -> Tokens:
    """Cut texts into tokens and hash them.

    Args:
        codes_C: characters, with a line end after each text; texts with a moving character have been normalised before.
        borders_N1: where each text begins; the last entry is the number of characters.
        known: table that the codes are indices of.

    Returns:
        The tokens that `valuation.shingles.token_hashes` finds, with other hashes.
    """
    start_W = np.flatnonzero(_starts(np.take(known.kind_K, codes_C)))
    prefix_C1 = np.empty(len(codes_C) + 1, np.uint64)
    prefix_C1[0] = 0
    body_C = prefix_C1[1:]
    np.take(known.value_K, codes_C, out=body_C, mode="clip")
    np.multiply(body_C, powers(len(codes_C)), out=body_C)
    np.cumsum(body_C, out=body_C)
    # What stands between two tokens is space and adds nothing: a token may end where the next begins.
    hash_W = np.diff(prefix_C1[start_W], append=prefix_C1[-1:])
    hash_W *= powers(len(codes_C), inverse=True)[start_W]
    at_N1 = np.searchsorted(start_W, borders_N1)
    return Tokens(hash_W, at_N1[1:] - at_N1[:-1])


def powers(count: int, *, inverse: bool = False) -> NDArray[np.uint64]:
    """M^0 .. M^(count - 1) mod 2^64, or the powers of its inverse.

    Args:
        count: how many.
        inverse: of the inverse of M.

    Returns:
        The powers; the same memory for equal magnitudes of `count`, so never written to.
    """
    bits = max(count - 1, 1).bit_length()
    # The tables of one very long text aren't kept.
    return (_powers if bits <= KEPT_BITS else _powers.__wrapped__)(bits, inverse)[:count]


@lru_cache(maxsize=64)
def _powers(bits: int, inverse: bool) -> NDArray[np.uint64]:  # noqa: FBT001 - a key of the cache
    factors = np.full(1 << bits, _INVERSE if inverse else ODD, np.uint64)
    factors[0] = 1
    product = np.cumprod(factors)
    product.flags.writeable = False
    return product


def _starts(kind_C: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether a token begins at each character."""
    word_C = (kind_C == LETTER) | (kind_C == SINGLE)
    alone_C = kind_C == MARK
    inside_C = word_C
    if (kind_C == SINGLE).any():
        # A letter has come in this run of \w: the last letter stands behind the last character that is no \w.
        place_C = np.arange(len(kind_C))
        last_letter_C = np.maximum.accumulate(np.where(kind_C == LETTER, place_C, -1))
        last_break_C = np.maximum.accumulate(np.where(word_C, -1, place_C))
        inside_C = word_C & (last_letter_C > last_break_C)
        alone_C |= word_C & ~inside_C
    alone_C[:1] |= inside_C[:1]
    alone_C[1:] |= inside_C[1:] & ~inside_C[:-1]
    return alone_C


def _borders(texts: Sequence[str]) -> NDArray[np.int64]:
    sizes = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
