"""The whole inbox: duplicates, what is held out, what must not come back, and the sum law."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.storage.config import Config, IntakeConfig, TargetConfig
from pipelines.storage.errors import IntakeError, TargetError
from pipelines.storage.intake import Counts, read_target
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.terms import OwnerConfig
from provenance.canonical import canonical_bytes, fingerprint, jcs

SECRET = "The phone number of Zaphod B. is 424242."


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def reasons(result):
    """(delivery, row, reason) of every refused row."""
    return list(result.quarantine.select("delivery", "row", "reason").iter_rows())


def test_duplicates_are_per_owner_and_keys_are_unique(deliver, take_in):
    """Same text again: duplicate. Same place, other text: refused. Same text of another owner: a record."""
    deliver(
        "ada/a.jsonl",
        [
            {"text": "same", "source": "s", "position": 0},
            {"text": "same", "source": "t", "position": 0},
            {"text": "same\r\n", "source": "u", "position": 0},
            {"text": "same\n", "source": "u", "position": 1},
            {"text": "other", "source": "s", "position": 0},
            {"text": "other", "source": "v", "position": 0},
            {"text": "by id", "id": "x"},
            {"text": "by the same id", "id": "x"},
        ],
    )
    deliver("ada/b.jsonl", [{"text": "by id", "id": "x"}])
    deliver("bob/a.jsonl", [{"text": "same", "source": "s", "position": 0}])
    result = take_in()
    assert result.counts == Counts(10, 5, 0, 2, 3)
    assert result.records.select("owner", "text", "source").rows() == [
        ("ada", "same", "s"),
        ("ada", "same\r\n", "u"),
        ("ada", "other", "v"),
        ("ada", "by id", "a.jsonl#x"),
        ("bob", "same", "s"),
    ]
    assert reasons(result) == [
        ("ada/a.jsonl", 4, "duplicate_key"),
        ("ada/a.jsonl", 7, "duplicate_key"),
    ]
    assert result.duplicates.select("delivery", "row", "reason").rows() == [
        ("ada/a.jsonl", 1, "duplicate"),
        ("ada/a.jsonl", 3, "duplicate"),
        ("ada/b.jsonl", 0, "duplicate"),
    ]


def test_held_out_records_are_kept_apart_and_never_trained_on(deliver, take_in):
    """By date; a copy with an earlier date, of whatever owner, goes to quarantine."""
    deliver(
        "ada/a.jsonl",
        [
            {"text": "early copy", "date": "1990-01-01"},
            {"text": "last day in", "date": "1999-12-31"},
            {"text": "first day out", "date": "2000-01-01"},
            {"text": "early copy", "date": "2001-01-01T12:00:00"},
            {"text": "no date"},
            {"text": "first day out", "date": "2002-01-01"},
        ],
    )
    deliver(
        "bob/b.jsonl", [{"text": "first day out"}, {"text": "first day out", "date": "2020-01-01"}]
    )
    result = take_in(Config(target=TargetConfig(since="2000-01-01")))
    assert result.counts == Counts(8, 2, 3, 2, 1)
    assert result.records["text"].to_list() == ["last day in", "no date"]
    assert result.held_out["text"].to_list() == ["first day out", "early copy", "first day out"]
    assert reasons(result) == [("ada/a.jsonl", 0, "in_target"), ("bob/b.jsonl", 0, "in_target")]


def test_contents_of_a_target_file_are_refused(deliver, take_in, home, keys):
    """target.path: a delivery that holds a target text is quarantined, others are not."""
    target = home.path / "target.jsonl"
    target.write_bytes(jsonl([{"text": "measured"}, {"text": "measured"}, {"text": "too"}]))
    records = read_target(target, config=Config(), keys=keys, scratch=home.staging)
    assert records.select("owner", "text").rows() == [("target", "measured"), ("target", "too")]
    deliver("ada/a.jsonl", [{"text": "measured"}, {"text": "mine"}])
    result = take_in(target_fingerprints=set(records["fingerprint"]))
    assert reasons(result) == [("ada/a.jsonl", 0, "in_target")]


def test_a_target_file_is_all_or_nothing(home, keys):
    """A row that cannot be used is an error that names the row, not a smaller target."""
    path = home.path / "target.jsonl"
    with pytest.raises(TargetError, match="does not exist"):
        read_target(path, config=Config(), keys=keys, scratch=home.staging)
    path.write_bytes(b'{"text":"a"}\n{"text":""}\n')
    with pytest.raises(TargetError, match=r"row 1 cannot be used: empty"):
        read_target(path, config=Config(), keys=keys, scratch=home.staging)
    path.write_bytes(b"")
    with pytest.raises(TargetError, match="empty"):
        read_target(path, config=Config(), keys=keys, scratch=home.staging)


def test_erased_and_withdrawn_contents_do_not_come_back(deliver, take_in, home, keys):
    """The canonical content counts, so another line end does not help."""
    store = SuppressionList(home.suppression_path, keys)
    gone, mine = (fingerprint(keys.k_fp, canonical_bytes(text)) for text in ("gone\n", "mine"))
    store.add_erased([gone])
    store.add_withdrawn("ada", [mine])
    for owner in ("ada", "bob"):
        deliver(f"{owner}/a.jsonl", [{"text": "gone\r\n"}, {"text": "mine"}, {"text": "new"}])
    result = take_in()
    assert reasons(result) == [
        ("ada/a.jsonl", 0, "erased"),
        ("ada/a.jsonl", 1, "withdrawn"),
        ("bob/a.jsonl", 0, "erased"),
    ]
    assert result.counts == Counts(6, 3, 0, 3, 0)


def test_licences_come_from_the_row_then_the_owner_then_the_house(deliver, take_in):
    """And with no default at all, a record without licence is refused."""
    rows = [
        {"text": "stated", "licence": "CC-BY-4.0"},
        {"text": "american", "license": "CC0-1.0"},
        {"text": "none"},
    ]
    for owner in ("ada", "bob"):
        deliver(f"{owner}/a.jsonl", rows)
    owners = {"ada": OwnerConfig(licence="CC-BY-3.0")}
    result = take_in(Config(owners=owners))
    assert result.records["licence"].to_list() == [
        *("CC-BY-4.0", "CC0-1.0", "CC-BY-3.0"),
        *("CC-BY-4.0", "CC0-1.0", "LicenseRef-delivery"),
    ]
    strict = take_in(Config(owners=owners, intake=IntakeConfig(text_licence="")))
    assert reasons(strict) == [("bob/a.jsonl", 2, "unknown_licence")]
    assert "intake.text_licence" in strict.quarantine["detail"][0]


def test_personal_is_the_row_s_word_or_the_owner_s(deliver, take_in):
    """A personal owner cannot deliver a record that is not personal."""
    rows = [{"text": "p", "personal": True}, {"text": "n", "personal": False}, {"text": "u"}]
    deliver("ada/a.jsonl", rows)
    deliver("registry/a.jsonl", rows)
    config = Config(intake=IntakeConfig(personal_owners=("registry",)))
    assert take_in(config).records["personal"].to_list() == [True, False, False, True, True, True]


def test_no_word_of_a_refused_row_is_in_a_table_or_message(deliver, take_in):
    """A marked text in every kind of refusal is found in none of the results, in no form."""
    lines = [
        SECRET,
        json.dumps([SECRET]),
        json.dumps({"text": SECRET, "licence": SECRET}),
        json.dumps({"text": SECRET, "date": SECRET}),
        json.dumps({"text": SECRET, "position": SECRET}),
        json.dumps({"text": SECRET, "personal": SECRET}),
        json.dumps({"text": SECRET, "consent_train": False}),
        json.dumps({SECRET: 1}),
        json.dumps({"text": SECRET}),
        json.dumps({"text": SECRET, "source": "again"}),
        f'{{"{SECRET}":1,"{SECRET}":2}}',
    ]
    deliver("ada/a.jsonl", "\n".join(lines))
    deliver("ada/b.csv", f"text,{SECRET}\n{SECRET}\n")
    deliver("ada/c.parquet", SECRET)
    deliver("ada/d.txt", SECRET.encode() + b"\xff")
    deliver("ada/e.txt.gz", SECRET)
    result = take_in()
    shown = "".join(str(frame.rows()) for frame in (result.quarantine, result.duplicates))
    shown += repr(result.counts) + repr(result.files)
    assert result.counts == Counts(15, 1, 0, 13, 1)
    for word in ("Zaphod", "424242", "phone"):
        assert word not in shown


def test_an_inbox_that_is_missing_or_empty_says_what_to_do(home, take_in):
    """Both are errors, not an empty corpus; an owner's empty folder is still empty."""
    with pytest.raises(IntakeError, match="put files in inbox/OWNER/"):
        take_in()
    (home.inbox / "ada").mkdir()
    with pytest.raises(IntakeError, match="is empty"):
        take_in()
    (home.inbox / "ada").rmdir()
    home.inbox.rmdir()
    with pytest.raises(IntakeError, match="make it"):
        take_in()


