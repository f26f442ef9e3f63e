"""Targets of further buyers: written once per content, never with what was erased or trained on, emptied by an erasure."""

import json

import pytest

from pipelines.storage.buyers import erase_from_buyers, load_buyer_target, write_buyer_target
from pipelines.storage.config import Config
from pipelines.storage.errors import TargetError
from pipelines.storage.intake import read_target
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.tokens import train_tokenizer

TEXTS = ("looms weave", "cloth is counted", "ships sail", "looms weave")


@pytest.fixture
def tokenizer(home):
    """A tokenizer of bytes and few merges."""
    return train_tokenizer(["some text, some more text"], 300, home.tokenizer_path)


@pytest.fixture
def held(home, keys, tmp_path):
    """Four rows of a buyer's file, two of them alike, as the graph reads them."""

    def read(texts=TEXTS):
        path = tmp_path / "buyer.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return read_target(path, config=Config(), keys=keys, scratch=home.staging)

    return read


def test_a_target_holds_every_content_once_and_is_written_once(home, keys, tokenizer, held):
    """The same file, in any order of its rows, is the same target; another text makes another."""
    made = write_buyer_target(home, keys, "acme", held(), tokenizer, ())
    assert made == load_buyer_target(home, "acme")
    assert made.num_records == 3
    written = (home.target / "buyers/acme/tokens.json").stat().st_mtime_ns
    assert write_buyer_target(home, keys, "acme", held(), tokenizer, ()) == made
    assert (home.target / "buyers/acme/tokens.json").stat().st_mtime_ns == written
    other = write_buyer_target(home, keys, "acme", held((*TEXTS, "more")), tokenizer, ())
    assert other.digest != made.digest
    assert other.num_records == 4


def test_what_is_trained_on_is_refused_each_time_also_when_it_came_later(home, keys, tokenizer, held):  # fmt: skip
    """A content of the corpus stops the run, whether the target or the delivery was there first."""
    records = held()
    write_buyer_target(home, keys, "acme", records, tokenizer, ())
    with pytest.raises(TargetError, match="1 contents of the target of buyer 'acme'"):
        write_buyer_target(home, keys, "acme", records, tokenizer, records["fingerprint"][:1])


def test_an_erased_content_leaves_every_target_and_does_not_come_back(home, keys, tokenizer, held):
    """By fingerprint or record id; the buyer's file may still hold it, the next target doesn't; others stay."""
    records = held()
    for name in ("acme", "zeta"):
        write_buyer_target(home, keys, name, records, tokenizer, ())
    write_buyer_target(home, keys, "other", held(("one text", "two texts")), tokenizer, ())
    gone = records["fingerprint"][0]
    SuppressionList(home.suppression_path, keys).add_erased([gone])
    assert erase_from_buyers(home, frozenset(), {gone}) == 2
    assert erase_from_buyers(home, frozenset(), {gone}) == 0
    assert load_buyer_target(home, "acme") is None
    assert not (home.target / "buyers/acme").exists()
    assert load_buyer_target(home, "other") is not None
    made = write_buyer_target(home, keys, "acme", records, tokenizer, ())
    assert gone not in made.fingerprints
    assert made.num_records == 2
    assert erase_from_buyers(home, {records["record_id"][1]}, frozenset()) == 1


def test_a_folder_of_a_killed_writer_is_removed_and_a_damaged_note_is_refused(home, keys, tokenizer, held):  # fmt: skip
    """Tokens without their note belong to nobody; a note in another form is no target."""
    write_buyer_target(home, keys, "acme", held(), tokenizer, ())
    note = home.target / "buyers/acme.json"
    text = note.read_text()
    for wrong in ("{", text.replace('"format":1', '"format":2')):
        note.write_text(wrong)
        with pytest.raises(TargetError):
            load_buyer_target(home, "acme")
    note.unlink()
    assert erase_from_buyers(home, frozenset(), frozenset()) == 1
    assert not (home.target / "buyers/acme").exists()


def test_one_record_is_no_target(home, keys, tokenizer, held):
    """An interval over one record has no width."""
    with pytest.raises(TargetError, match="at least 2"):
        write_buyer_target(home, keys, "acme", held(("alone",)), tokenizer, ())
