"""How a text file becomes records."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.storage.records import COLUMNS, RUN_CHARS, SCHEMA, cut, paragraphs

pieces = st.lists(
    st.sampled_from(["a", "bb. ", "c\n", "\n\n", "\r\n", "\r", "  ", "x" * 30, "Ende! ", "\t", "é"])
)


@given(pieces.map("".join), st.integers(1, 40))
@settings(deadline=None)
def test_nothing_is_dropped_and_no_run_is_too_long(text, limit):
    """The runs join to the text, each has 1 to `limit` characters."""
    runs = paragraphs(text, limit)
    assert "".join(runs) == text
    assert all(1 <= len(run) <= limit for run in runs)


@given(pieces, st.integers(1, 40))
@settings(deadline=None)
def test_the_reader_s_chunks_do_not_matter(chunks, limit):
    """Cutting a text in pieces is cutting the whole."""
    assert list(cut(chunks, limit)) == paragraphs("".join(chunks), limit)


@pytest.mark.parametrize(
    ("text", "limit", "runs"),
    [
        ("", 5, []),
        ("One.\n\nTwo.\n\nThree.", 12, ["One.\n\nTwo.\n\n", "Three."]),
        ("One.\n\nTwo.\n\nThree.", 100, ["One.\n\nTwo.\n\nThree."]),
        ("One.\r\n\r\nTwo.\r\n \r\nThree.", 14, ["One.\r\n\r\n", "Two.\r\n \r\n", "Three."]),
        ("aa\r\nbb cc", 8, ["aa\r\nbb ", "cc"]),
        ("First one. Second one. Third", 24, ["First one. Second one. ", "Third"]),
        ('He said "no." Then he left it', 20, ['He said "no." ', "Then he left it"]),
        ("no sentence here at all", 10, ["no ", "sentence ", "here at ", "all"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("\n\n\nabc\n\ndef", 8, ["\n\n\nabc\n\n", "def"]),
        ("          ", 4, ["    ", "    ", "  "]),
    ],
)
def test_cuts_fall_where_a_reader_would_cut(text, limit, runs):
    """Whole paragraphs first, then sentences, then words, then the limit; CR LF is one line end."""
    assert paragraphs(text, limit) == runs


def test_the_default_limit_is_2000_characters():
    """The unit of value of a text file is fixed."""
    assert RUN_CHARS == 2_000
    assert [len(run) for run in paragraphs("x" * 4_001)] == [2_000, 2_000, 1]


def test_the_columns_are_those_of_the_interface():
    """INTERFACES 2, in order."""
    assert ", ".join(COLUMNS) == (
        "record_id, fingerprint, owner, source, position, text, licence, consent_train, "
        "consent_display, consent_resell, date, personal, raw_digest"
    )
    assert tuple(SCHEMA) == COLUMNS
