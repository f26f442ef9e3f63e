"""Claims about what a run starts from: tokens of another corpus, tokenizer or shard are refused before a step."""

import dataclasses
import hashlib

import pytest
from trainer_corpus import END, VOCAB, make_run, record_id

from provenance.merkle import MerkleTree
from trainer.errors import DataError
from trainer.inputs import open_store
from trainer.loop import fit
from trainer.spec import no_versions, save_run
from trainer.tokens import SHARD_LEAVES, write_tokens

SIZE = 2 * SHARD_LEAVES + 57


def _leaves(size=SIZE):
    return [hashlib.sha256(f"leaf {i}".encode()).digest() for i in range(size)]


def _write(home, roots, size=SIZE):
    """A token folder of one short document per record, with the given roots of its shards."""
    records = ((i, record_id(i), "a", [i % END, END]) for i in range(size))
    return write_tokens(
        home / "tokens", corpus_version="none", tokenizer_digest="00" * 32, vocab_size=VOCAB, end_of_text=END,
        records=records, subtree_roots=roots,
    )  # fmt: skip


def _roots(tree):
    return [
        tree.subtree_root(first, min(SHARD_LEAVES, tree.size - first))
        for first in range(0, tree.size, SHARD_LEAVES)
    ]


@pytest.mark.parametrize("size", [57, SHARD_LEAVES, SHARD_LEAVES + 1, SIZE])
def test_roots_of_shards_add_up_to_the_root_of_the_records(tmp_path, size):
    """Oracle: the tree over all leaves, for one short shard, a full one, and shards with a short last one."""
    tree = MerkleTree(_leaves(size))
    _write(tmp_path, _roots(tree), size)
    run = make_run(tmp_path, corpus_root=tree.root().hex())
    assert open_store(run, tmp_path / "r").corpus_root() == tree.root().hex()


def test_a_shard_with_a_wrong_root_is_refused_before_a_step(tmp_path):
    """Attack: one root forged, two swapped, one leaf changed, none given; the digest of tokens.json fits each time."""
    tree = MerkleTree(_leaves())
    right = _roots(tree)
    changed = _leaves()
    changed[5000] = bytes(32)
    attacks = {
        "forged": [right[0], bytes(32), right[2]],
        "swapped": [right[1], right[0], right[2]],
        "changed leaf": _roots(MerkleTree(changed)),
        "none": None,
    }
    for name, roots in attacks.items():
        home = tmp_path / name
        _write(home, roots)
        run = make_run(home, corpus_root=tree.root().hex())
        save_run(run, home / "r")
        with pytest.raises(DataError, match=f"add up to corpus root {tree.root().hex()}, got"):
            fit(run, home / "r")
        assert [path.name for path in (home / "r").iterdir()] == ["run.json"]
    _write(tmp_path / "text", [*right[:2], "0" * 63])
    with pytest.raises(DataError, match="shard 2: expected a subtree root"):
        open_store(make_run(tmp_path / "text", corpus_root="1" * 64), tmp_path)


def test_without_a_committed_root_the_roots_are_not_read(tmp_path):
    """A run that names no corpus root takes the tokens by their digest alone, as token sets outside a corpus must."""
    _write(tmp_path, None, 57)
    assert open_store(make_run(tmp_path), tmp_path / "r").corpus_root() == "none"


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    """The tokenizer of the run's versions must be that of the tokens; "none" on either side leaves it open."""
    _write(tmp_path, None, 57)
    run = make_run(tmp_path)
    other = dataclasses.replace(run, versions=no_versions(tokenizer="11" * 32))
    with pytest.raises(DataError, match=f"expected tokenizer {'11' * 32}, got {'00' * 32}"):
        open_store(other, tmp_path / "r")
    open_store(dataclasses.replace(run, versions=no_versions()), tmp_path / "r")
