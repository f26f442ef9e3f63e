"""In-run credits are Shapley values: exact for the linear and the quadratic loss, whatever optimiser moved the weights."""

import dataclasses
import hashlib
import itertools
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional

from trainer.data import BatchPlan, TokenStore, write_tokens
from trainer.errors import SpecError
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer, learning_rate
from trainer.spec import (
    BatchSpec,
    GuardSpec,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    no_versions,
    save_run,
)
from trainer.step import train_step
from valuation import dots
from valuation.capture import Capture
from valuation.displacement import Displacement, inner
from valuation.dots import token_dots
from valuation.errors import GradientError
from valuation.gradients import aggregate_gradient, token_losses
from valuation.hessian import hessian_product
from valuation.inrun import credited_steps, target_sample, train
from valuation.shapley import exact_shapley

VOCAB = 13
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
ADAMW = OptimSpec(lr=0.02, warmup_steps=2, clip_norm=0.5)
MUON = dataclasses.replace(ADAMW, name="muon")


def corpus(folder, count, seed):
    """`count` short random records."""
    rng = np.random.default_rng(seed)
    records = [
        (i, hashlib.sha256(f"{seed} {i}".encode()).digest(), "ann",
         [*rng.integers(0, VOCAB - 1, int(rng.integers(3, 8))).tolist(), VOCAB - 1])
        for i in range(count)
    ]  # fmt: skip
    digest = write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip
    return TokenStore.open(folder), digest


def setting(folder, *, accumulation=1, rows=2, length=12):
    """A float64 model, few batches and a target."""
    (store, _), (target, _) = (
        corpus(folder / "tokens", 30, seed=1),
        corpus(folder / "target", 5, seed=2),
    )
    model = Transformer(MODEL).double()
    init_parameters(model, 3)
    plan = BatchPlan(store, 7, BatchSpec(rows=rows, length=length, accumulation=accumulation))
    return model, plan, target_sample(target, 0, 3, 12, 4)


def trained(model, plan, optim, steps, before=None):
    """The trainer's own steps; `before(optimizer, batch)` is called before each."""
    optimizer, objective = build_optimizer(model, optim), LanguageModelling(plan)
    for step in range(steps):
        optimizer.lr = learning_rate(step, optim, steps)
        batch = objective.batch(step, 0, 1)
        if before:
            before(optimizer, plan.batch(step))
        report = train_step(
            model, optimizer, objective, batch, objective.counts(batch), clip_norm=optim.clip_norm
        )
    return optimizer, report


def segment_gradients(model, plan, batch):
    """Gradient of each segment's summed loss, one pass each, by parameter name."""
    named, found = dict(model.named_parameters()), []
    for row in batch.segments:
        for _, (index, _, first, count, _) in enumerate(row):
            tokens = plan.store.tokens(index).astype(np.int64)
            labels = torch.tensor(tokens[first + 1 : first + 1 + count])
            logits = model(torch.tensor(tokens[first : first + count])[None])[0, : len(labels)]
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            found.append(dict(zip(named, grads, strict=True)))
    return found


def players(tmp_path, optim, steps):
    """On a twin: what each record, the momentum and the decay moved in the last step; the loss's gradient and Hessian there."""
    model, plan, target = setting(tmp_path)
    kept = {}

    def look(optimizer, batch):
        kept.update(
            displacement=Displacement(optimizer),
            batch=batch,
            gradients=segment_gradients(model, plan, batch),
            aim=aggregate_gradient(model, target),
        )

    optimizer, report = trained(model, plan, optim, steps, look)
    displacement, batch = kept["displacement"], kept["batch"]
    clip = min(1.0, optim.clip_norm / (report.grad_norm + 1e-6))
    parts = [
        displacement.own_map({n: g * clip / batch.num_labels for n, g in gradient.items()})
        for gradient in kept["gradients"]
    ]
    sgd_parts = [
        {n: optimizer.lr * g * clip / batch.num_labels for n, g in gradient.items()}
        for gradient in kept["gradients"]
    ]
    factor = optimizer.lr * optim.weight_decay
    decay = {n: p * factor * (p.dim() > 1) for n, p in displacement.before.items()}
    moved = displacement.moved()
    momentum = {n: moved[n] - decay[n] - sum(part[n] for part in parts) for n in moved}

    def bend(vector):
        return hessian_product(model, displacement.before, target, vector)

    return [*parts, momentum, decay], sgd_parts, kept["aim"].direction, bend


def enumerated(parts, gradient, bend):
    """Shapley values of U(S) = <grad, d_S> - d_S H d_S / 2 by enumeration of all coalitions; bend None = linear."""
    num = len(parts)
    linear = np.array([inner(gradient, part) for part in parts])
    pairs = np.zeros((num, num))
    if bend is not None:
        bent = [bend(part) for part in parts]
        pairs = np.array([[inner(part, other) for other in bent] for part in parts])
    utilities = {}
    for mask in range(1 << num):
        inside = np.array([mask >> k & 1 for k in range(num)], dtype=float)
        utilities[mask] = float(linear @ inside - inside @ pairs @ inside / 2)
    return exact_shapley(utilities, num)


