"""One contract for every method: its loss by hand in float64, sign, published defaults, shares of processes, finite steps."""

import math
from importlib import import_module

import pytest
import torch
from forgetting_runs import objective_of

from trainer.data import BatchPlan, TokenStore
from trainer.model import Transformer, init_parameters
from trainer.optim import build_optimizer
from trainer.spec import BatchSpec, OptimSpec
from trainer.step import train_step
from unlearning.errors import PlanError
from unlearning.methods import EDITS, METHODS
from unlearning.methods.forget_retain import forgotten_records
from unlearning.methods.objective import MethodObjective
from unlearning.methods.rmu import direction
from unlearning.methods.settings import DEFAULTS, settings_of
from unlearning.methods.view import View
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer

Z = [[1.0, -0.5, 0.25], [0.0, 2.0, -1.0], [0.5, 0.5, 1.5]]
Z_REF = [[0.5, 0.0, 0.0], [1.0, 1.0, -1.0], [0.0, 0.0, 2.0]]
TRUTH = [0, 1, 2]
RECORD = [0, 0, 1]
REF = [-1.5, -0.7]
PREFERRED = [0.3, -0.2]
H = [[[1.0, 2.0], [0.0, -1.0], [3.0, 1.0]]]
H_REF = [[[0.5, 1.0], [1.0, -1.0], [2.0, 0.0]]]
ANCHOR = [[1.0, -2.0]]


def the_view() -> View:
    """Two records of two and one pushed tokens, vocabulary of three, float64."""
    as_t = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731 - a shorthand
    return View(
        as_t(Z).requires_grad_(), torch.tensor(TRUTH), torch.tensor(RECORD), 2, as_t(REF), as_t(Z_REF), as_t(H), as_t(H_REF),
        as_t(ANCHOR), as_t(PREFERRED),
    )  # fmt: skip


def log_softmax(row):
    """By hand."""
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


LOGP = [log_softmax(row)[token] for row, token in zip(Z, TRUTH, strict=True)]
SUMS, COUNTS = [LOGP[0] + LOGP[1], LOGP[2]], [2, 1]


def per_record(values):
    """Means over each record's tokens."""
    return [(values[0] + values[1]) / 2, values[2]]


def log_sigmoid(value):
    """By hand."""
    return -math.log(1 + math.exp(-value))


def cross(target, row):
    """-Σ target · log softmax(row)."""
    return -sum(t * value for t, value in zip(target, log_softmax(row), strict=True))


def softmax(row):
    """By hand."""
    return [math.exp(value) for value in log_softmax(row)]


def expected(name, s):  # noqa: C901, PLR0911 - one formula per method
    """Loss of each record, from plain Python floats."""
    if name in {"ascent", "graddiff", "kl"}:
        return [SUMS[0] / 2, SUMS[1]]
    if name == "npo":
        return [
            2 / s.beta * math.log(1 + math.exp(s.beta * (p - r)))
            for p, r in zip(SUMS, REF, strict=True)
        ]
    if name == "simnpo":
        return [
            -2 / s.beta * log_sigmoid(s.beta * (-p / n - s.delta))
            for p, n in zip(SUMS, COUNTS, strict=True)
        ]
    if name in {"dpo", "altpo"}:
        margins = [w - (p - r) for w, p, r in zip(PREFERRED, SUMS, REF, strict=True)]
        return [-2 / s.beta * log_sigmoid(s.beta * margin) for margin in margins]
    if name == "undial":
        rows = [
            [value - s.beta * (i == token) for i, value in enumerate(row)]
            for row, token in zip(Z_REF, TRUTH, strict=True)
        ]
        return per_record([cross(softmax(row), z) for row, z in zip(rows, Z, strict=True)])
    if name == "ceu":
        rows = [
            [-1e9 if i == token else value for i, value in enumerate(row)]
            for row, token in zip(Z, TRUTH, strict=True)
        ]
        crosses = [
            cross([math.exp(v) for v in log_softmax(row)], z)
            for row, z in zip(rows, Z, strict=True)
        ]
        return [crosses[1], 0.0]  # the first token of each record is skipped
    if name == "wga":
        return per_record([math.exp(p) ** s.beta * p for p in LOGP])
    if name == "satimp":
        return per_record([math.exp(p) ** s.beta * (1 - math.exp(p)) ** s.beta2 * p for p in LOGP])
    if name == "pdu":
        return per_record([(max(row) - sum(row) / 3) ** 2 for row in Z])
    if name in {"rmu", "adaptive_rmu"}:
        u = direction(2).tolist()
        lengths = [
            s.scale * (math.hypot(*row) if name == "adaptive_rmu" else 1) for row in H_REF[0]
        ]
        return per_record(
            [
                sum((h - c * w) ** 2 for h, w in zip(row, u, strict=True)) / 2
                for row, c in zip(H[0], lengths, strict=True)
            ]
        )
    if name == "rau":
        return per_record(
            [sum((h - a) ** 2 for h, a in zip(row, ANCHOR[0], strict=True)) / 5 for row in H[0]]
        )
    return [0.0, 0.0]


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_the_formula(name):
    """Each record's loss equals plain Python floats to 1e-12, with the published defaults."""
    module = import_module(f"unlearning.methods.{name}")
    got = module.loss(the_view(), DEFAULTS[name])
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected(name, DEFAULTS[name]), rel=1e-12, abs=1e-12)


