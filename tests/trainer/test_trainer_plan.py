"""Claims about the planner: its bytes are those that are measured, and every layout not taken has its reason."""

import dataclasses

import pytest
import torch
from trainer_parity import KINDS, Case, Rows, fitting, held, start
from trainer_processes import run_processes

from trainer.layout import Layout, possible, violations
from trainer.plan import BYTES, alternatives, estimate
from trainer.presets import count_parameters, preset
from trainer.spec import BatchSpec

BATCH = BatchSpec(rows=16, length=64)


def _saved_bytes(case):
    """Bytes of all distinct storages that one process keeps for the backward pass, parameters and inputs apart."""
    _, model, _, objective = start(case, Layout())
    batch = objective.batch(0, 0, 1)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in batch}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = objective.loss(model, batch, objective.counts(batch))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["dense", "gqa", "mqa"])
def test_activations_are_those_that_autograd_keeps(kind):
    """Oracle: predicted bytes of activations within 15 % of what autograd saves in a real forward pass."""
    model = dataclasses.replace(KINDS[kind], qk_norm=False, dim=64, ffn_dim=128)
    case = Case(model, rows=16, length=64, packed=False, dtype=torch.float32)
    got = _saved_bytes(case)
    want = estimate(Layout(), model, BATCH).activations
    # The gradient of the logits is in the prediction and not yet there after a forward pass.
    want -= 2 * BYTES * model.vocab_size * BATCH.rows * BATCH.length
    assert got == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gqa", Layout(dp_shard=2, tp=2)),
        ("moe", Layout(dp_shard=2, ep=2, pp=2, microbatches=2)),
        ("mqa", Layout(sp=2, tp=2)),
    ],
    ids=str,
)
def test_the_state_is_that_of_the_fullest_process(tmp_path, kind, layout):
    """Oracle: predicted parameters within 3 % of the largest number that a process really keeps, moments likewise."""
    case = fitting(Case(KINDS[kind], steps=1), layout)
    kept = run_processes(layout.world_size, tmp_path / "group", held, case, layout)
    cost = estimate(layout, case.model, BatchSpec(rows=case.rows, length=case.length))
    weights, moments = max(kept)
    assert cost.parameters == pytest.approx(weights, rel=0.03)
    assert cost.state == pytest.approx(BYTES * (2 * weights + moments), rel=0.03)


@pytest.mark.parametrize("name", ["1M", "12M-8x", "8B"])
def test_one_process_holds_the_whole_model(name):
    """Oracle: for one process the parameters are those of the preset, and nothing is sent."""
    cost = estimate(Layout(), preset(name), BATCH)
    assert cost.parameters == count_parameters(preset(name))
    assert (cost.traffic, cost.idle, cost.gathered) == ({}, 0.0, 0)


def test_formulas_by_hand():
    """Golden: the textbook numbers of traffic and idle time."""
    model = preset("1M")
    parameters = count_parameters(model)
    copies = estimate(Layout(dp_replicate=4), model, BATCH)
    assert copies.traffic == {"dp_replicate": int(BYTES * 1.5 * parameters)}
    slices = estimate(Layout(dp_shard=4), model, BATCH)
    assert slices.traffic == {"dp_shard x sp": int(BYTES * 2.25 * parameters)}
    assert slices.state == pytest.approx(copies.state / 4, rel=1e-3)
    untied = dataclasses.replace(model, tied=False)
    pipe = estimate(Layout(pp=4, microbatches=8), untied, BATCH)
    assert pipe.idle == 3 / 11
    hidden = BATCH.rows * BATCH.length * model.dim
    assert pipe.traffic == {"pp": BYTES * 2 * hidden}
    assert pipe.seconds(pipe.flops / 2, pipe.sent) == pytest.approx(2 / (1 - 3 / 11) + 1)


def test_a_70b_model_does_not_fit_one_gpu_but_a_node_of_slices_needs_an_eighth():
    """Sanity at scale, without allocating: 16 bytes per parameter on one process, an eighth of that on each of 8."""
    model = preset("70B")
    batch = BatchSpec(rows=8, length=4096)
    one, eight = (estimate(layout, model, batch) for layout in (Layout(), Layout(dp_shard=8)))
    assert one.state == 16 * count_parameters(model) > 10**12
    assert eight.state == pytest.approx(one.state / 8, rel=1e-3)
    assert eight.activations == one.activations // 8


def test_every_other_way_has_a_reason():
    """Each single-axis layout stands once, with what makes it impossible or with its cost; the chosen one doesn't."""
    model = dataclasses.replace(preset("12M-8x"), tied=True)
    chosen = Layout(dp_shard=2, ep=2)
    found = alternatives(chosen, model, BATCH)
    names = [str(other.layout) for other in found]
    assert names == [
        "single", "dp_replicate=2", "dp_shard=2", "sp=2", "tp=2", "pp=2 schedule=1f1b microbatches=2",
    ]  # fmt: skip
    assert "tied head" in found[-1].reason
    assert found[-1].cost is None
    assert "2.00 x the work per process" in str(found[0])
    assert all(other.cost is not None for other in found[:-1])
    assert violations(chosen, model, BATCH) == []
    assert str(Layout()) not in [
        str(other.layout) for other in alternatives(Layout(), model, BATCH)
    ]


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_every_possible_layout_has_a_cost(kind):
    """Law: costs are positive, and no division of the weights makes the state of a process larger."""
    model = KINDS[kind]
    alone = estimate(Layout(), model, BATCH)
    for layout in possible(Layout(microbatches=2), model, BATCH, 8):
        cost = estimate(layout, model, BATCH)
        assert 0 < cost.state <= alone.state
        assert cost.sent > 0
        assert 0 <= cost.idle < 1
        assert cost.memory > 0


def test_rows_of_the_parity_plan_are_a_function_of_the_step():
    """The plan that these and the parity tests train on gives the same batch twice, and another one next time."""
    case = Case(KINDS["gqa"])
    first, again, other = (Rows(case).batch(step) for step in (0, 0, 1))
    assert (first.tokens_BT == again.tokens_BT).all()
    assert (first.tokens_BT != other.tokens_BT).any()
