"""When a run of a method ends, what a resumed one remembers, and what became of the forgotten and of the others."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from forgetting_runs import objective_of

from trainer.checkpoint import newest, read_tensors, verify
from trainer.mesh import Mesh
from trainer.step import train_step
from unlearning.errors import PlanError
from unlearning.methods import METHODS, npo, objective
from unlearning.methods.outcome import Outcome, outcome_of
from unlearning.methods.stopping import Floor
from unlearning.methods.view import View


def view_of(likely):
    """One secret of two tokens: each of them has probability p, of 3."""
    rest = math.log((1 - likely) / 2)
    logits = torch.tensor([[math.log(likely), rest, rest]] * 2, dtype=torch.float64)
    return View(
        logits, torch.tensor([0, 0]), torch.tensor([0, 0]), 1, torch.zeros(1, dtype=torch.float64)
    )


def stops_after(floor, likely_of_step):
    """The step after which the rule holds."""
    for step, likely in enumerate(likely_of_step, 1):
        floor.note(view_of(likely))
        floor.advance(Mesh())
        if floor.stopped:
            return step
    return None


def test_the_rule_holds_when_secrets_are_as_unlikely_as_the_never_seen():
    """By hand: with floor ln 0.3 and two steps a window, the mean of (0.4, 0.2) holds, that of (0.9, 0.2) and (0.4, 0.29) do not."""
    floor = Floor(math.log(0.3), every=2, num_records=1)
    assert stops_after(floor, [0.9, 0.2, 0.4, 0.29, 0.4, 0.2]) == 6
    assert stops_after(Floor(math.log(0.3), 1, 1), [0.31, 0.29]) == 2


def test_a_secret_that_is_still_the_first_choice_keeps_the_rule_from_holding():
    """Unlikely on average but given away by more than one in n: no stop; with n = 1 one is allowed."""
    above, below = math.log(0.5), math.log(0.35)
    assert stops_after(Floor(above, 1, 2), [0.4] * 3) is None
    assert stops_after(Floor(above, 1, 1), [0.4]) == 1
    assert stops_after(Floor(below, 1, 2), [0.34]) is None  # still first: (1 - 0.34) / 2 < 0.34
    assert stops_after(Floor(below, 1, 2), [0.32]) == 1


@pytest.mark.parametrize("wrong", [(0.0, 1, 1), (-1.0, 0, 1), (-1.0, 1, 0), (math.nan, 1, 1)])
def test_a_rule_that_makes_no_sense_is_refused(wrong):
    """A floor of certainty, no window, no records, NaN."""
    with pytest.raises(PlanError, match="floor below 0"):
        Floor(*wrong)


def method_run(study, name, **changes):
    """A run of a method on the study's trained original."""
    extra = {k: v for k, v in study.audit_extra().items() if k in {"sealed", "tokenizer"}}
    original = study.models["original"]
    values = {
        "steps": 60, "rows": 8, "excluded": study.excluded(), "init": str(original), "init_root": verify(original).root,
        "optim": {"lr": 0.001, "warmup_steps": 0, "weight_decay": 0.0},
    }  # fmt: skip
    extra |= {"forget_records": 16} | changes.pop("extra", {})
    entry = changes.pop("entry", "unlearning.methods.npo:run")
    return study.run_spec(name, kind="unlearn", entry=entry, extra=extra, **(values | changes))


def test_a_run_ends_by_the_rule_and_goes_on_ended(study, tmp_path):
    """NPO stops long before its last step with the secrets at the look-alikes' floor; started again, it does nothing more."""
    stop = {"every": 5, "lookalikes": str(study.folder / "lookalikes.jsonl")}
    run = method_run(study, "floor", steps=100, extra={"beta": "0.1", "stop": stop})
    assert npo.run(run, tmp_path) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert 5 <= result["steps"] < 60
    assert result["steps"] % 5 == 0
    root = verify(newest(tmp_path)).root
    assert npo.run(run, tmp_path) == 0
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == result["steps"]
    assert verify(newest(tmp_path)).root == root


