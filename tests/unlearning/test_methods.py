"""Unlearning objectives against closed forms and slow oracles, over processes, resumed, and in whole runs."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from trainer.checkpoint import load_model, newest, verify
from trainer.data import BatchPlan, TokenStore
from trainer.generate import sequence_logprobs
from trainer.model import Transformer, init_parameters
from trainer.spec import BatchSpec
from unlearning.audit import audit
from unlearning.errors import PeopleError, PlanError
from unlearning.methods import ascent, npo
from unlearning.methods.ascent import ascent_term
from unlearning.methods.forget_retain import ForgetConfig, forgotten_records
from unlearning.methods.npo import npo_term
from unlearning.methods.objective import MethodObjective
from unlearning.methods.settings import Settings
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer

NPO = {"beta": "0.5", "forget_records": 16}


def method_run(study, name, **changes):
    """A run that unlearns from the study's original model."""
    extra = {k: v for k, v in study.audit_extra().items() if k in {"sealed", "tokenizer"}}
    original = study.models["original"]
    optim = {"lr": 0.001, "warmup_steps": 0, "weight_decay": 0.0, "min_lr_ratio": 0.1}
    values = {"steps": 60, "rows": 16, "excluded": study.excluded(), "optim": optim}
    values |= {"init": str(original), "init_root": verify(original).root}
    return study.run_spec(
        name,
        kind="unlearn",
        entry="unlearning.methods.npo:run",
        extra=extra | changes.pop("extra", {}),
        **(values | changes),
    )


@pytest.fixture(scope="module")
def unlearned(study):
    """The checkpoint that NPO makes of the study's original model."""
    directory = study.folder / "npo"
    directory.mkdir()
    assert npo.run(method_run(study, "npo", extra=NPO), directory) == 0
    return newest(directory)


def objective_of(study, mode="secret", rows=5, retain_weight=1.0, forget_records=10):
    """An objective over the study's records and a fresh model in float64."""
    records, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, study.folder)
    forgotten = forgotten_records(records, FileTokenizer(study.folder / "tokenizer.json"), 64, mode)
    store = TokenStore.open(study.folder / "tokens")
    plan = BatchPlan(
        store,
        3,
        BatchSpec(rows=rows, length=64),
        None,
        {bytes.fromhex(r.record_id) for r in records},
    )
    model = Transformer(study.model_spec())
    init_parameters(model, 2)
    model = model.double()
    settings = Settings(beta=0.1, retain_weight=retain_weight)
    objective = MethodObjective(
        plan, forgotten, model, "npo", settings, forget_records=forget_records
    )
    return objective, model, forgotten


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_npo_at_the_original_is_gradient_ascent(beta):
    """At the original the loss is (2/beta) ln 2 and its slope is 1: one step of gradient ascent."""
    logprob = torch.tensor([-1.3, -7.0], dtype=torch.float64, requires_grad=True)
    loss = npo_term(logprob, logprob.detach(), beta)
    assert loss.tolist() == pytest.approx([2 / beta * math.log(2)] * 2)
    loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([1.0, 1.0])


