r"""Texts as arrays of characters: where tokens begin, and a hash of each, without one Python object per token or text.

`valuation.shingles` says what a token is and cuts texts with a regular expression; this module finds the same tokens in the same
texts with array arithmetic. A character is of one of four kinds, and only its kind and its neighbours decide:

    mark     neither \w nor \s, or a letter of a script without spaces that is no \w     a token of its own
    single   a letter of a script that writes without spaces                            a token of its own, unless a word has begun
    letter   any other \w                                                               goes on to the end of its run of \w
    space    \s                                                                         no token

Characters in lower case, with 0 in place of a space, are read in blocks of eight bytes: 8 ASCII characters, 4 of the basic plane, or 2.
What stands between a token and the next one is zeros, so a token may be read up to the beginning e of the next:

    h = mix(Σ_k b_k · M^k mod 2^64),    b_k = block k of s .. e, cut at e,    mix(x) = y ^ (y >> 32), y = M · x

A token of one block has a hash of its own for certain. Only tokens of the same text and call are comparable, and whoever knows M can make
two longer tokens collide; what that buys is a text that looks more repetitive than it is. Clusters, which compare owners, keep the hashes
of `valuation.shingles`.

Shapes: C characters of all texts, N texts, W tokens, Q blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from valuation.shingles import FORMAT, ODD, SPACELESS

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    Codes = NDArray[np.unsignedinteger]
    Integers = NDArray[np.int64]

SPACE, LETTER, SINGLE, MARK = 0, 1, 2, 3
MOVING, DAMAGED = 4, 8
PLANE = 0x10000
"""Characters have a table for each plane that is met."""
MAX_BLOCKS = 16
"""What of a token is longer is hashed by BLAKE2b: a round of array work for every eight bytes of the longest would be slow."""
DAMAGE = r"[\p{Cc}\p{Co}\x{FFFD}--\t\n\r\x{0C}]"
# Characters whose normal form or lower case depends on their neighbours: combining marks, Hangul and Kirat Rai vowels, and the sigma
# that is written otherwise at a word's end. Format characters are taken out, which moves all others.
_MOVING = rf"^[\p{{M}}{FORMAT}\x{{1160}}-\x{{11FF}}\x{{16D63}}-\x{{16D6A}}Σ]$"


@dataclass(frozen=True, slots=True)
class Kinds:
    """What is known of some characters; both arrays have one entry per character."""

    flag_K: NDArray[np.uint8]
    """SPACE, LETTER, SINGLE or MARK, of the lower-case form; plus MOVING if texts with it have to be normalised as a whole; plus DAMAGED."""
    lower_K: NDArray[np.uint32]
    """The lower-case form; 0 for a space."""


@dataclass(frozen=True, slots=True)
class Characters:
    """Texts, one after the other."""

    lower_C: Codes
    """In lower case, 0 for a space; a block holds 8, 4 or 2 of them."""
    start_C: NDArray[np.bool_]
    """Whether a token begins here."""
    border_N1: Integers
    """Where each text begins, and the end."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of some texts."""

    hash_W: NDArray[np.uint64]
    """Hash of each token."""
    length_N: Integers
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
    word, single, space = (
        lower.str.contains(pattern).to_numpy() for pattern in (r"^\w$", f"^[{SPACELESS}]$", r"^\s$")
    )
    flag = np.full(len(codes_K), MARK, np.uint8)
    flag[space], flag[word], flag[word & single] = SPACE, LETTER, SINGLE
    moving = (
        (chars.str.normalize("NFKC") != chars)
        | chars.str.contains(_MOVING)
        | (lower.str.len_chars() != 1)
    )
    flag[moving.to_numpy()] += MOVING
    flag[chars.str.contains(DAMAGE).to_numpy()] += DAMAGED
    lower_K = np.frombuffer("".join(text[0] for text in lower).encode("utf-32-le"), dtype="<u4")
    return Kinds(flag, np.where(space, np.uint32(0), lower_K))


@lru_cache(maxsize=17)
def kinds_below(planes: int) -> Kinds:
    """The kinds of all characters of the first planes; the character is the index.

    Args:
        planes: 1 .. 17.

    Returns:
        PLANE entries for each; surrogates, which no text has, are spaces.
    """
    if planes > 1:
        parts = [
            kinds_below(planes - 1),
            kinds_of(np.arange(PLANE * (planes - 1), PLANE * planes, dtype=np.uint32)),
        ]
    else:
        nothing = np.zeros(0xE000 - 0xD800, np.uint8)
        parts = [
            kinds_of(np.arange(0xD800, dtype=np.uint32)),
            Kinds(nothing, nothing.astype(np.uint32)),
            kinds_of(np.arange(0xE000, PLANE, dtype=np.uint32)),
        ]
    return Kinds(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("flag_K", "lower_K"))
    )


def text_bytes(texts: pl.Series) -> tuple[NDArray[np.uint8], Integers]:
    """Texts as they lie in memory.

    Args:
        texts: N texts.

    Returns:
        Their UTF-8 bytes without anything between them, read-only, and N + 1 borders.
    """
    import polars as pl

    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    _, offsets, data = array.buffers()
    border_N1 = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    byte_C = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    return byte_C[border_N1[0] : border_N1[-1]], border_N1 - border_N1[0]


def text_codes(texts: pl.Series) -> tuple[NDArray[np.uint32], Integers]:
    """Texts as code points.

    Args:
        texts: N texts.

    Returns:
        The code points of all of them, and N + 1 borders.
    """
    byte_C, _ = text_bytes(texts)
    codes_C = np.frombuffer(byte_C.tobytes().decode().encode("utf-32-le"), "<u4")
    return codes_C, np.concatenate(
        [[0], np.cumsum(texts.str.len_chars().to_numpy(), dtype=np.int64)]
    )


