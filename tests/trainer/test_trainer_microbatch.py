"""Claims about the local phase: micro-batches change nothing but rounding, precision changes what it says and no more."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import MODEL, make_run, write_corpus
from trainer_processes import fit_run, run_processes

from trainer.checkpoint import newest, read_tensors
from trainer.data import BatchPlan, TokenStore
from trainer.loop import fit
from trainer.metrics import read_lines
from trainer.microbatch import MicroBatches, forward_backward, take_batch
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer
from trainer.spec import BatchSpec, Layout, OptimSpec, RunConfig, save_run
from trainer.step import train_step

ROWS = 7


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """120 documents."""
    folder = tmp_path_factory.mktemp("micro")
    return TokenStore.open(folder, write_corpus(folder))


def _model(dtype=torch.float64):
    model = Transformer(MODEL)
    init_parameters(model, 0)
    return model.to(dtype)


@settings(max_examples=12, deadline=None)
@given(
    pieces=st.integers(2, ROWS), step=st.integers(0, 20), name=st.sampled_from(["adamw", "muon"])
)
def test_accumulation_changes_rounding_only(store, pieces, step, name):
    """Law: loss, norm and weights after a step in k unequal pieces equal those of one piece to 1e-12 (float64)."""
    objective = LanguageModelling(BatchPlan(store, 3, BatchSpec(rows=ROWS, length=40)))
    spec, found = OptimSpec(name=name, lr=1e-2), []
    for accumulation in (1, pieces):
        model = _model()
        batch, counts = take_batch(objective, step, 0, 1, accumulation)
        report = train_step(
            model, build_optimizer(model, spec), objective, batch, counts, clip_norm=0.5
        )
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((report, grads, counts))
    assert isinstance(batch, MicroBatches)
    assert len(batch) == pieces
    (one, grads, counts), (many, summed, same) = found
    assert torch.equal(counts, same)
    assert many.tokens == one.tokens
    assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-12)
    torch.testing.assert_close(summed, grads, rtol=0, atol=1e-12)


def test_means_of_pieces_would_be_seen(store):
    """Negative control: pieces hold different numbers of labels, and the mean of their means is another loss."""
    objective = LanguageModelling(BatchPlan(store, 3, BatchSpec(rows=ROWS, length=40)))
    model = _model()
    parts, counts = take_batch(objective, 2, 0, 1, 3)
    whole, _ = take_batch(objective, 2, 0, 1, 1)
    right = objective.loss(model, whole, counts)
    wrong = sum(objective.loss(model, part, objective.counts(part)) for part in parts) / 3
    assert abs(wrong.item() - right.item()) > 1e-4


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_two_processes_with_pieces_compute_the_losses_of_one(tmp_path, axis):
    """2 processes x 2 unequal pieces in float64: loss and norm of one process to 1e-10 over 6 steps, weights to 1e-9."""
    found = {}
    for name, layout, pieces in (
        ("single", Layout(), 1),
        (axis, Layout(**{axis: 2}), 2),
    ):
        run = make_run(
            tmp_path, name, steps=6, every=6, layout=layout, precision="float64",
            batch=BatchSpec(rows=ROWS, length=32, accumulation=pieces),
        )  # fmt: skip
        save_run(run, tmp_path / name)
        if name == "single":
            assert fit(run, tmp_path / name) == 0
        else:
            assert run_processes(2, tmp_path / "group", fit_run, run, tmp_path / name) == [0, 0]
        lines = read_lines(tmp_path / name / "progress.jsonl")
        found[name] = (
            torch.tensor(
                [[line["loss"], line["grad_norm"]] for line in lines], dtype=torch.float64
            ),
            dict(read_tensors(newest(tmp_path / name))),
        )
    torch.testing.assert_close(found[axis][0], found["single"][0], rtol=1e-10, atol=0)
    for name, tensor in found[axis][1].items():
        expected = found["single"][1][name]
        assert tensor.dtype == (torch.float32 if name == "optim.step" else torch.float64)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-9, msg=name)


def test_float64_starts_from_the_same_numbers(store):
    """A float64 model is the float32 one, widened: the first loss differs by float32's rounding only."""
    objective = LanguageModelling(BatchPlan(store, 3, BatchSpec(rows=2, length=40)))
    batch, counts = take_batch(objective, 0, 0, 1, 1)
    losses = [
        objective.loss(_model(t), batch, counts).item() for t in (torch.float32, torch.float64)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != losses[1]


def test_bfloat16_rounds_products_and_keeps_everything_else(store):
    """Loss within 1 %, gradient within 5 % of float32 and not equal; weights, gradients and moments are float32."""
    objective = LanguageModelling(BatchPlan(store, 3, BatchSpec(rows=ROWS, length=40)))
    batch, counts = take_batch(objective, 0, 0, 1, 1)
    assert any(len(row) > 1 for row in objective.plan.batch(0).segments)  # a mask is at work
    losses, grads = [], []
    for precision in ("float32", "bfloat16"):
        model = _model(torch.float32)
        losses.append(forward_backward(model, objective, batch, counts, precision))
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[1].dtype == torch.float32
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)
    assert 0 < (grads[1] - grads[0]).norm() < 0.05 * grads[0].norm()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_in_bfloat16_learns_and_resumes_bitwise(tmp_path, name):
    """The whole loop: the loss falls as in float32 within 2 %, the checkpoint is float32, and resuming changes no bit."""
    import shutil

    from trainer.checkpoint import verify

    losses = {}
    for precision in ("float32", "bfloat16"):
        directory = tmp_path / precision
        run = make_run(
            tmp_path, precision, steps=10, every=5, precision=precision,
            optim=OptimSpec(name=name, lr=1e-2, warmup_steps=3, schedule="wsd"),
        )  # fmt: skip
        save_run(run, directory)
        assert fit(run, directory) == 0
        losses[precision] = [line["loss"] for line in read_lines(directory / "progress.jsonl")]
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.3
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], rel=0.02)
    assert {t.dtype for _, t in read_tensors(newest(directory))} == {torch.float32}
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "step-10")
    assert fit(run, again) == 0
    assert verify(newest(again)).root == verify(newest(directory)).root


def test_refusing_an_update_changes_nothing(store):
    """accept=False: loss and norm are reported, weights and moments keep their bits, and NaN is no error."""
    objective = LanguageModelling(BatchPlan(store, 3, BatchSpec(rows=2, length=40)))
    model = _model()
    optimizer = build_optimizer(model, OptimSpec(name="muon"))
    batch, counts = take_batch(objective, 0, 0, 1, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state()))
    seen = []

    def refuse(loss, norm):
        seen.append((loss, norm))
        return False

    report = train_step(model, optimizer, objective, batch, counts, accept=refuse)
    assert not report.updated
    assert seen == [(report.loss, report.grad_norm)]
    for old, new in zip(before, (model.state_dict(), optimizer.state()), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert train_step(model, optimizer, objective, batch, counts, accept=lambda *_: True).updated
    assert RunConfig().precision == "float32"