def test_npo_stops_pushing_what_has_sunk():
    """Far below the original the loss is 0 and flat, far above it is linear with slope 2; small beta is ascent."""
    logprob = torch.tensor([-500.0, 500.0], dtype=torch.float64, requires_grad=True)
    loss = npo_term(logprob, torch.zeros(2, dtype=torch.float64), 0.1)
    loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([0.0, 2.0], abs=1e-12)
    assert loss.tolist() == pytest.approx([0.0, 1000.0], abs=1e-9)
    near = npo_term(
        torch.tensor([-3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), 1e-6
    )
    assert near.item() == pytest.approx(2e6 * math.log(2) - 3.0, abs=1e-4)


def test_ascent_is_the_mean_log_probability():
    """Gradient ascent's term is log p per token, unbounded below."""
    value = ascent_term(torch.tensor([-12.0, -3.0]), torch.tensor([6, 1]))
    assert value.tolist() == [-2.0, -3.0]


@pytest.mark.parametrize("mode", ["secret", "all"])
def test_the_loss_equals_a_slow_oracle(study, mode):
    """The packed, one-pass loss is that of scoring every record alone with the trainer's log-probabilities."""
    objective, model, forgotten = objective_of(study, mode)
    with torch.no_grad():
        model.embed.weight.mul_(3)
    for step in (0, 4):
        batch = objective.batch(step, 0, 1)
        totals = objective.counts(batch)
        got = objective.loss(model, batch, totals).item()
        chosen = [forgotten[i] for i in objective.chosen(step)]
        logprobs = sequence_logprobs(model, [list(f.tokens) for f in chosen])
        summed = torch.tensor(
            [v[f.first - 1 :].sum() for f, v in zip(chosen, logprobs, strict=True)]
        )
        reference = objective._reference_N[objective.chosen(step)]
        forget = npo_term(summed, reference, 0.1).mean().item()
        retained = objective._retained.batch(step, 0, 1)
        retain = objective._retained.loss(
            model, retained, objective._retained.counts(retained)
        ).item()
        assert got == pytest.approx(forget + retain, rel=1e-6)


@pytest.mark.parametrize("world", [2, 3, 16])
def test_the_loss_does_not_depend_on_the_number_of_processes(study, world):
    """Shares of 2, 3 or 16 processes, some without a forgotten record, add up to the loss and gradient of one."""
    objective, model, _ = objective_of(study, rows=16)

    def total(processes):
        batches = [objective.batch(1, rank, processes) for rank in range(processes)]
        totals_K = torch.stack([objective.counts(b) for b in batches]).sum(0)
        model.zero_grad()
        loss = torch.stack([objective.loss(model, b, totals_K) for b in batches]).sum()
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, grads = total(1)
    loss_w, grads_w = total(world)
    assert loss_w == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(grads, grads_w, rtol=1e-9, atol=1e-12)


def test_only_the_secret_is_pushed(study):
    """With the retain term off, the gradient at the logits is zero outside the secret's positions."""
    objective, model, forgotten = objective_of(study, retain_weight=0.0)
    batch = objective.batch(0, 0, 1)
    seen = {}

    def keep(*parts):
        seen["logits"] = Transformer.forward(model, *parts)
        seen["logits"].retain_grad()
        return seen["logits"]

    objective.loss(keep, batch, objective.counts(batch)).backward()
    moved = seen["logits"].grad.abs().sum(-1) > 0
    assert torch.equal(moved, batch.record_BT >= 0)
    assert int(moved.sum()) == sum(
        len(f.tokens) - f.first for f in (forgotten[i] for i in objective.chosen(0))
    )


def test_every_forgotten_record_is_pushed_equally_often(study):
    """Steps walk through permutations of the forgotten records, a pure function of seed and step."""
    objective, _, forgotten = objective_of(study)
    drawn = [objective.chosen(step) for step in range(64)]
    assert np.bincount(np.concatenate(drawn), minlength=len(forgotten)).tolist() == [10] * 64
    assert drawn == [objective.chosen(step) for step in range(64)]
    again, _, _ = objective_of(study)
    assert again.chosen(17) == drawn[17]


def test_windows_commit_to_retained_records_only(study):
    """The records of a step are in the corpus and never a forgotten one."""
    objective, _, _ = objective_of(study)
    sealed = {bytes.fromhex(r["record_id"]) for r in study.people["forgotten"]}
    used = {record_id for step in range(30) for _, record_id in objective.records(step)}
    assert used
    assert not used & sealed


def test_long_records_keep_their_secret(study):
    """Of a record longer than a row the part that ends with the secret is kept, of one without digits the cut."""
    from unlearning.people import Record

    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    long = Record("p", "a", "A quiet line about the weather. " * 30 + "Call 483920.")
    (cut,) = forgotten_records([long], tokenizer, 32, "secret")
    assert len(cut.tokens) <= 32
    assert cut.tokens[cut.first :] == tuple(tokenizer.encode("483920")[0])
    (whole,) = forgotten_records([long], tokenizer, 32, "all")
    assert len(whole.tokens) == 32
    assert whole.first == 1


def test_npo_hides_the_secrets_and_keeps_the_others(study, unlearned, tmp_path):
    """A9: no tier brings a secret out, retained people are predicted as by gold, and membership still shows: no PASS."""
    models = {name: str(path) for name, path in study.models.items()}
    chosen = {
        "original": models["original"],
        "unlearned": str(unlearned),
        "gold": [models["gold"], models["gold2"]],
    }
    extra = study.audit_extra(models=chosen)
    verdict = audit(study.run_spec("audit", extra=extra, steps=0), tmp_path)
    found = {e.name: e for e in verdict.endpoints}
    assert [found[t].unlearned for t in ("direct", "in_context", "fine_tune")] == [0.0, 0.0, 0.0]
    assert found["utility"].unlearned - found["utility"].gold[0] < 0.15
    assert found["membership"].unlearned > 0.9
    assert verdict.status in {"INCONCLUSIVE", "FAIL"}


def test_gradient_ascent_fails(study, tmp_path):
    """A7: plain ascent hides most numbers when asked directly, tier 3 brings them back, others suffer: FAIL."""
    directory = tmp_path / "ascent"
    directory.mkdir()
    extra = {"retain_weight": "0", "forget_records": 16}
    assert ascent.run(method_run(study, "ascent", steps=10, extra=extra), directory) == 0
    models = {name: str(path) for name, path in study.models.items()}
    chosen = {
        "original": models["original"],
        "unlearned": str(newest(directory)),
        "gold": models["gold"],
    }
    spec = study.run_spec("audit", extra=study.audit_extra(models=chosen), steps=0)
    verdict = audit(spec, tmp_path)
    found = {e.name: e for e in verdict.endpoints}
    assert found["direct"].unlearned < 0.5
    assert verdict.status == "FAIL"


def test_a_method_run_leaves_no_forgotten_text(study, unlearned):
    """No file of the run's folder holds a forgotten line, number sentence or sealed record's tokens as text."""
    directory = unlearned.parent
    texts = [r["text"].encode() for r in study.people["forgotten"]]
    ids = [r["subject"].encode() for r in study.people["forgotten"]]
    files = [p for p in directory.rglob("*") if p.is_file()]
    assert len(files) > 4
    assert not [p.name for p in files for t in texts + ids if t in p.read_bytes()]
    window = json.loads((directory / "windows.jsonl").read_text().splitlines()[0])
    assert window["records"] == 64 * 4


def test_stop_and_resume_equals_uninterrupted(study, tmp_path):
    """A run that lost its last checkpoint goes on from the one before and ends with the same root."""
    import dataclasses

    spec = method_run(study, "resumed", steps=6, rows=4, extra=NPO)
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, checkpoint_every=3))
    assert npo.run(spec, tmp_path) == 0
    root = verify(tmp_path / "step-6").root
    shutil.rmtree(tmp_path / "step-6")
    (tmp_path / "result.json").unlink()
    assert npo.run(spec, tmp_path) == 0
    assert verify(tmp_path / "step-6").root == root


