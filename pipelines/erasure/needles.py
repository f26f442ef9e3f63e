"""What an erased record looks like on disk, as byte patterns.

A text can stand in a file as UTF-8, as UTF-16 (either order), escaped for JSON or for HTML; as token ids of 2, 4 or 8 bytes;
and a derivative names it by its record id, as 32 bytes or as hex. Other encodings (a compressed file, a column of a Parquet
file) are undone by `search` before it looks.

Token ids are looked for as the whole record, not by 8-grams: people's lines share their phrasing, so shorter runs stand in
records of others who stay. A text that another owner delivered too stays in the corpus, and is not looked for.
"""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MIN_TOKENS = 8
"""Shorter records are looked for by text and id only: a few token ids stand anywhere."""
MIN_CHARS = 8
"""The same for texts."""
WIDTHS = ("<u2", "<u4", "<i8")


@dataclass(frozen=True, slots=True)
class Needles:
    """Byte patterns of some records; no `repr` of a text ever reaches a message."""

    texts: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    ids: tuple[bytes, ...]

    def __repr__(self) -> str:
        """Counts only."""
        return f"Needles(texts={len(self.texts)}, tokens={len(self.tokens)}, ids={len(self.ids)})"

    def count(self, data: bytes) -> int:
        """How many of the patterns stand in some bytes.

        Args:
            data: decoded bytes.

        Returns:
            Number of patterns found at least once.
        """
        return sum(
            pattern in data for part in (self.texts, self.tokens, self.ids) for pattern in part
        )

    def without_ids(self) -> "Needles":
        """The same, where a record id may stay: requests name records by id."""
        return Needles(self.texts, self.tokens, ())


def needles(
    texts: Iterable[str], tokens: Iterable[Sequence[int]], record_ids: Iterable[bytes]
) -> Needles:
    """Make the patterns of some records.

    Args:
        texts: their texts.
        tokens: their token ids, without end of text.
        record_ids: 32 bytes each.
    """
    spellings = {
        pattern
        for text in texts
        if len(text.strip()) >= MIN_CHARS
        for pattern in _spellings(text.strip())
    }
    ids = [pattern for record_id in record_ids for pattern in (record_id, record_id.hex().encode())]
    runs = {
        np.asarray(run, dtype=width).tobytes()
        for run in tokens
        if len(run) >= MIN_TOKENS
        for width in WIDTHS
        if width != "<u2" or max(run) < 1 << 16
    }
    return Needles(tuple(sorted(spellings)), tuple(sorted(runs)), tuple(ids))


def _spellings(text: str) -> set[bytes]:
    escaped = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    plain = {text, *escaped, html.escape(text), html.escape(text, quote=False)}
    return {one.encode("utf-8", "surrogatepass") for one in plain} | {
        text.encode(order, "surrogatepass") for order in ("utf-16-le", "utf-16-be")
    }