PUSHED_DOWN = set(METHODS) - {"rmu", "adaptive_rmu", "rau", "finetune"}


@pytest.mark.parametrize("name", sorted(PUSHED_DOWN))
def test_minimising_makes_the_secret_less_likely(name):
    """The sign: a small step against the gradient at the logits lowers the log-probability of the pushed tokens."""
    view = the_view()
    loss = import_module(f"unlearning.methods.{name}").loss(view, DEFAULTS[name]).sum()
    (grad,) = torch.autograd.grad(loss, view.logits_SV)
    moved = (view.logits_SV - 1e-4 * grad).detach()
    before = view.logprob_S.sum().item()
    after = moved.log_softmax(-1).gather(1, view.truth_S[:, None]).sum().item()
    assert after < before


def test_published_defaults():
    """The numbers of the papers or of their published code, pinned."""
    assert (
        DEFAULTS["npo"].beta,
        DEFAULTS["dpo"].beta,
        DEFAULTS["undial"].beta,
        DEFAULTS["wga"].beta,
    ) == (0.1, 0.1, 10.0, 1.0)
    assert (
        DEFAULTS["simnpo"].beta,
        DEFAULTS["simnpo"].delta,
        DEFAULTS["simnpo"].forget_weight,
    ) == (4.5, 0.0, 0.125)
    assert (
        DEFAULTS["satimp"].beta,
        DEFAULTS["satimp"].beta2,
        DEFAULTS["satimp"].forget_weight,
    ) == (5.0, 1.0, 0.1)
    assert (DEFAULTS["rmu"].scale, DEFAULTS["ceu"].skip, DEFAULTS["ascent"].retain_weight) == (
        2.0,
        1,
        0.0,
    )
    assert set(DEFAULTS) == {*METHODS, *EDITS}


def test_settings_that_make_no_sense_are_refused():
    """Unknown methods and fields, and numbers out of range, are named."""
    with pytest.raises(PlanError, match="expected a method of"):
        settings_of("wishing", {})
    with pytest.raises(PlanError, match="unknown setting 'betta'"):
        settings_of("npo", {"betta": "0.1"})
    with pytest.raises(PlanError, match="beta > 0"):
        settings_of("npo", {"beta": "0"})
    with pytest.raises(PlanError, match="decimal string"):
        settings_of("npo", {"beta": "often"})
    assert settings_of("rmu", {"layers": [0, 1], "scale": "3"}).layers == (0, 1)


@pytest.mark.parametrize("name", METHODS)
def test_shares_of_two_processes_add_up(records_only, name):
    """Loss and gradient of one process are the sums over two, for every method."""
    objective, model = objective_of(records_only.folder, name)

    def total(world):
        batches = [objective.batch(1, rank, world) for rank in range(world)]
        totals_K = torch.stack([objective.counts(batch) for batch in batches]).sum(0)
        model.zero_grad()
        loss = torch.stack([objective.loss(model, batch, totals_K) for batch in batches]).sum()
        loss.backward()
        return loss.item(), torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in model.parameters()
            ]
        )

    (loss, grads), (loss_2, grads_2) = total(1), total(2)
    assert math.isfinite(loss)
    assert loss_2 == pytest.approx(loss, rel=1e-10, abs=1e-12)
    assert torch.allclose(grads, grads_2, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_steps_are_finite_and_the_loss_falls(records_only, name):
    """Three steps of the trainer's own step on one batch: nothing is NaN, and the method's loss goes down."""
    objective, model = objective_of(records_only.folder, name)
    optimizer = build_optimizer(model, OptimSpec(lr=1e-3, warmup_steps=0), "float64")
    optimizer.lr = 1e-3
    batch = objective.batch(0, 0, 1)
    totals_K = objective.counts(batch)
    losses = []
    for _ in range(3):
        objective._dual.fill_(1.0)
        losses.append(
            train_step(model, optimizer, objective, batch, totals_K, precision="float64").loss
        )
    assert all(math.isfinite(loss) for loss in losses)
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    if name != "ceu":  # its target is the model's own distribution and moves with it
        assert losses[-1] < losses[0]


def test_a_preference_method_without_answers_is_refused(records_only):
    """AltPO needs alternates and says where they would come from, before any step."""
    records, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, records_only.folder)
    forgotten = forgotten_records(
        records, FileTokenizer(records_only.folder / "tokenizer.json"), 64, "secret"
    )
    plan = BatchPlan(
        TokenStore.open(records_only.folder / "tokens"),
        3,
        BatchSpec(rows=4, length=64),
        None,
        set(),
    )
    model = Transformer(records_only.model_spec())
    init_parameters(model, 5)
    with pytest.raises(PlanError, match="file of alternates"):
        MethodObjective(plan, forgotten, model, "altpo", DEFAULTS["altpo"])