@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
def test_credits_are_the_shapley_values_of_the_step(tmp_path, optim):
    """Enumeration over records, momentum and decay: first order is exact for the linear utility, second for the quadratic."""
    forms = ("first", "second", "sgd", "sgd_second")
    model, plan, target = setting(tmp_path)
    *_, done = credited_steps(model, plan, target, optim, 3, forms=forms)
    parts, sgd_parts, gradient, bend = players(tmp_path, optim, 3)
    count = len(sgd_parts)
    assert 3 <= count <= 9
    wanted = {
        "first": enumerated(parts, gradient, None)[:count],
        "second": enumerated(parts, gradient, bend)[:count],
        "sgd": enumerated(sgd_parts, gradient, None),
        "sgd_second": enumerated(sgd_parts, gradient, bend),
    }
    for form, values in wanted.items():
        np.testing.assert_allclose(
            done.credits_S[form], values, rtol=1e-8, atol=1e-12, err_msg=form
        )
    assert np.abs(wanted["second"] - wanted["first"]).max() > 1e-6, "the curvature should matter"


def test_hessian_product_equals_finite_differences(tmp_path):
    """H v by double backward is the central difference of the gradient, to 1e-7, and H is symmetric."""
    model, _, target = setting(tmp_path)
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    v, w = (
        {
            n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for n, p in named.items()
        }
        for _ in range(2)
    )
    product = hessian_product(model, named, target, v)
    step, sides = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(named[n] + sign * step * v[n])
        sides.append(aggregate_gradient(model, target).direction)
    for n, got in product.items():
        want = (sides[0][n] - sides[1][n]) / (2 * step)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert inner(product, w) == pytest.approx(
        inner(hessian_product(model, named, target, w), v), rel=1e-9
    )
    with pytest.raises(GradientError, match="vector"):
        hessian_product(model, named, target, {})
    with pytest.raises(GradientError, match="predicted token"):
        hessian_product(model, named, [], v)


@pytest.mark.parametrize("form", ["trapezoid", "second"])
def test_second_order_forms_miss_the_third_order_only(tmp_path, form):
    """Half the step size: an eighth of what the form misses, against a quarter for the first order."""
    missed = []
    for lr in (4e-4, 2e-4):
        model, plan, target = setting(tmp_path)
        optim = dataclasses.replace(ADAMW, lr=lr, warmup_steps=0)
        books = next(iter(credited_steps(model, plan, target, optim, 1, forms=(form,)))).residual
        assert books.credit + books.momentum + books.decay + books.curvature == pytest.approx(
            books.drop, abs=1e-14
        )
        missed.append((books.curvature, books.curvature_first))
    (whole, whole_first), (half, half_first) = missed
    assert whole / half == pytest.approx(8, rel=0.25)
    assert whole_first / half_first == pytest.approx(4, rel=0.25)
    assert abs(whole) < abs(whole_first) / 5


def test_muon_is_credited_in_its_actual_update(tmp_path):
    """Without older gradients own and decay are the whole movement; later ones leave a momentum part; the weights are the trainer's."""
    model, plan, target = setting(tmp_path)
    steps = list(credited_steps(model, plan, target, MUON, 3, forms=("first",)))
    first, last = steps[0].residual, steps[-1].residual
    assert first.momentum == pytest.approx(0, abs=1e-12)
    assert abs(first.credit) > 1e-6
    assert abs(last.momentum) > 1e-6
    twin, plan, _ = setting(tmp_path)
    trained(twin, plan, MUON, 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_accumulation_changes_no_credit(tmp_path):
    """Two micro-batches give the credits of one to 1e-10: each piece's passes meet their own rows."""
    found = []
    for pieces in (1, 2):
        model, plan, target = setting(tmp_path, accumulation=pieces, rows=4)
        found.append(
            list(credited_steps(model, plan, target, ADAMW, 2, forms=("trapezoid", "second")))
        )
    for one, two in zip(*found, strict=True):
        for form in ("trapezoid", "second"):
            np.testing.assert_allclose(
                one.credits_S[form], two.credits_S[form], rtol=1e-9, atol=1e-12
            )


class Every:
    """A guard that refuses every third step."""

    def __init__(self):
        self.count = itertools.count(1)
        self.accept = lambda _loss, _norm: next(self.count) % 3 != 0


def test_a_step_that_the_guard_leaves_out_earns_nothing(tmp_path):
    """Nobody is credited for it, the loss stands, and the books of the run still telescope."""
    model, plan, target = setting(tmp_path)
    start = aggregate_gradient(model, target).loss
    steps = list(credited_steps(model, plan, target, ADAMW, 6, guard=Every()))
    assert [done.residual.updated for done in steps] == [True, True, False] * 2
    for done in steps[2::3]:
        assert not done.credits_S["trapezoid"].any()
        assert done.residual.drop == done.residual.credit == 0
    drops = math.fsum(done.residual.drop for done in steps)
    assert drops == pytest.approx(start - aggregate_gradient(model, target).loss, abs=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tied": False, "ffn_dim": 6},
        {"qk_norm": True, "num_experts": 4, "experts_per_token": 2, "expert_dim": 8},
    ],
    ids=["tied", "untied", "experts"],
)
def test_fused_dots_are_those_of_the_sites(tmp_path, shape):
    """Shared inputs and sums by width change no number: equal to site by site to 1e-12, also tied and with experts."""
    model = Transformer(dataclasses.replace(MODEL, **shape)).double()
    init_parameters(model, 3)
    batch = setting(tmp_path)[1].batch(0)
    generator = torch.Generator().manual_seed(1)
    direction = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in model.named_parameters()
    }
    capture = Capture(model)
    with capture:
        token_losses(model, batch).sum().backward()
    torch.testing.assert_close(
        token_dots(capture.sites, direction), capture.token_dots(direction), rtol=1e-12, atol=1e-12
    )


