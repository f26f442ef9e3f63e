"""The target: split once, disjoint from the corpus, confirmed once."""

import threading

import pytest

from pipelines.storage.config import Config, TargetConfig
from pipelines.storage.errors import TargetError
from pipelines.storage.target import (
    CONFIRM,
    TEST,
    VALUE,
    load_target,
    open_confirm,
    split_target,
)
from pipelines.storage.tokens import train_tokenizer
from trainer.data import TokenStore

PLAN = "a" * 64


@pytest.fixture
def tokenizer(home):
    """A tokenizer of bytes and few merges."""
    return train_tokenizer(["some text, some more text"], 300, home.tokenizer_path)


@pytest.fixture
def taken(deliver, take_in):
    """Ten accepted records, 41 held out, one of them delivered by two owners."""
    rows = [{"text": f"old {number}", "date": "1990-01-01"} for number in range(10)]
    held = [{"text": f"new {number}", "date": "2020-01-01"} for number in range(40)]
    deliver("ada/a.jsonl", [*rows, *held])
    deliver("bob/b.jsonl", held[:1])
    return take_in(Config(target=TargetConfig(since="2000-01-01")))


def decoded(home, tokenizer, target, part):
    store = TokenStore.open(home.target / part, target.token_digests[part])
    return {
        store.record_id(index): tokenizer.decode(store.tokens(index))
        for index in store.live_N.tolist()
    }


def test_the_parts_are_half_a_quarter_and_a_quarter(home, keys, tokenizer, taken):
    """Every different content stands in exactly one part, and the parts join to the target."""
    target = split_target(home, keys, taken.held_out, tokenizer, taken.records["fingerprint"])
    assert target.num_records == {VALUE: 20, TEST: 10, CONFIRM: 10}
    value, test = (decoded(home, tokenizer, target, part) for part in (VALUE, TEST))
    confirm = open_confirm(home, keys, PLAN)
    joined = [*value.values(), *test.values(), *confirm["text"]]
    assert sorted(joined) == sorted({f"new {number}" for number in range(40)})
    assert set(value) | set(test) | set(confirm["record_id"]) <= set(taken.held_out["record_id"])
    assert target.fingerprints == set(taken.held_out["fingerprint"])


def test_the_split_is_made_once(home, keys, tokenizer, taken):
    """More held-out records later change nothing; another tokenizer is refused."""
    target = split_target(home, keys, taken.held_out[:8], tokenizer, [])
    assert split_target(home, keys, taken.held_out, tokenizer, []) == target == load_target(home)
    other = train_tokenizer(["other"], 280, home.path / "other.json")
    with pytest.raises(TargetError, match="another tokenizer"):
        split_target(home, keys, taken.held_out, other, [])


def test_the_split_does_not_depend_on_the_order_of_the_records(home, keys, tokenizer, taken):
    """By digest, not by place: nobody can aim a record at a part."""
    target = split_target(home, keys, taken.held_out, tokenizer, [])
    again = type(home)(home.path / "again").create()
    reverse = split_target(again, keys, taken.held_out.reverse(), tokenizer, [])
    assert reverse.num_records == target.num_records
    for part in (VALUE, TEST):
        assert set(decoded(again, tokenizer, reverse, part).values()) == set(
            decoded(home, tokenizer, target, part).values()
        )


def test_a_target_that_is_in_the_corpus_is_refused_each_time(home, keys, tokenizer, taken):
    """Also when the corpus grew into it after the split."""
    split_target(home, keys, taken.held_out, tokenizer, taken.records["fingerprint"])
    grown = [*taken.records["fingerprint"], *taken.held_out["fingerprint"][:2]]
    with pytest.raises(TargetError, match="2 contents of the target are in the corpus too"):
        split_target(home, keys, taken.held_out, tokenizer, grown)


def test_a_target_that_is_too_small_says_what_to_do(home, keys, tokenizer, taken):
    """Three different contents cannot fill three parts sensibly."""
    with pytest.raises(TargetError, match="3 different contents, at least 4"):
        split_target(home, keys, taken.held_out[:3], tokenizer, [])
    with pytest.raises(TargetError, match="columns of a record"):
        split_target(home, keys, taken.held_out.drop("text"), tokenizer, [])
    with pytest.raises(TargetError, match="not split yet"):
        load_target(home)
    with pytest.raises(TargetError, match="not split yet"):
        open_confirm(home, keys, PLAN)


def test_the_confirmation_opens_once_per_plan(home, keys, tokenizer, taken):
    """A second opening for the same plan is refused, another plan opens it again."""
    split_target(home, keys, taken.held_out, tokenizer, [])
    assert open_confirm(home, keys, PLAN).height == 10
    with pytest.raises(TargetError, match=r"opened for plan aaaaaaaaaaaa already"):
        open_confirm(home, keys, PLAN)
    assert open_confirm(home, keys, "b" * 64).height == 10
    for bad in ("", "../x", "A" * 64, "a" * 63):
        with pytest.raises(TargetError, match="64 lower-case"):
            open_confirm(home, keys, bad)


def test_of_two_openings_at_once_one_is_refused(home, keys, tokenizer, taken):
    """A race of eight threads has one winner."""
    split_target(home, keys, taken.held_out, tokenizer, [])
    results = []

    def work():
        try:
            results.append(open_confirm(home, keys, PLAN).height)
        except TargetError:
            results.append("refused")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["10", *["refused"] * 7]


def test_the_confirmation_is_sealed(home, keys, tokenizer, taken):
    """No text of it is in any file of the home, mode 0600, and a changed byte is found."""
    split_target(home, keys, taken.held_out, tokenizer, [])
    texts = open_confirm(home, keys, PLAN)["text"].to_list()
    path = home.target / "target_confirm.sealed"
    assert path.stat().st_mode & 0o777 == 0o600
    for file in home.target.rglob("*"):
        if file.is_file():
            assert not any(text.encode() in file.read_bytes() for text in texts)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TargetError, match="changed bytes"):
        open_confirm(home, keys, "c" * 64)
    assert not (home.target / "openings" / ("c" * 64)).exists()


def test_a_damaged_or_newer_target_file_is_refused(home, keys, tokenizer, taken):
    """Not guessed at, and not silently split again."""
    split_target(home, keys, taken.held_out, tokenizer, [])
    path = home.target / "target.json"
    for data in (b"{", path.read_bytes().replace(b'"format":1', b'"format":2')):
        path.write_bytes(data)
        with pytest.raises(TargetError):
            split_target(home, keys, taken.held_out, tokenizer, [])