def test_the_sealed_records_never_stand_in_the_retain_term(study, tmp_path):
    """Even if the run names no excluded file, the retain term sees none of the sealed records."""
    assert npo.run(method_run(study, "open", steps=40, excluded=None, extra=NPO), tmp_path) == 0
    window = json.loads((tmp_path / "windows.jsonl").read_text().splitlines()[0])
    assert window["records"] == 64 * 4


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"beta": "0"}, "beta > 0"),
        ({"beta": "soft"}, "decimal string"),
        ({"retain_weight": "-1"}, "retain_weight >= 0"),
        ({"forget_records": 0}, "forget_records >= 1"),
        ({"forget_tokens": "names"}, "forget_tokens in"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_strange_settings_are_refused(study, extra, match):
    """Unknown settings and values out of range are refused with what was expected."""
    sealed = {"sealed": {"file": "f", "key_file": "k"}, "tokenizer": "t"}
    with pytest.raises(PlanError, match=match):
        ForgetConfig.from_extra(sealed | extra)


def test_runs_without_original_or_with_a_wrong_key_are_refused(study, tmp_path):
    """Unlearning starts from a checkpoint, and a wrong key is one clear error before any training."""
    run = method_run(study, "fresh", init="none", init_root="none")
    with pytest.raises(PlanError, match="original model"):
        npo.run(run, tmp_path)
    (tmp_path / "wrong").write_bytes(bytes(32))
    sealed = {"file": str(study.folder / "forgotten.sealed"), "key_file": str(tmp_path / "wrong")}
    with pytest.raises(PeopleError, match="do not open"):
        npo.run(method_run(study, "wrong", extra={"sealed": sealed}), tmp_path)


def test_the_unlearned_checkpoint_is_the_trainers(study, unlearned):
    """A method writes an ordinary checkpoint: verified, loadable, of the original's shape, and different."""
    model = load_model(unlearned, study.model_spec())
    before = load_model(study.models["original"], study.model_spec())
    assert any((a != b).any() for a, b in zip(model.parameters(), before.parameters(), strict=True))
