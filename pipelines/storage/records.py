"""What one record is: its columns, and how a text file becomes records.

A row of a ``.jsonl``, ``.parquet`` or ``.csv`` file is a record. A ``.txt`` or ``.md`` file is cut into
runs of whole paragraphs of up to 2,000 characters; a paragraph longer than that is cut after a sentence,
else after a space, else where the limit falls. Nothing is dropped and nothing is trimmed:

    "".join(paragraphs(text)) == text

The cut after position p depends on the next 2,000 characters only. So a file of any size is cut while it
is read, in bounded memory, and the result does not depend on how the reader's chunks fall.

When it is wrong: a paragraph inserted at the top of a file shifts the runs behind it, which are then new
records; deliver rows with an ``id`` where records must keep their identity under edits.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

import polars as pl

RUN_CHARS: Final = 2_000
"""Longest run of paragraphs in characters (INTERFACES: what is one record)."""

SCHEMA: Final = pl.Schema(
    {
        "record_id": pl.Binary(),
        "fingerprint": pl.Binary(),
        "owner": pl.String(),
        "source": pl.String(),
        "position": pl.Int64(),
        "text": pl.String(),
        "licence": pl.String(),
        "consent_train": pl.Boolean(),
        "consent_display": pl.Boolean(),
        "consent_resell": pl.Boolean(),
        "date": pl.String(),
        "personal": pl.Boolean(),
        "raw_digest": pl.Binary(),
    }
)
"""Columns of a record. ``date`` is YYYY-MM-DD or null; ids and digests are 32 bytes; ``text`` is the text
as delivered, never normalised."""

COLUMNS: Final = tuple(SCHEMA.names())

# (?>...) keeps CR LF one line end: backtracking into its CR alone would see an empty line behind it.
_BLANK_LINES: Final = re.compile(r"(?>\r\n|\r|\n)(?:[ \t]*(?>\r\n|\r|\n))+")
_SENTENCE_END: Final = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]]*\s+")
_NOT_SPACE: Final = re.compile(r"\S")
_SPACE: Final = re.compile(r"\s+")


def paragraphs(text: str, limit: int = RUN_CHARS) -> list[str]:
    r"""Cut a text into runs of whole paragraphs.

    Args:
        text: any text.
        limit: longest run in characters, >= 1.

    Returns:
        Runs that join to the text again; each ends with the blank lines that follow it.

    Examples:
        >>> paragraphs("One.\n\nTwo.\n\nThree.", limit=12)
        ['One.\n\nTwo.\n\n', 'Three.']
    """
    return list(cut([text], limit))


def cut(chunks: Iterable[str], limit: int = RUN_CHARS) -> Iterator[str]:
    """Cut a text that arrives in pieces, exactly as :func:`paragraphs` cuts the whole.

    Args:
        chunks: consecutive pieces of one text.
        limit: longest run in characters, >= 1.

    Yields:
        Runs; memory is bounded by the largest chunk and the limit.
    """
    pending = ""
    for chunk in chunks:
        pending = pending + chunk if pending else chunk
        start = 0
        while len(pending) - start > limit:
            end = _border(pending, start, start + limit)
            yield pending[start:end]
            start = end
        pending = pending[start:]
    if pending:
        yield pending


def _border(text: str, start: int, stop: int) -> int:
    """Where the run that starts at ``start`` ends: the best border in (start, stop]."""
    content = _NOT_SPACE.search(text, start, stop)
    if content is None:
        return stop
    for pattern in (_BLANK_LINES, _SENTENCE_END, _SPACE):
        border = None
        for match in pattern.finditer(text, content.start(), stop):
            border = match.end()
        if border is not None:
            return border
    return stop
