"""Claims about token folders: what was written is read, and what was changed is refused."""

import hmac
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
from trainer_corpus import END, VOCAB, documents, record_id, write_corpus

from trainer.data import TokenStore, write_tokens
from trainer.errors import DataError
from trainer.spec import MixtureSpec
from trainer.tokens import SHARD_LEAVES


def _write(folder, records, **fields):
    given = {
        "corpus_version": "v",
        "tokenizer_digest": "t",
        "vocab_size": VOCAB,
        "end_of_text": END,
    } | fields
    return write_tokens(folder, records=records, **given)


def _ok(index, tokens=(1, END)):
    return (index, record_id(index), "a", list(tokens))


def test_every_record_is_read_as_it_was_written(tmp_path):
    """Tokens, ids, owners, lengths and tombstones come back, across a shard border."""
    count = SHARD_LEAVES + 5
    docs = documents(count, longest=6)
    dead = {0, 9, SHARD_LEAVES - 1, SHARD_LEAVES}
    records = [
        (i, None, None, []) if i in dead else (i, record_id(i), f"o{i % 4}", np.array(docs[i]))
        for i in range(count)
    ]
    digest = _write(tmp_path, iter(records), subtree_roots=[b"\1" * 32, "ab" * 32])
    store = TokenStore.open(tmp_path, digest)
    assert store.size == count
    assert set(range(count)) - set(store.live_N.tolist()) == dead
    assert store.subtree_roots == ["01" * 32, "ab" * 32]
    assert store.owners == ("o0", "o1", "o2", "o3")
    for i, (_, name, owner, tokens) in enumerate(records):
        assert store.tokens(i).tolist() == list(tokens)
        assert store.tokens(i).dtype == np.uint32
        assert store.record_id(i) == (name or bytes(32))
        assert store.owner_of(i) == owner
        assert store.lengths_N[i] == len(tokens)
        assert store.owner_codes_N[i] == (-1 if owner is None else store.owners.index(owner))
    offsets, flat = store.csr()
    assert flat[offsets[7] : offsets[8]].tolist() == docs[7]
    assert offsets[-1] == len(flat) == store.lengths_N.sum()


def test_owners_have_pseudonyms_under_the_folders_key(tmp_path):
    """HMAC of the id, by hand; one owner has one name in every folder of a key; without a key names are ids; a mixture may use either, not both."""
    key = b"k" * 32
    records = [(i, record_id(i), owner, [END]) for i, owner in enumerate(("ann", "bob"))]
    folders = {"one": (records, key), "two": ([*records, _ok(2)], key), "open": (records, None)}
    stores = {}
    for name, (rows, owner_key) in folders.items():
        _write(tmp_path / name, rows, owner_key=owner_key)
        stores[name] = TokenStore.open(tmp_path / name)
    ann = hmac.new(key, b"ann", "sha256").hexdigest()
    assert stores["one"].pseudonym("ann") == stores["two"].pseudonym("ann") == ann
    assert stores["open"].pseudonym("ann") == "ann"
    for name in ("ann", ann):
        assert stores["one"].repeats(MixtureSpec(repeats={name: 3})) == {"ann": 3, "bob": 1}
    assert stores["open"].repeats(MixtureSpec(repeats={"bob": 0})) == {"ann": 1, "bob": 0}
    with pytest.raises(DataError, match="no owner"):
        stores["open"].repeats(MixtureSpec(repeats={ann: 3}))
    with pytest.raises(DataError, match="every owner once"):
        stores["one"].repeats(MixtureSpec(repeats={"ann": 3, ann: 3}))


def test_the_digest_is_pinned(tmp_path):
    """Golden vector: the same records give the same tokens.json on every machine and Arrow version."""
    assert (
        write_corpus(tmp_path) == "224ae8cf807d29f818dea5136ffb0efefee81d88e4b4b5cbcbcc9efecd673b10"
    )


def test_every_flipped_bit_of_a_shard_is_refused_or_harmless(tmp_path):
    """Attack: one bit anywhere in the Arrow file gives DataError, or the very same logical content (padding)."""
    digest = write_corpus(tmp_path / "good", count=12, longest=8)
    good = TokenStore.open(tmp_path / "good", digest)
    content = [
        (good.tokens(i).tolist(), good.record_id(i), good.owner_of(i)) for i in range(good.size)
    ]
    shard = tmp_path / "bad" / "shard-00000.arrow"
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    data = shard.read_bytes()
    refused = 0
    for position in range(0, len(data), 3):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        shard.write_bytes(changed)
        try:
            store = TokenStore.open(tmp_path / "bad", digest)
        except DataError:
            refused += 1
            continue
        assert content == [
            (store.tokens(i).tolist(), store.record_id(i), store.owner_of(i))
            for i in range(store.size)
        ]
    assert refused > len(data) / 3 * 0.3  # the rest is Arrow's padding and unused fields


