"""Shingles: texts as sets of hashed token runs, the common ground of clusters and quality.

A token is a word, one letter of a script that writes without spaces, or one punctuation mark.
Normalised away before: Unicode form (NFKC), letter case, white space and invisible format
characters, so that none of them hides a copy. A shingle is a run of `width` tokens,

    h(t_1 ... t_w) = mix(Σ_k h(t_k) · M^(w-k) mod 2^64),        h(t) = first 8 bytes of BLAKE2b,

with M odd. A hash depends on its shingle only: not on other texts, the process, or the version of
a library. Cost: linear; each distinct token of a chunk is hashed once, the rest is array work.

Shapes: n texts, W tokens, H shingles.

Source: Broder, "On the resemblance and containment of documents", 1997 (shingles); Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014 (the mixer).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    from numpy.typing import NDArray

SHINGLE_TOKENS = 3
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in SplitMix64

# A token is a word, one letter of a script that writes without spaces, or one mark. Marks count:
# "1 + 2" and "1 - 2" are different texts.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
FORMAT = r"\p{Cf}"
_WORDS = rf"[{SPACELESS}]|\w+|[^\w\s]"


def token_hashes(texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Cut texts into normalised tokens and hash them.

    Args:
        texts: n texts.

    Returns:
        Flat 64-bit hashes of all tokens, and the number of tokens of each text.
    """
    import polars as pl

    tokens = normalised(pl.Series("token", texts, dtype=pl.String)).str.extract_all(_WORDS)
    lengths = tokens.list.len().to_numpy().astype(np.int64)
    flat = tokens.filter(tokens.list.len() > 0).explode().to_frame()
    distinct = flat["token"].unique()
    # Python's and polars' own hashes change between processes or versions; BLAKE2b does not.
    digests = [hashlib.blake2b(token.encode(), digest_size=8).digest() for token in distinct]
    codes = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
    table = pl.DataFrame({"token": distinct, "hash": codes})
    joined = flat.join(table, on="token", how="left", maintain_order="left")
    return joined["hash"].to_numpy(), lengths


def normalised(texts: pl.Series) -> pl.Series:
    """Texts without what can hide a copy: compatibility forms, format characters, letter case.

    Args:
        texts: n texts.

    Returns:
        As many; white space stays, because it ends words.
    """
    return texts.str.normalize("NFKC").str.replace_all(FORMAT, "").str.to_lowercase()


def shingle_hashes(
    tokens_W: NDArray[np.uint64], lengths: NDArray[np.int64], width: int = SHINGLE_TOKENS
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash the shingles of texts: flat 64-bit hashes and the border of each text.

    A text with fewer than `width` tokens is one shingle; one without tokens has none.

    Args:
        tokens_W: token hashes of all texts (see `token_hashes`).
        lengths: tokens of each of the n texts.
        width: tokens per shingle, at least 1.

    Returns:
        All hashes, and n + 1 offsets.
    """
    # Rolling polynomial over the hashes of neighbouring tokens (wraps mod 2^64), then one mixing
    # step, so that sets of shingles look random to the sketch.
    windows = np.maximum(lengths - (width - 1), np.minimum(lengths, 1))
    offsets = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    at_H = np.repeat(starts - offsets[:-1], windows) + np.arange(offsets[-1])
    end_H = np.repeat(starts + lengths, windows)
    hash_H = np.zeros(len(at_H), dtype=np.uint64)
    for step in range(width):
        position = at_H + step
        inside = position < end_H
        token_H = np.zeros(len(at_H), dtype=np.uint64)
        token_H[inside] = tokens_W[position[inside]]
        hash_H = hash_H * ODD + token_H
    return mixed(hash_H), offsets


def mixed(x_H: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection in which every bit depends on every bit.

    Args:
        x_H: 64-bit integers.

    Returns:
        As many, each a function of its own input.
    """
    x_H = (x_H ^ (x_H >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_H = (x_H ^ (x_H >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_H ^ (x_H >> np.uint64(31))
