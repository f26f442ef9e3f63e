"""Methods that change the weights at once as runs of the trainer, and NPO on a core-set, on the study's trained original."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from forgetting_runs import objective_of

from trainer.checkpoint import load_model, newest, verify
from unlearning.errors import PlanError
from unlearning.methods import EDITS, edits, objective
from unlearning.methods.coreset import BUCKETS, core_records, sketched_gradients
from unlearning.methods.edits import secret_loss, take_newton_step, walk_away
from unlearning.methods.outcome import outcome_of
from unlearning.methods.settings import DEFAULTS


@pytest.fixture(scope="module")
def trained(study):
    """The original, its forgotten records, the batches of what remains, and what the original knows."""
    task, _ = objective_of(study.folder, "npo", study.model_spec())
    model = load_model(study.models["original"], study.model_spec()).eval()
    secrets, plan = task._forgotten[: task._base], task._retained.plan
    return model, secrets, plan, outcome_of(model, secrets, plan)


def method_run(study, name, entry, **extra):
    """A run of three steps from the study's original."""
    sealed = {k: v for k, v in study.audit_extra().items() if k in {"sealed", "tokenizer"}}
    original = study.models["original"]
    return study.run_spec(
        name, kind="unlearn", entry=entry, extra=sealed | extra, steps=3, rows=8, excluded=study.excluded(), init=str(original),
        init_root=verify(original).root, optim={"lr": 0.0005, "warmup_steps": 0, "weight_decay": 0.0},
    )  # fmt: skip


def test_the_secret_loss_is_the_sum_over_records(trained):
    """Padded together or one by one: the same nats."""
    model, secrets, _, _ = trained
    with torch.no_grad():
        whole = secret_loss(model, secrets[:6]).item()
        single = sum(secret_loss(model, [one]).item() for one in secrets[:6])
    assert whole == pytest.approx(single, rel=1e-4)


@pytest.mark.parametrize("method", EDITS)
def test_an_edit_makes_secrets_less_likely(trained, method):
    """With the defaults: the secrets lose, nothing is infinite; more damping, or a smaller scale, moves less."""
    model, secrets, plan, before = trained
    moved = []
    for change in ({}, {"damping": 1e6} if method == "newton" else {"scale": 1e-6}):
        changed = copy.deepcopy(model)
        settings = dataclasses.replace(DEFAULTS[method], **change)
        if method == "newton":
            take_newton_step(changed, secrets, plan, settings)
        else:
            walk_away(changed, secrets, settings)
        found = outcome_of(changed, secrets, plan)
        assert np.isfinite(found.retained)
        moved.append(found.logprob - before.logprob)
    assert moved[0] < -0.01
    assert abs(moved[1]) < abs(moved[0])


@pytest.mark.parametrize("method", EDITS)
def test_an_edit_is_a_run_that_resumes(study, trained, tmp_path, method):
    """An ordinary checkpoint after the repair; started again with a step to do, it ends with the same root."""
    _, secrets, plan, before = trained
    run = method_run(study, method, "unlearning.methods.edits:run", method=method)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, checkpoint_every=2))
    assert edits.run(run, tmp_path) == 0
    root = verify(newest(tmp_path)).root
    model = load_model(newest(tmp_path), study.model_spec()).eval()
    assert outcome_of(model, secrets, plan).logprob < before.logprob
    import shutil

    shutil.rmtree(tmp_path / "step-3")
    (tmp_path / "result.json").unlink()
    assert edits.run(run, tmp_path) == 0
    assert verify(newest(tmp_path)).root == root


def test_an_edit_of_another_name_is_refused(study, tmp_path):
    """The entry runs edits only."""
    with pytest.raises(PlanError, match="expected a method of"):
        edits.run(method_run(study, "x", "unlearning.methods.edits:run", method="npo"), tmp_path)


def test_sketches_keep_inner_products(trained):
    """Cosines of sketched gradients are those of whole gradients, within four standard errors of a sketch."""
    model, secrets, _, _ = trained
    few = secrets[:5]
    parameters = list(model.parameters())
    whole = np.stack(
        [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(secret_loss(model, [one]), parameters)]
            ).numpy()
            for one in few
        ]
    )
    cosines = [
        unit @ unit.T
        for rows in (whole, sketched_gradients(model, few))
        for unit in [rows / np.linalg.norm(rows, axis=1, keepdims=True)]
    ]
    assert np.abs(cosines[0] - cosines[1]).max() < 4 / np.sqrt(BUCKETS)


def test_a_core_set_is_a_run(study, trained, tmp_path):
    """NPO pushes a third of the records; the others are measured apart, and a share out of range is refused."""
    model, secrets, plan, _ = trained
    chosen = core_records(model, secrets, 1 / 3)
    assert len(chosen) == round(len(secrets) / 3)
    rest = [one for one in secrets if one not in chosen]
    run = method_run(
        study, "core", "unlearning.methods.objective:run", method="npo", core_set="0.33", settings={"beta": "0.5"}
    )  # fmt: skip
    assert objective.run(run, tmp_path) == 0
    after = load_model(newest(tmp_path), study.model_spec()).eval()
    assert outcome_of(after, chosen, plan).logprob < outcome_of(model, chosen, plan).logprob - 0.05
    assert np.isfinite(outcome_of(after, rest, plan).logprob)
    with pytest.raises(PlanError, match="core_set in"):
        objective.run(
            method_run(study, "no", "unlearning.methods.objective:run", core_set="0"), tmp_path
        )
