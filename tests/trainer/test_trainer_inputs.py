"""Claims about what a run starts from: tokens of another corpus, tokenizer or shard are refused before a step."""

import dataclasses
import hashlib

import pytest
import torch
from trainer_corpus import END, VOCAB, make_run, record_id

from provenance.merkle import MerkleTree
from trainer.checkpoint import read_tensors, verify
from trainer.convert import export_model, import_model, imported_root
from trainer.errors import AlteredCheckpointError, DataError, OtherModelError
from trainer.inputs import initial_model, open_store
from trainer.loop import fit
from trainer.model import Transformer, init_parameters
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


def test_a_float64_run_goes_on_with_every_digit(tmp_path):
    """The weights of a float64 checkpoint start a float64 run unrounded, and a float32 run rounded once."""
    config = dataclasses.replace(make_run(tmp_path).config, precision="float64")
    run = make_run(tmp_path, "first", steps=2, every=2)
    run = dataclasses.replace(run, config=dataclasses.replace(config, checkpoint_every=2))
    save_run(run, tmp_path / run.run)
    assert fit(run, tmp_path / run.run) == 0
    saved = dict(read_tensors(tmp_path / "first" / "step-2"))
    root = verify(tmp_path / "first" / "step-2").root
    (tmp_path / "second").mkdir()
    follower = dataclasses.replace(run, run="second", init="../first/step-2", init_root=root)
    for precision, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        changed = dataclasses.replace(config, precision=precision)
        model = initial_model(dataclasses.replace(follower, config=changed), tmp_path / "second")
        for name, weight in model.named_parameters():
            assert torch.equal(weight, saved[f"model.{name}"].to(dtype)), name
    rounded = [t for n, t in saved.items() if n.startswith("model.") and (t != t.float()).any()]
    assert rounded, "the checkpoint has no digit that float32 would lose: the test shows nothing"


def test_a_run_starts_from_a_model_in_llama_format(tmp_path):
    """Imported weights are named by their root, trained on, and refused when other, or of another shape."""
    run = make_run(tmp_path, "r", steps=1)
    model = Transformer(run.config.model)
    init_parameters(model, 5)
    export_model(model, tmp_path / "llama")
    (tmp_path / "r").mkdir()
    root = imported_root(import_model(tmp_path / "llama"))
    run = dataclasses.replace(run, init="../llama", init_root=root)
    found = initial_model(run, tmp_path / "r").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())
    save_run(run, tmp_path / "r")
    assert fit(run, tmp_path / "r") == 0
    with pytest.raises(AlteredCheckpointError, match="expected root 0000"):
        initial_model(dataclasses.replace(run, init_root="00" * 32), tmp_path / "r")
    narrow = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, dim=16))
    with pytest.raises(OtherModelError, match="another model"):
        initial_model(dataclasses.replace(run, config=narrow), tmp_path / "r")