def ascii_characters(byte_C: NDArray[np.uint8], border_N1: Integers) -> Characters:
    """Characters of ASCII texts: comparisons of bytes, no table.

    Args:
        byte_C: bytes below 128.
        border_N1: where each text begins, and the end.

    Returns:
        What `unicode_characters` finds, in bytes.
    """
    lower_C = byte_C | ((byte_C - np.uint8(65) < 26).view(np.uint8) << np.uint8(5))
    word_C = lower_C - np.uint8(97) < 26
    word_C |= byte_C - np.uint8(48) < 10
    word_C |= byte_C == 95
    solid_C = byte_C - np.uint8(9) > 4
    solid_C &= byte_C != 32
    lower_C *= solid_C.view(np.uint8)
    start_C = solid_C
    begins_N = border_N1[:-1][border_N1[:-1] < border_N1[1:]]
    at_border = solid_C[begins_N]
    start_C[1:] &= ~(word_C[1:] & word_C[:-1])
    start_C[begins_N] = at_border
    return Characters(lower_C, start_C, border_N1)


def unicode_characters(
    codes_C: NDArray[np.uint32], border_N1: Integers
) -> tuple[Characters, NDArray[np.uint8]]:
    """Characters of any texts.

    Args:
        codes_C: code points; where a character is MOVING, tokens are right only if its text has been normalised before.
        border_N1: where each text begins, and the end.

    Returns:
        The characters, and the flags of each (see `Kinds`).
    """
    top = int(codes_C.max(initial=0))
    known, at_C = kinds_below(1 + top // PLANE), codes_C.astype(np.intp)
    flag_C, lower_C = known.flag_K[at_C], known.lower_K[at_C]
    if int(lower_C.max(initial=0)) < PLANE:
        lower_C = lower_C.astype(np.uint16)
    start_C = _starts(flag_C & np.uint8(3), border_N1)
    return Characters(lower_C, start_C, border_N1), flag_C


def find_tokens(characters: Characters) -> Tokens:
    """Cut texts into tokens and hash them.

    Args:
        characters: what to cut.

    Returns:
        The tokens that `valuation.shingles.token_hashes` finds, with other hashes.
    """
    lower_C, start_W = characters.lower_C, np.flatnonzero(characters.start_C)
    size_W = np.diff(start_W, append=len(lower_C))
    per = 8 // lower_C.itemsize
    block_Q = np.zeros(len(lower_C) // per + 2, "<u8")
    block_Q.view(lower_C.dtype)[: len(lower_C)] = lower_C
    hash_W = _blocks(block_Q, start_W, size_W, per)
    at_L, factor = np.flatnonzero(size_W > per), 1
    for done in range(per, per * MAX_BLOCKS, per):
        if not len(at_L):
            break
        factor = factor * int(ODD) % (1 << 64)
        more_L = _blocks(block_Q, start_W[at_L] + done, size_W[at_L] - done, per)
        hash_W[at_L] += more_L * np.uint64(factor)
        at_L = at_L[size_W[at_L] > done + per]
    for at in at_L.tolist():
        rest = (
            lower_C[start_W[at] + per * MAX_BLOCKS : start_W[at] + size_W[at]]
            .tobytes()
            .rstrip(b"\0")
        )
        if rest:
            hash_W[at] ^= np.frombuffer(hashlib.blake2b(rest, digest_size=8).digest(), "<u8")[0]
    hash_W *= ODD
    hash_W ^= hash_W >> np.uint64(32)
    return Tokens(hash_W, np.diff(np.searchsorted(start_W, characters.border_N1)))


def _blocks(
    block_Q: NDArray[np.uint64], at_W: Integers, size_W: Integers, per: int
) -> NDArray[np.uint64]:
    """The eight bytes from each place on, zeros from the end of what is to be read."""
    unit = 64 // per
    place_W = at_W >> (per.bit_length() - 1)
    shift_W = ((at_W & (per - 1)) * unit).view(np.uint64)
    found_W = block_Q[place_W] >> shift_W
    place_W += 1
    # Two shifts: by 64 bits at once is not defined.
    found_W |= (block_Q[place_W] << (np.uint64(63) - shift_W)) << np.uint64(1)
    masks = np.array([(1 << unit * count) - 1 for count in range(per + 1)], np.uint64)
    found_W &= masks[np.minimum(size_W, per)]
    return found_W


def _starts(kind_C: NDArray[np.uint8], border_N1: Integers) -> NDArray[np.bool_]:
    """Whether a token begins at each character."""
    word_C = (kind_C == LETTER) | (kind_C == SINGLE)
    alone_C = kind_C == MARK
    inside_C = word_C
    begins_N = border_N1[:-1][border_N1[:-1] < border_N1[1:]]
    if (kind_C == SINGLE).any():
        # A letter has come in this run of \w: the last letter stands behind the last place where a run may have begun.
        place_C = np.arange(len(kind_C), dtype=np.int32)
        last_letter_C = np.maximum.accumulate(np.where(kind_C == LETTER, place_C, np.int32(-1)))
        begin_C = np.where(word_C, np.int32(0), place_C + np.int32(1))
        begin_C[begins_N] = np.maximum(begin_C[begins_N], begins_N)
        inside_C = word_C & (last_letter_C >= np.maximum.accumulate(begin_C))
        alone_C |= word_C & ~inside_C
    start_C = alone_C | inside_C
    at_border = start_C[begins_N]
    start_C[1:] &= alone_C[1:] | ~inside_C[:-1]
    start_C[begins_N] = at_border
    return start_C