def test_reading_the_same_inbox_again_gives_the_same_result(deliver, take_in):
    """Frames, counts and digests are equal; a compressed copy of a file has the same records."""
    rows = [{"text": f"t{number}"} for number in range(50)]
    path = deliver("ada/a.jsonl", rows)
    first, second = take_in(), take_in()
    assert first.records.equals(second.records)
    assert first.files == second.files
    path.unlink()
    deliver("ada/a.jsonl.gz", gzip.compress(jsonl(rows)))
    assert take_in().records.equals(first.records)


file_names = st.sampled_from(["a", "b", "no owner", "c.x"])
row_values = st.fixed_dictionaries(
    {},
    optional={
        "text": st.sampled_from(["x", "y", "z", "", " ", "é", "e\u0301"]) | st.none(),
        "position": st.integers(-1, 2),
        "source": st.sampled_from(["s", "t"]),
        "date": st.sampled_from(["1999-01-01", "2001-01-01", "bad"]),
        "consent_train": st.booleans(),
        "licence": st.sampled_from(["CC0-1.0", "GPL-3.0-only"]),
    },
)
inboxes = st.dictionaries(
    st.tuples(file_names, st.sampled_from(["f.jsonl", "g.jsonl", "h.exe"])),
    st.lists(row_values, max_size=8),
    min_size=1,
    max_size=6,
)


