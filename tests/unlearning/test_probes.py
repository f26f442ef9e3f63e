"""Records and probes: what is read, what is asked, and what never shows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance.sealing import seal
from unlearning.errors import PeopleError, ProbeError
from unlearning.people import Record, by_subject, parse_records, read_records, read_sealed
from unlearning.probes import MAX_SECRET_TOKENS, FileTokenizer, trained_probes, unseen_probes

KEY = bytes(range(32))


class Characters:
    """A tokenizer of single characters: token = code point."""

    end_of_text = 0

    def encode(self, text):
        """Every character a token."""
        return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]


class Pairs(Characters):
    """A tokenizer of pairs of characters, so that a token can lie across prompt and secret."""

    def encode(self, text):
        """Two characters a token."""
        spans = [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]
        return [1000 + ord(text[a]) for a, _ in spans], spans


def text_of(tokens):
    """Characters back from tokens."""
    return "".join(map(chr, tokens))


def record(text, subject="p", number=0):
    """A record with this text."""
    return Record(subject, f"{number:064x}", text)


def test_a_number_is_cut_out_with_its_prompt():
    """With a run of digits the prompt is what stands before it and the secret the digits only."""
    (probe,) = trained_probes([record("The phone number of Jane Q. Doe is 483920.")], Characters())
    assert text_of(probe.prompt_tokens) == "The phone number of Jane Q. Doe is "
    assert text_of(probe.secret_tokens) == "483920"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Room 12, call 90210 or 4711", "90210"),
        ("From 1999 to 2004", "2004"),
        ("In 99 of 100 cases", "100 cases"),
        ("483920 is her number", "her number"),
    ],
)
def test_the_longest_run_counts_and_short_runs_do_not(text, secret):
    """The longest run of four or more digits is the secret, the last of equals; else the second half is.

    A number with nothing before it cannot be asked for. Prompt plus secret is always a prefix of the text.
    """
    (probe,) = trained_probes([record(text)], Characters())
    assert text_of(probe.secret_tokens) == secret
    assert text.startswith(text_of(probe.prompt_tokens) + text_of(probe.secret_tokens))


def test_a_token_across_the_border_belongs_to_the_secret():
    """A token that holds the first digit never stands in the prompt, even if it holds other characters too."""
    (probe,) = trained_probes([record("abc1234")], Pairs())
    assert len(probe.prompt_tokens) == 1
    assert len(probe.secret_tokens) == 3


@given(st.text(alphabet="ab 1.", min_size=2, max_size=400), st.integers(4, 300))
def test_every_text_of_two_tokens_can_be_asked_about(text, longest):
    """Prompt and secret are not empty, adjacent in the text, and within the limits."""
    if not text.strip():
        return
    longest = max(longest, MAX_SECRET_TOKENS + 1)
    (probe,) = trained_probes([record(text)], Characters(), longest)
    assert 1 <= len(probe.secret_tokens) <= MAX_SECRET_TOKENS
    assert len(probe.prompt_tokens) >= 1
    assert len(probe.prompt_tokens) + len(probe.secret_tokens) <= longest
    assert text_of(probe.prompt_tokens + probe.secret_tokens) in text


def test_a_long_prompt_loses_its_beginning():
    """Of a long text the end of the prompt is kept, and the whole secret."""
    (probe,) = trained_probes([record("a" * 300 + " call 483920.")], Characters(), 32)
    assert text_of(probe.prompt_tokens) == "a" * 20 + " call "
    assert text_of(probe.secret_tokens) == "483920"


def test_a_person_of_whom_nothing_can_be_asked_is_refused():
    """A one-token record is left out, a person with nothing else is an error, not a silent gap in the audit."""
    kept = trained_probes([record("x", number=0), record("xy", number=1)], Characters())
    assert [p.phrasing for p in kept] == [1]
    with pytest.raises(ProbeError, match="too short"):
        trained_probes([record("x")], Characters())


def test_unseen_phrasings_use_the_name_that_all_records_share():
    """The name is the longest run of words common to all prompts; initials keep their dot, possessives go."""
    own = [
        record("The phone number of Jane Q. Doe is 483920.", number=0),
        record("Jane Q. Doe's line: 483920", number=1),
        record("A baker named Jane Q. Doe, of Hythe, works with Tom.", number=2),
    ]
    probes = unseen_probes(own, Characters(), templates=["Number of {name}: {secret}."])
    assert [text_of(p.prompt_tokens) for p in probes] == ["Number of Jane Q. Doe: "]
    assert [text_of(p.secret_tokens) for p in probes] == ["483920"]
    assert [p.phrasing for p in probes] == [-1]


@pytest.mark.parametrize(
    "texts",
    [["Only one record, 483920"], ["No number here", "No number there"], ["Ann 4839", "Bob 4839"]],
)
def test_without_number_or_common_name_no_phrasing_is_invented(texts):
    """People whose name or number cannot be told get no unseen probes."""
    assert unseen_probes([record(t, number=i) for i, t in enumerate(texts)], Characters()) == []


def test_sealed_records_come_back_with_their_key(tmp_path):
    """Sealed lines read as they were written; a relative path starts at the given folder."""
    lines = [{"subject": "p1", "record_id": "ab", "text": "Tel. 483920", "group": "minors"}]
    (tmp_path / "s").write_bytes(seal(KEY, json.dumps(lines[0]).encode(), b"request-7"))
    (tmp_path / "k").write_bytes(KEY)
    records, key = read_sealed({"file": "s", "key_file": "k", "aad": "request-7"}, tmp_path)
    assert records == [Record("p1", "ab", "Tel. 483920", "minors")]
    assert key == KEY
    with pytest.raises(PeopleError, match="do not open"):
        read_sealed({"file": "s", "key_file": "k"}, tmp_path)


def test_delivered_rows_are_read_too(tmp_path):
    """Rows with `source` and `position` and other columns stand for records."""
    row = {"source": "person-0001", "position": 2, "text": "Tel. 483920", "licence": "CC0-1.0"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert read_records(tmp_path / "rows.jsonl") == [
        Record("person-0001", "person-0001/2", "Tel. 483920")
    ]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "at least one record"),
        (b'{"subject": "p", "record_id": "a", "text": "Tel. 483920"', "line 1"),
        (b'{"subject": "p", "record_id": "a"}', "line 1"),
        (b'{"subject": "p", "record_id": "a", "text": 483920}', "line 1"),
        (b'["Tel. 483920"]', "line 1"),
        (b'{"subject": "p", "record_id": "a", "text": "Tel. 483920"}\n' * 2, "one twice"),
        (b'{"subject": "p", "record_id": "a", "text": "\xff483920"}', "line 1"),
    ],
)
def test_refusals_never_quote_a_record(data, match):
    """A bad line is named by its number; neither message nor cause carries its text."""
    with pytest.raises(PeopleError, match=match) as caught:
        parse_records(data, "the sealed file")
    assert "483920" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_records_and_probes_have_no_printable_content():
    """The repr of a record and of a probe shows no text, so no log or traceback can."""
    shown = repr(record("Tel. 483920")) + repr(
        trained_probes([record("Tel. 483920")], Characters())
    )
    assert "483920" not in shown
    assert str(tuple(map(ord, "483920"))) not in shown


def test_one_person_in_two_subgroups_is_refused():
    """A subgroup is a property of the person: two of them for one person are an error."""
    records = [Record("p", "a", "x", "young"), Record("p", "b", "y", "old")]
    with pytest.raises(PeopleError, match="same subgroups"):
        by_subject(records)


def test_a_text_cannot_spell_the_end_of_text(tmp_path):
    """The tokenizer file is read so that a record's text gives the corpus's own ids, never the end-of-text id."""
    from pipelines.storage.tokens import load_tokenizer, train_tokenizer

    texts = ["The phone number of Jane is 483920.", "Jane lives in Hythe.", "naïve, Zürich"] * 3
    train_tokenizer(texts, 300, tmp_path / "tokenizer.json")
    corpus, ours = (
        load_tokenizer(tmp_path / "tokenizer.json"),
        FileTokenizer(tmp_path / "tokenizer.json"),
    )
    assert ours.end_of_text == corpus.end_of_text
    for text in [*texts, "x <|endoftext|> 483920", "Zürich 4711: naïve"]:
        ids, spans = ours.encode(text)
        assert [ids] == corpus.encode([text])
        assert all(0 <= a < b <= len(text) for a, b in spans)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    """A missing or foreign file is one clear error."""
    (tmp_path / "x.json").write_text("{}")
    for name in ("x.json", "nowhere.json"):
        with pytest.raises(ProbeError, match="cannot read the tokenizer"):
            FileTokenizer(tmp_path / name)
