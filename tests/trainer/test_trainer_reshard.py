"""Claims about states that move: what one layout saves, any other loads, moments included, to the last bit."""

import dataclasses
import itertools

import pytest
import torch
from trainer_parity import KINDS, Case, fitting, load_state, save_state
from trainer_processes import run_processes

from trainer.checkpoint import read_tensors
from trainer.layout import Layout, violations
from trainer.manifest import verify
from trainer.root import checkpoint_root
from trainer.spec import BatchSpec

PIPE = {"pp": 2, "microbatches": 4}
LAYOUTS = {
    "single": Layout(),
    "copies": Layout(dp_replicate=2),
    "slices": Layout(dp_shard=4),
    "hybrid": Layout(dp_replicate=2, dp_shard=2),
    "tensor": Layout(tp=2, dp_shard=2),
    "sequence": Layout(sp=2),
    "stages": Layout(schedule="zbv", **PIPE),
    "experts": Layout(dp_shard=4, ep=2),
    "experts in stages": Layout(dp_shard=2, ep=2, **PIPE),
}
# Four experts of another layout than the parity tests', so that their slices are one expert each.
CASE = fitting(Case(dataclasses.replace(KINDS["moe"], num_experts=4)), Layout(**PIPE))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Call a function in the processes of a layout."""
    groups, numbers = tmp_path_factory.mktemp("groups"), itertools.count()

    def ran(layout, function, *arguments):
        batch = BatchSpec(rows=CASE.rows, length=CASE.length)
        assert violations(layout, CASE.model, batch) == []
        file = groups / str(next(numbers))
        return run_processes(layout.world_size, file, function, CASE, layout, *arguments)

    return ran


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """The folder that a layout saves after two steps, made once."""
    home, made = tmp_path_factory.mktemp("saved"), {}

    def of(name):
        if name not in made:
            folder = home / name.replace(" ", "-")
            run(LAYOUTS[name], save_state, folder)
            made[name] = folder / "step-2"
        return made[name]

    return of


def _moves(run, saved, source, target):
    folder = saved(source)
    manifest = verify(folder)
    # The root over whole tensors, read without any process group, is what the processes had computed together.
    assert checkpoint_root(folder) == manifest.root
    answers = run(LAYOUTS[target], load_state, folder)
    assert {root for root, _ in answers} == {manifest.root}
    losses = {loss for _, loss in answers}
    assert len(losses) == 1
    return losses.pop()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("experts in stages", "single"),
        ("single", "experts"),
        ("tensor", "stages"),
        ("stages", "hybrid"),
    ],
)
def test_a_state_moves_to_another_layout(run, saved, source, target):
    """Law: every bit of weights, balance and moments arrives, and the third step's loss is that of one process."""
    loss = _moves(run, saved, source, target)
    assert loss == pytest.approx(_moves(run, saved, source, "single"), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_a_state_moves_between_any_two_layouts(run, saved, source, target):
    """Law: the full matrix of nine layouts."""
    loss = _moves(run, saved, source, target)
    assert loss == pytest.approx(_moves(run, saved, source, "single"), rel=1e-10)


def test_states_of_different_layouts_are_near_and_named_alike(saved):
    """Two steps on different layouts: the same names, types and shapes, and numbers within 1e-10."""
    one, other = (dict(read_tensors(saved(name))) for name in ("tensor", "experts in stages"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        torch.testing.assert_close(tensor, other[name], rtol=1e-10, atol=1e-12)