@given(inboxes)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_counts_add_up_for_any_inbox(tmp_path_factory, inbox):
    """The sum law; accepted contents are unique per owner, and disjoint from what is held out."""
    from pipelines.storage.intake import read_deliveries

    folder = tmp_path_factory.mktemp("inbox")
    num_rows = 0
    for (owner, name), rows in inbox.items():
        (folder / owner).mkdir(exist_ok=True)
        (folder / owner / name).write_bytes(jsonl(rows))
        num_rows += len(rows) if name != "h.exe" and owner != "no owner" and rows else 1
    keys = CorpusKeys.demo()
    result = read_deliveries(
        folder,
        config=Config(target=TargetConfig(since="2000-01-01")),
        keys=keys,
        suppression=SuppressionList(folder / ".none", keys),
        scratch=folder,
    )
    counts = result.counts
    assert counts.received == num_rows
    assert num_rows == counts.accepted + counts.held_out + counts.quarantined + counts.duplicates
    assert counts.quarantined == result.quarantine.height
    assert result.records.select("owner", "fingerprint").is_unique().all()
    assert result.records.select("owner", "source", "position").is_unique().all()
    assert result.records["record_id"].is_unique().all()
    assert not set(result.records["fingerprint"]) & set(result.held_out["fingerprint"])
    assert jcs([file.digest for file in result.files])
