"""Claims about checkpoints: named by their numbers, whole or absent, and refused before anything is unpickled."""

import hashlib
import json
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_corpus import MODEL, make_run

from provenance.canonical import jcs
from trainer import index
from trainer.checkpoint import load_into, load_model, newest, read_tensors, verify
from trainer.errors import (
    AlteredCheckpointError,
    CheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    OtherModelError,
)
from trainer.loop import fit
from trainer.manifest import Manifest, sealed
from trainer.mesh import Mesh
from trainer.root import checkpoint_root, state_root, tensor_leaf
from trainer.saver import Saver
from trainer.spec import save_run


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A finished run of 6 steps with checkpoints at 2, 4, 6, of which two are kept."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("checkpoint")
    run = make_run(home, steps=6, every=2)
    save_run(run, home / "r")
    assert fit(run, home / "r") == 0
    return home


@pytest.fixture
def step(home, tmp_path):
    """A copy of the newest checkpoint, to be damaged."""
    return Path(shutil.copytree(home / "r" / "step-6", tmp_path / "step-6"))


def _state(folder):
    return dict(read_tensors(folder))


def test_the_root_is_its_definition():
    """Oracle: two tensors by hand, from the bytes up (RFC 9162 prefixes 0 and 1, names sorted, header length first)."""
    tensors = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor(3, dtype=torch.int64)}

    def leaf(header, body):
        header = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(b"\0" + struct.pack(">I", len(header)) + header + body).digest()

    a = leaf({"name": "a", "dtype": "int64", "shape": []}, struct.pack("<q", 3))
    b = leaf({"name": "b", "dtype": "float32", "shape": [1, 2]}, struct.pack("<2f", 1.0, -2.0))
    assert tensor_leaf("a", tensors["a"]) == a
    assert state_root(tensors) == hashlib.sha256(b"\1" + a + b).hexdigest()


@given(st.permutations(["a", "b", "c", "d", "e"]))
def test_the_root_does_not_depend_on_the_order(order):
    """Law: a mapping has one root, in whatever order it was filled, and whatever the strides of its tensors."""
    values = {name: torch.full((2, 3), float(ord(name))) + torch.arange(3) for name in "abcde"}
    assert state_root({name: values[name].t().contiguous().t() for name in order}) == state_root(
        values
    )


def test_the_root_sees_every_change():
    """One bit, a name, a type, a shape, a missing tensor: five other roots."""
    base = {"w": torch.zeros(2, 2), "x": torch.zeros(1)}
    bit = torch.zeros(2, 2)
    bit.view(torch.int32)[1, 1] = 1
    changes = [
        base | {"w": bit},
        {"w": base["w"], "y": base["x"]},
        base | {"w": torch.zeros(2, 2, dtype=torch.int32)},
        base | {"w": torch.zeros(4)},
        {"w": base["w"]},
    ]
    assert len({state_root(state) for state in [base, *changes]}) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_every_type_has_a_leaf(dtype):
    """Types that numpy lacks are hashed by their bytes."""
    assert len(tensor_leaf("w", torch.ones(3, dtype=dtype))) == 32


def test_the_manifest_names_the_state(home):
    """Manifest, result and a recomputation from the files agree on the root; weights and moments are all there."""
    found = newest(home / "r")
    assert found.name == "step-6"
    manifest = verify(found)
    result = json.loads((home / "r" / "result.json").read_bytes())
    assert manifest.root == checkpoint_root(found) == result["checkpoint_root"]
    assert (manifest.step, manifest.run, manifest.run_digest) == (6, "r", result["run_digest"])
    model = load_model(found, MODEL, manifest.root)
    names = [name for name, _ in model.named_parameters()]
    state = _state(found)
    moments = {f"optim.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")}
    assert set(state) == {f"model.{name}" for name in names} | moments | {"optim.step"}
    assert state["optim.step"] == 6
    assert all(torch.equal(state[f"model.{name}"], p) for name, p in model.named_parameters())
    assert not model.training


def test_the_newest_two_are_kept(home):
    """keep_last checkpoints stay, nothing unfinished is left."""
    assert sorted(path.name for path in (home / "r").glob("step-*")) == ["step-4", "step-6"]


