"""Tokenizer and token folders."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from pipelines.storage import demo
from pipelines.storage.config import Config
from pipelines.storage.errors import TokenizerError
from pipelines.storage.records import paragraphs
from pipelines.storage.tokens import (
    END_OF_TEXT,
    check_tokens,
    load_tokenizer,
    train_tokenizer,
    training_texts,
    write_version_tokens,
)
from pipelines.storage.versions import Versions
from provenance.merkle import MerkleTree
from trainer.data import TokenStore
from trainer.errors import DataError

STRANGE = [
    "",
    " ",
    "\n\n\r\n\t  x",
    "don't WE'LL I'd 'tis",
    "In 1789 there were 13 states, 3.14159 and ٣٤٥ and Ⅷ ½ ²",
    "ünïcødé e\u0301 ﬁ ǅ ß",
    "漢字とかな交じり文。한국어 조사",
    "😀👩‍👩‍👧‍👦🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "العربية עברית ไทย देवनागरी",
    "\u0000\u0001\u007f\u0080\ufeff\uffff\U0010ffff",
    "a\u200bb\u200dc\u2028d\u2029e\u00a0f\u3000g",
    "<|endoftext|> <|end of text|> <|endoftext|",
    "x" * 5000,
    " " * 5000,
    "\n" * 5000,
    "1" * 500,
    "!?" * 500 + "\r\n",
]


@pytest.fixture(scope="module")
def corpus():
    """Paragraphs of twelve speeches."""
    texts = []
    for number, speech in enumerate(demo.speeches()):
        if number % 21 == 0:
            texts += paragraphs(speech.text)
    return texts


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A tokenizer of 1,024 ids and its file."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(corpus, 1024, path), path


def reference(path):
    """The `tokenizers` library's own encoder, without the special token, which texts must not spell."""
    document = json.loads(path.read_text())
    document["added_tokens"] = []
    return Reference.from_str(json.dumps(document))


def test_ids_are_those_of_the_tokenizers_library(trained, corpus):
    """Encoding by tiktoken over our ranks and by `tokenizers` over the file: same ids for every paragraph and strange text."""
    tokenizer, path = trained
    other = reference(path)
    texts = [*corpus, *STRANGE]
    assert len(corpus) > 300
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids == other.encode(text).ids, text[:40]


@given(text=st.text())
@settings(deadline=None, max_examples=300)
def test_any_text_round_trips_and_never_spells_end_of_text(trained, text):
    """Decoding gives the text back; every id is below the last one; both libraries agree."""
    tokenizer, path = trained
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.end_of_text for token in ids)
    assert ids == reference(path).encode(text).ids


def test_the_vocabulary_is_bytes_then_merges_then_end_of_text(trained):
    """Ids 0..255 are the bytes, the last id is end-of-text, the size is what was asked for."""
    tokenizer, path = trained
    assert tokenizer.vocab_size == 1024
    assert tokenizer.end_of_text == 1023
    singles = {tokenizer.encoding.decode_bytes([token]) for token in range(256)}
    assert singles == {bytes([byte]) for byte in range(256)}
    assert reference(path).token_to_id(END_OF_TEXT) is None
    assert tokenizer.decode([*tokenizer.encode(["ab"])[0], tokenizer.end_of_text]) == "ab"


def test_digits_stand_alone(trained):
    """No token but single digits contains a digit: numbers are spelled, never memorised as one token."""
    tokenizer, _ = trained
    for token in range(tokenizer.end_of_text):
        piece = tokenizer.encoding.decode_bytes([token])
        assert len(piece) == 1 or not any(byte in b"0123456789" for byte in piece)
    (ids,) = tokenizer.encode(["483920"])
    assert [tokenizer.decode([token]) for token in ids] == list("483920")


def test_training_is_deterministic_in_any_order(trained, corpus, tmp_path):
    """The same texts in reverse give the same file, to the byte."""
    tokenizer, path = trained
    again = train_tokenizer(corpus[::-1], 1024, tmp_path / "t.json")
    assert again.digest == tokenizer.digest
    assert (tmp_path / "t.json").read_bytes() == path.read_bytes()


def test_a_tokenizer_is_frozen(trained, corpus):
    """Training the same again is allowed, another one in its place is not."""
    tokenizer, path = trained
    assert train_tokenizer(corpus, 1024, path).digest == tokenizer.digest
    with pytest.raises(TokenizerError, match="frozen"):
        train_tokenizer(corpus, 300, path)
    assert load_tokenizer(path, tokenizer.digest).digest == tokenizer.digest


def test_wrong_tokenizers_are_refused(trained, tmp_path):
    """Missing, of another digest, of another kind, too small, of no text."""
    tokenizer, path = trained
    with pytest.raises(TokenizerError, match="train one first"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(TokenizerError, match="expected digest"):
        load_tokenizer(path, "0" * 64)
    with pytest.raises(TokenizerError, match="at least 258"):
        train_tokenizer(["a"], 257, tmp_path / "t.json")
    with pytest.raises(TokenizerError, match="all records are personal"):
        train_tokenizer([], 300, tmp_path / "t.json")
    document = json.loads(path.read_text())
    for change in (
        {"added_tokens": []},
        {"pre_tokenizer": {"pretokenizers": [{"pattern": {"Regex": "."}}, {"type": "ByteLevel"}]}},
        {"model": {"vocab": {"a": 0}}},
        {"model": {"vocab": document["model"]["vocab"] | {"zzz": 0}}},
    ):
        (tmp_path / "t.json").write_text(json.dumps(document | change))
        with pytest.raises(TokenizerError, match="not a tokenizer of this program"):
            load_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "t.json")
    assert tokenizer.vocab_size == 1024


