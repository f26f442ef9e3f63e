"""What is kept of the original at retained tokens: the same losses as with a second model, each record's states once, and no second model."""

import errno
import gc
import os
import weakref

import pytest
import torch
from forgetting_runs import objective_of
from torch.nn import functional

from trainer.checkpoint import verify
from trainer.data import IGNORE
from trainer.loop import train
from trainer.mesh import Mesh
from trainer.model import Transformer
from unlearning.errors import PlanError
from unlearning.methods import objective as methods
from unlearning.methods.reference import Reference

ASKING = ("kl", "rmu", "adaptive_rmu", "rau")
EXACT = {torch.float64: 1e-10, torch.float32: 1e-6}


def by_a_second_model(task, model, original, batch):
    """The retain term of a batch with the original run forward on its rows, in plain torch."""
    kept = batch.num_retained_rows
    given = batch.tokens_BT[:kept], batch.positions_BT[:kept], batch.documents_BT[:kept]
    counted = batch.labels_BT[:kept] != IGNORE
    with torch.no_grad():
        theirs, states = original(*given, return_hidden=True)
        ours, own = model(*given, return_hidden=True)
        if not task.inner_layers():
            q, p = (x[counted].double().log_softmax(-1) for x in (ours, theirs))
            return functional.kl_div(q, p, log_target=True, reduction="sum").item()
        return sum(
            (own[layer][counted] - states[layer][counted]).square().mean(-1).sum().item()
            for layer in task.inner_layers()
        )


def retain_term(task, model, batch):
    """The same by what the objective kept."""
    given = batch.tokens_BT, batch.positions_BT, batch.documents_BT
    with torch.no_grad():
        logits, hidden = model(*given, return_hidden=True)
        states = {layer: hidden[layer] for layer in task.inner_layers()}
        return task._retain(logits, states, batch).item()


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("method", ASKING)
def test_the_loss_is_that_of_a_second_model(records_only, method, dtype):
    """On batches that cut documents at the ends of rows: to 1e-10 in float64, to 1e-6 in float32; another original differs."""
    task, model = objective_of(records_only.folder, method)
    model, original = model.to(dtype), task._original.to(dtype)
    other = Transformer(original.spec).to(dtype)
    for step in range(4):
        batch = task.batch(step, 0, 1)
        got = retain_term(task, model, batch)
        want = by_a_second_model(task, model, original, batch)
        assert got == pytest.approx(want, rel=EXACT[dtype])
        assert abs(got / by_a_second_model(task, model, other, batch) - 1) > 1e-2
    cut = [s for row in task._retained.whole(1).segments for s in row if s.first]
    assert cut, "a document must go on in another row, or the test says too little"


def test_a_record_is_computed_once(records_only):
    """Over two epochs, tokens kept are those of each record once and of what went on in a next row, not those of all rows."""
    task, _ = objective_of(records_only.folder, "kl")
    plan, original = task._retained.plan, task._original
    steps = range(round(2 * plan.steps_per_epoch))
    reference = Reference(plan, steps, (0, 1), original, None)
    asked = len(steps) * plan.spec.rows * plan.spec.length
    corpus = sum(len(plan.store.tokens(i)) for i in set(plan.order.at(0).order_R.tolist()))
    assert reference.num_tokens < 0.75 * asked
    assert reference.num_tokens < 1.5 * corpus
    halves = [Reference(plan, steps, (k, 2), original, None) for k in range(2)]
    assert max(half.num_tokens for half in halves) < reference.num_tokens
    rows = plan.batch(3).segments
    places = reference.places(rows, plan.spec.length)
    last, _ = original.trunk(
        *(
            torch.from_numpy(x)
            for x in (
                plan.batch(3).tokens_BT,
                plan.batch(3).positions_BT,
                plan.batch(3).documents_BT,
            )
        )
    )
    torch.testing.assert_close(
        reference.at(places.flatten())[:, 0], last.flatten(0, 1), rtol=1e-10, atol=1e-12
    )


def test_the_original_is_let_go(records_only):
    """Once its processes are known, no objective keeps a second model, whatever the method asks."""
    for method in (*ASKING, "npo", "undial"):
        task, model = objective_of(records_only.folder, method)
        kept = None if task._original is None else weakref.ref(task._original)
        assert (kept is not None) == (method in ASKING)
        task.divide(Mesh())
        gc.collect()
        assert kept is None or kept() is None, method
        del model


def test_a_run_has_one_model(records_only, tmp_path, monkeypatch):
    """When the loop begins, no transformer is in memory: the loop's own is the first. And no file of states has a name, then or later."""
    made = records_only
    (tmp_path / "original").mkdir()
    assert train(made.run_spec("original", steps=1), tmp_path / "original") == 0
    original, seen = tmp_path / "original" / "step-1", []

    def fit(run, directory, objective, **_):
        objective.divide(Mesh())
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is Transformer and id(one) not in old]
        seen.append((len(alive), sorted(path.name for path in directory.iterdir())))
        objective.batch(run.steps - 1, 0, 1)
        return 0

    monkeypatch.setattr("trainer.loop.fit", fit)
    gc.collect()
    old = {id(one) for one in gc.get_objects() if type(one) is Transformer}
    sealed = {"file": str(made.folder / "forgotten.sealed"), "key_file": str(made.folder / "key")}
    extra = {"sealed": sealed, "tokenizer": str(made.folder / "tokenizer.json")}
    for method in ("kl", "rau", "npo"):
        run = made.run_spec(
            "one", kind="unlearn", steps=3, excluded=made.excluded(), init=str(original), init_root=verify(original).root,
            extra=extra | {"method": method}, entry="unlearning.methods.objective:run",
        )  # fmt: skip
        (tmp_path / method).mkdir()
        assert methods.run(run, tmp_path / method) == 0
    assert seen == [(0, [])] * 3


def test_other_steps_are_refused(records_only):
    """A batch whose references were not computed is an error that says so, not a wrong loss."""
    task, _ = objective_of(records_only.folder, "rmu")
    task.batch(3, 0, 1)
    with pytest.raises(PlanError, match="expected a batch of steps 0 to 3"):
        task.batch(7, 0, 1)


def test_no_room_is_said_before_the_first_step(records_only, monkeypatch):
    """A full disk: how many bytes at how many tokens, and what to do."""
    task, _ = objective_of(records_only.folder, "kl")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        PlanError, match=r"retained tokens need \d+ bytes.*No space left.*npo, graddiff"
    ):
        task.divide(Mesh())


def test_an_empty_part_has_no_states(records_only):
    """No step, no rows: nothing is computed, and nothing is there to be found."""
    task, _ = objective_of(records_only.folder, "kl")
    plan = task._retained.plan
    empty = Reference(plan, range(0), (0, 1), task._original, None)
    assert empty.num_tokens == 0
    assert empty.places((), plan.spec.length).shape == (0, plan.spec.length)