def test_large_float32_products_are_those_of_the_sites(tmp_path, monkeypatch):
    """The product that large float32 matrices take gives the numbers of the sites, to float32 rounding."""
    monkeypatch.setattr(dots, "_LARGE", 0)
    model = Transformer(MODEL)
    init_parameters(model, 3)
    batch = setting(tmp_path)[1].batch(0)
    generator = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    capture = Capture(model)
    with capture:
        token_losses(model, batch).sum().backward()
    torch.testing.assert_close(
        token_dots(capture.sites, direction), capture.token_dots(direction), rtol=1e-4, atol=1e-5
    )


def make_run(folder, **config):
    """A run of the entry."""
    _, tokens = corpus(folder / "tokens", 30, seed=1)
    _, target = corpus(folder / "target", 5, seed=2)
    extra = {"target": "target", "target_digest": target} | config.pop("extra", {})
    settings = {"model": MODEL, "optim": ADAMW, "batch": BatchSpec(rows=2, length=12)} | config
    run = RunSpec(
        run="credit-test", kind="gradients", entry="valuation.inrun:train", seed=5, tokens="tokens", tokens_digest=tokens,
        steps=12, versions=no_versions(), config=RunConfig(**settings, extra=extra),
    )  # fmt: skip
    save_run(run, folder)
    return run


def test_the_entry_keeps_precision_guard_and_forms(tmp_path):
    """A float64 run with a nervous guard: skipped steps stand in events and books, every form has its column."""
    run = make_run(
        tmp_path,
        optim=dataclasses.replace(ADAMW, lr=1e-5),  # so losses differ by batch only
        precision="float64",
        guard=GuardSpec(window=4, threshold=0.5, limit=100),
        extra={"forms": ["second", "first"], "target_rows": 2},
    )
    assert train(run, tmp_path) == 0
    result = json.loads((tmp_path / "result.json").read_bytes())
    books = [json.loads(line) for line in (tmp_path / "residuals.jsonl").read_text().splitlines()]
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    assert result["skipped"] == len(events) == sum(not line["updated"] for line in books) > 0
    table = pq.read_table(tmp_path / "influence.parquet")
    assert table.column_names == [
        "record_id", "index", "credit", "credit_first", "credit_rescaled", "steps_seen", "tokens_seen",
    ]  # fmt: skip
    assert table.schema.metadata[b"forms"] == b"second,first"
    assert np.sum(table["credit"].to_numpy()) == pytest.approx(float(result["sum_credit"]))
    assert (table["credit_first"].to_numpy() != table["credit"].to_numpy()).any()
    progress = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert {"drop", "credit", "residual", "curvature", "target_loss"} <= set(progress[0])


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ({"precision": "bfloat16"}, SpecError, "precision"),
        ({"guard": GuardSpec(action="rollback")}, SpecError, "rollback|action"),
        ({"extra": {"forms": ["third"]}}, GradientError, "forms"),
        ({"extra": {"forms": []}}, GradientError, "forms"),
        ({"extra": {"forms": ["first", "first"]}}, GradientError, "forms"),
    ],
)
def test_settings_without_exact_credits_are_refused(tmp_path, config, error, reason):
    """bfloat16, rollback and unknown forms are errors that say what to do, before anything is written."""
    run = make_run(tmp_path, **config)
    with pytest.raises(error, match=reason):
        train(run, tmp_path)
    assert not (tmp_path / "result.json").exists()