def test_a_small_corpus_gives_a_small_vocabulary(tmp_path):
    """Fewer merges than asked for: end-of-text is still the last id."""
    tokenizer = train_tokenizer(["ab ab ab"], 2048, tmp_path / "t.json")
    assert 256 < tokenizer.vocab_size < 300
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1


@pytest.fixture
def published(home, keys, deliver, take_in):
    """A version with personal records, a tombstone in the middle and one at the end."""
    deliver("ada/a.jsonl", [{"text": f"Text number {number}."} for number in range(6)])
    deliver("reg/p.jsonl", [{"text": "Zyzzyva Q. is 424242.", "personal": True}, {"text": "é 漢"}])
    versions = Versions(home, keys)
    first = versions.publish(take_in(Config()).records)
    ids = versions.read(first)["record_id"].to_list()
    head = versions.tombstone(first, [ids[2], ids[3], ids[7]])
    versions.move_head(head)
    return versions, first, head


def test_personal_texts_do_not_train_the_tokenizer(published):
    """The personal record is not among the training texts, and all others are."""
    versions, first, head = published
    assert list(training_texts(versions, first)) == [
        *(f"Text number {number}." for number in range(6)),
        "é 漢",
    ]
    assert len(list(training_texts(versions, head))) == 4


def test_a_token_folder_holds_every_record_and_no_tombstone(published, trained, home):
    """Lengths, owners, ids, text, end-of-text and the subtree root, read by the trainer's own reader."""
    versions, _, head = published
    tokenizer, _ = trained
    folder = home.tokens / head
    digest = write_version_tokens(versions, head, tokenizer, folder)
    store = TokenStore.open(folder, digest)
    rows = versions.read(head)
    assert store.size == 8
    assert store.live_N.tolist() == rows["index"].to_list() == [0, 1, 4, 5, 6]
    for row in rows.iter_rows(named=True):
        ids = store.tokens(row["index"])
        assert ids[-1] == tokenizer.end_of_text
        assert np.count_nonzero(ids == tokenizer.end_of_text) == 1
        assert tokenizer.decode(ids) == row["text"]
        assert store.record_id(row["index"]) == row["record_id"]
        assert store.owner_of(row["index"]) == row["owner"]
    assert store.subtree_roots == [versions.manifest(head).record_root]
    assert store.corpus_version == head
    assert store.tokenizer_digest == tokenizer.digest
    assert check_tokens(versions, head, tokenizer, folder, digest) == store.lengths_N.sum()
    assert write_version_tokens(versions, head, tokenizer, folder) == digest


def test_subtree_roots_are_those_of_the_record_tree(home, keys, deliver, take_in, trained):
    """More than one shard: each root is the aligned subtree of 4,096 leaves."""
    deliver("ada/a.jsonl", [{"text": str(number)} for number in range(5000)])
    versions = Versions(home, keys)
    version = versions.publish(take_in().records)
    digest = write_version_tokens(versions, version, trained[0], home.tokens / version)
    store = TokenStore.open(home.tokens / version, digest)
    tree = MerkleTree(versions.leaves(version))
    assert store.subtree_roots == [
        tree.subtree_root(0, 4096).hex(),
        tree.subtree_root(4096, 904).hex(),
    ]
    assert len(store.live_N) == 5000


def test_tokens_that_do_not_stand_for_the_text_are_found(
    published, trained, home, corpus, tmp_path
):
    """Tokens of another version, of another tokenizer, of a changed folder."""
    versions, first, head = published
    tokenizer, _ = trained
    folder = home.tokens / head
    digest = write_version_tokens(versions, head, tokenizer, folder)
    with pytest.raises(TokenizerError, match="another corpus version"):
        check_tokens(versions, first, tokenizer, folder, digest)
    other = train_tokenizer(corpus, 300, tmp_path / "t.json")
    with pytest.raises(TokenizerError, match="another corpus version or tokenizer"):
        check_tokens(versions, head, other, folder, digest)
    with pytest.raises(DataError):
        check_tokens(versions, head, tokenizer, folder, "0" * 64)


def test_a_token_that_differs_is_found_at_its_index(published, trained, home):
    """A folder that is consistent in itself but holds another text: only decoding can tell."""
    from trainer.data import write_tokens

    versions, _, head = published
    tokenizer, _ = trained
    rows = {row["index"]: row for row in versions.read(head).iter_rows(named=True)}

    def records(change):
        for index in range(8):
            if index not in rows:
                yield index, None, None, ()
                continue
            row = rows[index]
            values = {
                "id": row["record_id"],
                "owner": row["owner"],
                "text": row["text"],
            } | change.get(index, {})
            yield (
                index,
                values["id"],
                values["owner"],
                [*tokenizer.encode([values["text"]])[0], tokenizer.end_of_text],
            )

    for index, change in (
        (4, {"text": "Text number 9."}),
        (5, {"owner": "eve"}),
        (6, {"id": bytes([7]) * 32}),
    ):
        digest = write_tokens(
            home.tokens / "x", corpus_version=head, tokenizer_digest=tokenizer.digest, vocab_size=1024,
            end_of_text=1023, records=records({index: change}), subtree_roots=["none"],
        )  # fmt: skip
        with pytest.raises(
            TokenizerError, match=f"index {index}: the tokens do not stand for the record"
        ):
            check_tokens(versions, head, tokenizer, home.tokens / "x", digest)