@pytest.mark.parametrize("column", ["tokens", "record_id", "owner"])
def test_a_changed_column_is_refused(tmp_path, column):
    """Attack: a well-formed shard with one changed token, id or owner does not have the committed digest."""
    digest = write_corpus(tmp_path, count=12)
    path = tmp_path / "shard-00000.arrow"
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    rows = table.to_pylist()
    other = {"tokens": [1, END], "record_id": bytes(range(32)), "owner": "mallory"}
    rows[5][column] = other[column]
    forged = pa.Table.from_pylist(rows, schema=table.schema)
    del table
    path.unlink()
    with pa.ipc.new_file(str(path), forged.schema) as writer:
        writer.write_table(forged)
    with pytest.raises(DataError, match="changed"):
        TokenStore.open(tmp_path, digest)


def test_swapped_records_are_refused(tmp_path):
    """Attack: the same records in another order are not the same shard."""
    write_corpus(tmp_path, count=12)
    path = tmp_path / "shard-00000.arrow"
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    forged = pa.Table.from_pylist(table.to_pylist()[::-1], schema=table.schema)
    del table
    path.unlink()
    with pa.ipc.new_file(str(path), forged.schema) as writer:
        writer.write_table(forged)
    with pytest.raises(DataError, match="in order"):
        TokenStore.open(tmp_path)


def test_another_manifest_is_refused(tmp_path):
    """tokens.json with another digest, format, field or shard size, or no tokens.json: DataError."""
    digest = write_corpus(tmp_path, count=12)
    with pytest.raises(DataError, match="expected digest"):
        TokenStore.open(tmp_path, "0" * 64)
    path = tmp_path / "tokens.json"
    good = json.loads(path.read_bytes())
    for change in ({"format": 2}, {"extra": 1}, {"shard_leaves": 8}, {"live": 1}, {"size": 11}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(DataError):
            TokenStore.open(tmp_path)
        with pytest.raises(DataError, match=r"tokens\.json"):
            TokenStore.open(tmp_path, digest)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([_ok(1)], "expected index 0"),
        ([_ok(0), _ok(2)], "expected index 1"),
        ([(0, record_id(0), "a", [1])], "end-of-text"),
        ([(0, record_id(0), "a", [])], "end-of-text"),
        ([(0, record_id(0), "", [END])], "owner"),
        ([(0, b"short", "a", [END])], "32 bytes"),
        ([(0, bytes(32), "a", [END])], "32 bytes"),
        ([(0, None, None, [END])], "tombstone"),
        ([(0, record_id(0), "a", [VOCAB, END])], "token ids"),
        ([(0, record_id(0), "a", [-1, END])], "token ids"),
    ],
)
def test_the_writer_refuses_what_no_reader_should_see(tmp_path, records, message):
    """Gaps, documents without end, ids out of range and half tombstones never reach a file."""
    with pytest.raises(DataError, match=message):
        _write(tmp_path, records)


def test_the_number_of_subtree_roots_is_checked(tmp_path):
    """One root per shard, neither fewer nor more."""
    for roots in ([], ["00" * 32] * 2):
        with pytest.raises(DataError, match="one per shard"):
            _write(tmp_path, [_ok(0)], subtree_roots=roots)
    with pytest.raises(DataError, match="end_of_text"):
        _write(tmp_path, [_ok(0)], end_of_text=VOCAB)


def test_an_index_outside_the_store_is_refused(tmp_path):
    """No negative indexing, no reading past the end."""
    store = TokenStore.open(tmp_path, write_corpus(tmp_path, count=12))
    for index in (-1, 12):
        for read in (store.tokens, store.record_id, store.owner_of):
            with pytest.raises(DataError, match="index"):
                read(index)


def test_reading_tokens_needs_neither_torch_nor_pandas(tmp_path):
    """A process that only writes and reads token folders imports no torch; opening one imports no pandas."""
    import subprocess
    import sys

    write_corpus(tmp_path, count=12)
    code = (
        "import sys, pathlib; from trainer.data import TokenStore, BatchPlan; "
        "BatchPlan(TokenStore.open(pathlib.Path(sys.argv[1])), 0).batch(0); "
        "print([m for m in ('torch', 'pandas', 'polars') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