def test_no_checkpoint_is_none(tmp_path):
    """An empty or missing folder, and unfinished or unmarked folders, hold no checkpoint; 10 is newer than 9."""
    assert newest(tmp_path / "missing") is None
    (tmp_path / "step-5.tmp").mkdir()
    (tmp_path / "step-7").mkdir()
    assert newest(tmp_path) is None
    for name in ("step-9", "step-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert newest(tmp_path).name == "step-10"


def _readers(folder):
    """Every way to read a checkpoint."""
    state = {name: torch.zeros(2) for name in ("a",)}
    return [
        lambda: verify(folder),
        lambda: load_model(folder, MODEL),
        lambda: checkpoint_root(folder),
        lambda: list(read_tensors(folder)),
        lambda: load_into(folder, state),
    ]


@pytest.fixture
def no_pickle(monkeypatch):
    """Fails the test if anything is unpickled or loaded."""

    def refuse(*_, **__):
        pytest.fail("something was unpickled before it was verified")

    monkeypatch.setattr(index._IndexUnpickler, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_file_is_refused_before_unpickling(step, no_pickle, name, damage):
    """Attack: one flipped byte, a cut, an empty or a missing file is refused by every reader, unread."""
    path = step / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes({"flip": data, "truncate": data[:-1], "empty": b""}[damage])
    for read in _readers(step):
        with pytest.raises(CheckpointError):
            read()


def test_an_extra_file_or_bad_manifest_is_refused(step, no_pickle):
    """Each has its own class: a smuggled file, a missing file, another format, other fields, a torn or no manifest."""
    (step / "extra.pt").write_bytes(b"x")
    with pytest.raises(AlteredCheckpointError, match="expected the files"):
        verify(step)
    (step / "extra.pt").unlink()
    good = json.loads((step / "manifest.json").read_bytes())
    for kind, bad in (
        (FormatVersionError, jcs(good | {"format": 1})),
        (FormatVersionError, jcs({"format": 3})),
        (AlteredCheckpointError, jcs(good | {"more": 1})),
        (AlteredCheckpointError, jcs(good | {"step": 5})),
        (AlteredCheckpointError, b"[]"),
        (AlteredCheckpointError, b""),
        (AlteredCheckpointError, jcs(good)[:-1] + b',"step":1}'),
    ):
        (step / "manifest.json").write_bytes(bad)
        with pytest.raises(kind):
            verify(step)
    (step / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="not a complete checkpoint"):
        verify(step)


def test_every_byte_of_the_manifest_counts(step, no_pickle):
    """Attack: no flipped bit of manifest.json goes unnoticed, wherever it is."""
    path = step / "manifest.json"
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            verify(step)


class _Bomb:
    """Unpickles into a file that should not exist."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _rehash(step, name):
    """What an attacker who may write the manifest does after changing a file."""
    manifest = json.loads((step / "manifest.json").read_bytes())
    data = (step / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (step / "manifest.json").write_bytes(sealed(Manifest(**manifest)))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pickle_with_code_never_runs(step, tmp_path, name):
    """Attack: even if the attacker rewrites the manifest too, code in index or shard is refused, not run."""
    mark = tmp_path / "owned"
    (step / name).write_bytes(pickle.dumps(_Bomb(mark)))
    _rehash(step, name)
    for read in _readers(step)[1:4]:
        with pytest.raises(CheckpointError):
            read()
    assert not mark.exists()


def test_other_numbers_under_a_new_manifest_are_refused(step):
    """Attack: a consistent checkpoint of other numbers does not have the root that the caller trusts."""
    trusted = verify(step).root
    state = _state(step)
    state["model.norm.weight"] += 1e-3
    other = step.parent / "other"
    old = verify(step)
    forged = replace(old, root=state_root(state))
    other.mkdir()
    path = Saver(other, Mesh(), keep_last=1).save(forged, state)
    assert (
        load_model(path, MODEL).norm.weight is not None
    )  # nothing but the trusted root gives it away
    with pytest.raises(CheckpointError, match="expected root"):
        load_model(path, MODEL, trusted)
    path = Saver(other, Mesh(), keep_last=1).save(replace(old, root=trusted), state)
    with pytest.raises(CheckpointError, match="its tensors have"):
        load_model(path, MODEL, trusted)


def test_another_shape_is_refused(step):
    """A checkpoint is not forced into a model of another width, depth or head."""
    for spec in (
        replace(MODEL, dim=64),
        replace(MODEL, num_layers=3),
        replace(MODEL, tied=False),
        replace(MODEL, rope_theta=500.0),  # the same tensors, read as another function
    ):
        with pytest.raises(OtherModelError, match="of another model"):
            load_model(step, spec)


@pytest.mark.parametrize("room", [1, 4096, 2**30])
def test_reading_by_groups_changes_nothing(home, monkeypatch, room):
    """One tensor at a time, a few, or all at once: the same weights, the same root, and another root is refused."""
    monkeypatch.setattr("trainer.checkpoint._GROUP_BYTES", room)
    folder = newest(home / "r")
    model = load_model(folder, MODEL, verify(folder).root)
    stored = _state(folder)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, stored[f"model.{name}"]), name
    with pytest.raises(AlteredCheckpointError, match="expected root"):
        load_model(folder, MODEL, "0" * 64)