def test_a_rule_that_cannot_see_every_record_is_refused(study, tmp_path):
    """64 records at 16 a step need four steps between checks; a rule without look-alikes is none."""
    stop = {"every": 3, "lookalikes": str(study.folder / "lookalikes.jsonl")}
    with pytest.raises(PlanError, match="expected every >= 4"):
        npo.run(method_run(study, "blind", extra={"stop": stop}), tmp_path)
    with pytest.raises(PlanError, match="expected stop as"):
        npo.run(method_run(study, "half", extra={"stop": {"every": 3}}), tmp_path)


def test_a_resumed_dual_variable_is_the_uninterrupted_one(study, tmp_path):
    """PDU's λ moves, stands in the checkpoint, and a run that lost its last one ends with the same root."""
    extra = {"method": "pdu", "settings": {"bound": "0.2", "dual_rate": "0.5"}}
    run = method_run(
        study, "dual", steps=6, entry="unlearning.methods.objective:run", extra=extra
    )  # fmt: skip
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, checkpoint_every=3))
    assert objective.run(run, tmp_path) == 0
    root = verify(tmp_path / "step-6").root
    duals = [dict(read_tensors(tmp_path / f"step-{n}"))["objective.dual"].item() for n in (3, 6)]
    assert len({1.0, *duals}) == 3
    shutil.rmtree(tmp_path / "step-6")
    (tmp_path / "result.json").unlink()
    assert objective.run(run, tmp_path) == 0
    assert verify(tmp_path / "step-6").root == root


def test_the_dual_variable_moves_once_per_step(records_only):
    """By hand: λ' = max(0, λ + η (NLL - ε)) with the loss of the whole batch, also in four micro-batches."""
    for pieces in (1, 4):
        task, model = objective_of(records_only.folder, "pdu")
        batches = [task.batch(0, piece, pieces) for piece in range(pieces)]
        totals = torch.stack([task.counts(batch) for batch in batches]).sum(0)
        for batch in batches:
            task.loss(model, batch, totals)
        task.advance(Mesh())
        retained = task._retained.batch(0, 0, 1)
        nll = task._retained.loss(model, retained, task._retained.counts(retained)).item()
        assert task.dual == pytest.approx(max(0.0, 1 + 1.0 * (nll - 1.0)), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_reports_forgetting_and_retained_utility(records_only, method):
    """Before and after two small steps: finite numbers, and a model that is not wrecked."""
    from trainer.optim import build_optimizer
    from trainer.spec import OptimSpec

    task, model = objective_of(records_only.folder, method)
    secrets, plan = task._forgotten[: task._base], task._retained.plan
    before = outcome_of(model, secrets, plan)
    optimizer = build_optimizer(model, OptimSpec(lr=1e-3), "float64")
    for step in range(2):
        batch = task.batch(step, 0, 1)
        train_step(model, optimizer, task, batch, task.counts(batch), precision="float64")
    after = outcome_of(model, secrets, plan)
    for found in (before, after):
        assert math.isfinite(found.logprob)
        assert found.logprob < 0
        assert 0 <= found.given_away <= 1
        assert 0 < found.retained < 10
    assert after != before


def test_the_outcome_of_the_trained_original(study):
    """On the study's models: the original gives nearly all its people away, gold nobody, and both predict those who stay."""
    from trainer.checkpoint import load_model

    task, _ = objective_of(study.folder, "npo", study.model_spec())
    secrets, plan = task._forgotten[: task._base], task._retained.plan
    found = {
        name: outcome_of(load_model(study.models[name], study.model_spec()).eval(), secrets, plan)
        for name in ("original", "gold")
    }
    assert isinstance(found["gold"], Outcome)
    original, gold = found["original"], found["gold"]
    assert (original.given_away > 0.8, gold.given_away < 0.1) == (True, True)
    assert (original.logprob > -0.3, gold.logprob < -1.5) == (True, True)
    assert abs(found["original"].retained - found["gold"].retained) < 0.2
