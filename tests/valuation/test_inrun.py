"""In-run credits are first-order shares of the true drop, and the books of every step close."""

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from trainer.data import BatchPlan, TokenStore, pack, write_tokens
from trainer.errors import DataError
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer, learning_rate
from trainer.spec import BatchSpec, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run
from trainer.step import train_step
from valuation.credit import rescale
from valuation.errors import GradientError
from valuation.gradients import aggregate_gradient, mean_loss
from valuation.inrun import credited_steps, target_sample, train

VOCAB = 31
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
OPTIM = OptimSpec(lr=0.01, warmup_steps=2, clip_norm=0.5)
BATCH = BatchSpec(rows=4, length=16)
REPOSITORY = Path(__file__).parents[2]


def read_influence(directory):
    """The columns of influence.parquet as arrays."""
    table = pq.read_table(directory / "influence.parquet")
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def sentence(rng, *, noise):
    """Counting in steps of three, or noise; ends with end-of-text."""
    count = int(rng.integers(4, 24))
    body = (
        rng.integers(0, VOCAB - 1, count)
        if noise
        else (rng.integers(30) + 3 * np.arange(count)) % (VOCAB - 1)
    )
    return [*body.tolist(), VOCAB - 1]


def write_corpus(folder, count, seed, noise_every=0):
    """`count` records; every `noise_every`-th is noise of the owner `noise`."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        noise = bool(noise_every) and i % noise_every == 0
        identity = hashlib.sha256(f"{seed} {i}".encode()).digest()
        records.append((i, identity, "noise" if noise else "counting", sentence(rng, noise=noise)))
    digest = write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip
    return TokenStore.open(folder), digest


def fresh_model(dtype=torch.float64):
    model = Transformer(MODEL).to(dtype)
    init_parameters(model, 1)
    return model


def setting(tmp_path, dtype=torch.float64):
    store, _ = write_corpus(tmp_path / "tokens", 24, seed=1, noise_every=3)
    target, _ = write_corpus(tmp_path / "target", 8, seed=2)
    return (
        fresh_model(dtype),
        BatchPlan(store, 7, BATCH),
        target_sample(target, 0, 6, BATCH.length, 4),
    )


def naive_segment_gradient(model, tokens):
    """Gradient of one segment's summed loss, alone in a pass; the last label may lie outside the segment."""
    inputs, labels = tokens
    logits = model(torch.tensor(inputs)[None])[0, : len(labels)]
    loss = functional.cross_entropy(
        logits, torch.tensor(labels, dtype=torch.int64), reduction="sum"
    )
    return torch.autograd.grad(loss, list(model.parameters()))


def test_credits_equal_the_naive_formula(tmp_path):
    """Three clipped AdamW steps: each credit is the formula with one autograd pass per segment, to 1e-10."""
    model, plan, target = setting(tmp_path)
    twin = fresh_model()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in twin.parameters()]
    beta1, beta2 = OPTIM.betas
    clipped = 0
    for step, done in enumerate(
        credited_steps(model, plan, target, OPTIM, 3, forms=("first", "sgd"))
    ):
        aim = list(aggregate_gradient(twin, target).direction.values())
        loss_before = mean_loss(twin, target)
        batch = plan.batch(step)
        pieces = []
        for row in batch.segments:
            for _, (index, _, first, count, _) in enumerate(row):
                tokens = plan.store.tokens(index).astype(np.int64)
                pieces.append(
                    (tokens[first : first + count], tokens[first + 1 : first + 1 + count])
                )
        per_segment = [naive_segment_gradient(twin, piece) for piece in pieces]
        total = [sum(parts) / batch.num_labels for parts in zip(*per_segment, strict=True)]
        norm = math.sqrt(sum(g.square().sum().item() for g in total))
        clip = min(1.0, OPTIM.clip_norm / (norm + 1e-6))
        clipped += clip < 1
        rate = learning_rate(step, OPTIM, 3)
        share = rate * clip * (1 - beta1) / (1 - beta1 ** (step + 1)) / batch.num_labels
        conditioned = []
        with torch.no_grad():
            for (m, v), g, p in zip(moments, total, twin.parameters(), strict=True):
                m.mul_(beta1).add_(g * clip, alpha=1 - beta1)
                v.mul_(beta2).add_((g * clip).square(), alpha=1 - beta2)
                scale = (v / (1 - beta2 ** (step + 1))).sqrt() + OPTIM.eps
                if p.dim() > 1:
                    p.mul_(1 - rate * OPTIM.weight_decay)
                p.sub_(rate * m / (1 - beta1 ** (step + 1)) / scale)
                conditioned.append(scale)
        for place, gradients in enumerate(per_segment):
            dots = [
                (a * g / d).sum().item()
                for a, g, d in zip(aim, gradients, conditioned, strict=True)
            ]
            plain = [(a * g).sum().item() for a, g in zip(aim, gradients, strict=True)]
            assert done.credits_S["first"][place] == pytest.approx(
                share * sum(dots), rel=1e-8, abs=1e-12
            )
            assert done.credits_S["sgd"][place] == pytest.approx(
                rate * clip / batch.num_labels * sum(plain), rel=1e-8, abs=1e-12
            )
        assert done.residual.clip_factor == pytest.approx(clip, rel=1e-10)
        assert done.residual.drop == pytest.approx(loss_before - mean_loss(twin, target), abs=1e-10)
    assert clipped, "the clip factor should have been at work"


def test_the_books_close(tmp_path):
    """The drop is credit + momentum + decay + curvature per step; drops telescope; rescaled credits sum to the drop."""
    model, plan, target = setting(tmp_path)
    start = mean_loss(model, target)
    steps = list(credited_steps(model, plan, target, OPTIM, 6))
    for done in steps:
        line = done.residual
        assert line.credit + line.momentum + line.decay + line.curvature == pytest.approx(
            line.drop, abs=1e-14
        )
        assert line.credit + line.residual == pytest.approx(line.drop, abs=1e-14)
        assert math.fsum(done.rescaled_S) == pytest.approx(line.drop, abs=1e-14)
    total = math.fsum(done.residual.drop for done in steps)
    assert total == pytest.approx(start - mean_loss(model, target), abs=1e-13)
    assert steps[0].residual.momentum == pytest.approx(0, abs=1e-15), (
        "the first step has no older gradients"
    )
    assert abs(steps[3].residual.momentum) > abs(steps[3].residual.credit), (
        "later ones are mostly momentum"
    )


def test_small_steps_leave_no_curvature(tmp_path):
    """Without momentum and decay the credits are the drop, up to an error of second order in the step size."""
    errors = []
    for lr in (1e-3, 1e-4):
        model, plan, target = setting(tmp_path)
        optim = OptimSpec(lr=lr, warmup_steps=0, betas=(0.0, 0.95), weight_decay=0.0, clip_norm=0.0)
        steps = credited_steps(model, plan, target, optim, 1, forms=("first",))
        line = next(iter(steps)).residual
        assert line.decay == 0
        assert line.momentum == pytest.approx(0, abs=1e-14)
        errors.append(abs(line.residual / line.drop))
    assert errors[0] < 0.2
    assert errors[1] < errors[0] / 5, (
        "ten times smaller steps: about ten times smaller relative error"
    )


def test_watching_does_not_change_the_training(tmp_path):
    """Weights after credited steps are those of the trainer's own steps, bit for bit."""
    model, plan, target = setting(tmp_path, torch.float32)
    for _ in credited_steps(model, plan, target, OPTIM, 5):
        pass
    twin = fresh_model(torch.float32)
    optimizer, objective = build_optimizer(twin, OPTIM), LanguageModelling(plan)
    for step in range(5):
        optimizer.lr = learning_rate(step, OPTIM, 5)
        batch = objective.batch(step, 0, 1)
        train_step(
            twin, optimizer, objective, batch, objective.counts(batch), clip_norm=OPTIM.clip_norm
        )
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_hidden_use_of_a_parameter_is_found(tmp_path):
    """A head called as a function escapes the hooks; the completeness control refuses instead of scoring zeros."""
    model, plan, target = setting(tmp_path)

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.blocks, self.norm, self.inner = (
                model.embed,
                model.blocks,
                model.norm,
                [model],
            )

        def forward(self, *batch):
            return functional.linear(self.inner[0].trunk(*batch)[0], self.embed.weight)

    with pytest.raises(GradientError, match="add up"):
        next(iter(credited_steps(Hidden(), plan, target, OPTIM, 1)))


sizes = st.floats(-10, 10).map(lambda x: x if abs(x) > 1e-9 else 0.0)


@given(st.lists(sizes, min_size=1, max_size=30), st.floats(-10, 10))
def test_rescaling_closes_the_sum_and_stays_bounded(credits_, drop):
    """For any credits: the sum is the drop, no credit moves by more than the residual, order among equals stays."""
    credit_S = np.array(credits_)
    rescaled_S = rescale(credit_S, drop, np.ones(len(credit_S)))
    assert math.fsum(rescaled_S) == pytest.approx(drop, abs=1e-9)
    assert np.abs(rescaled_S - credit_S).max() <= abs(drop - credit_S.sum()) + 1e-9


@given(
    st.lists(st.floats(1e-6, 10), min_size=1, max_size=30),
    st.floats(1e-6, 10),
    st.sampled_from([-1, 1]),
)
def test_rescaling_one_sign_is_multiplication(credits_, drop, sign):
    """When all credits have one sign the rule is the plain factor drop / sum."""
    credit_S = sign * np.array(credits_)
    want = credit_S * (sign * drop / credit_S.sum())
    np.testing.assert_allclose(
        rescale(credit_S, sign * drop, np.ones(len(credit_S))), want, rtol=1e-9, atol=1e-9
    )


def test_rescaling_without_any_credit_uses_the_weights():
    """All credits zero: the drop is shared by tokens."""
    np.testing.assert_allclose(rescale(np.zeros(2), 3.0, np.array([1.0, 2.0])), [1.0, 2.0])


def test_a_larger_target_sample_contains_the_smaller(tmp_path):
    """Samples are nested, whole records, and never empty."""
    store, _ = write_corpus(tmp_path / "target", 30, seed=2)
    seen = [
        {
            segment.index
            for part in target_sample(store, 3, rows, 16, 4)
            for row in part.segments
            for segment in row
        }
        for rows in (1, 4, 10**6)
    ]
    assert seen[0]
    assert seen[0] < seen[1] < seen[2]
    assert len(seen[2]) == 30


def test_a_target_sample_holds_no_empty_columns(tmp_path):
    """Columns that no row fills are left out, and loss and gradient are those of the padded rows, to 1e-12."""
    records = [
        (0, bytes([1] * 32), "ann", [1, 2, 3, 4, 30]),
        (1, bytes([2] * 32), "ann", [5, 6, 30]),
    ]
    write_tokens(
        tmp_path / "target", corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB,
        end_of_text=VOCAB - 1, records=records,
    )  # fmt: skip
    store = TokenStore.open(tmp_path / "target")
    (cut,) = target_sample(store, 3, 1, 16, 4)
    padded = pack([(i, store.record_id(i), store.tokens(i)) for i in (0, 1)], 16)
    assert cut.tokens_BT.shape == (1, 8)
    assert padded.tokens_BT.shape == (1, 16)
    got, want = (aggregate_gradient(fresh_model(), [batch]) for batch in (cut, padded))
    assert got.labels == want.labels == 6
    assert got.loss == pytest.approx(want.loss, rel=1e-12)
    for name, value in want.direction.items():
        torch.testing.assert_close(got.direction[name], value, rtol=1e-12, atol=1e-14)


def make_run(directory, steps=12, **extra):
    _, tokens = write_corpus(directory / "tokens", 60, seed=1, noise_every=3)
    _, target = write_corpus(directory / "target", 12, seed=2)
    run = RunSpec(
        run="inrun-test", kind="gradients", entry="valuation.inrun:train", seed=5, tokens="tokens",
        tokens_digest=tokens, steps=steps, versions=no_versions(),
        config=RunConfig(
            model=MODEL, optim=OPTIM, batch=BATCH,
            extra={"target": "target", "target_digest": target, "target_rows": 8} | extra,
        ),
    )  # fmt: skip
    save_run(run, directory)
    return run


def test_the_entry_runs_under_the_trainer(tmp_path):
    """`python -m trainer --run` writes progress, residuals, influence and result; a second run gives the same."""
    make_run(tmp_path)
    command = [sys.executable, "-m", "trainer", "--run", str(tmp_path / "run.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_bytes())
    table = read_influence(tmp_path)
    progress = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    books = [json.loads(line) for line in (tmp_path / "residuals.jsonl").read_text().splitlines()]
    assert result["status"] == "done"
    assert (
        [line["step"] for line in progress]
        == [line["step"] for line in books]
        == list(range(1, 13))
    )
    assert {"step", "loss", "tokens_per_s", "rss_bytes", "time"} <= set(progress[0])
    assert len(table["index"]) == 60
    assert table["credit_rescaled"].sum() == pytest.approx(
        sum(line["drop"] for line in books), abs=1e-12
    )
    assert float(result["sum_drop"]) == pytest.approx(
        sum(line["drop"] for line in books), abs=1e-12
    )
    assert table["credit"].sum() == pytest.approx(sum(line["credit"] for line in books), abs=1e-12)
    assert table["tokens_seen"].sum() == 12 * BATCH.rows * BATCH.length
    assert (table["steps_seen"] > 0).sum() > 50
    assert train(make_run(tmp_path), tmp_path) == 0
    again = read_influence(tmp_path)
    for name, values in table.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)
    assert json.loads((tmp_path / "result.json").read_bytes()) == result


def test_noise_earns_less_than_the_targets_own_language(tmp_path):
    """Positive and negative control: counting records help a counting target, noise does not (mean per token)."""
    run = make_run(tmp_path, steps=20, forms=["trapezoid", "first", "sgd"])
    assert train(run, tmp_path) == 0
    table = read_influence(tmp_path)
    noise_N = table["index"] % 3 == 0
    for column in ("credit", "credit_rescaled", "credit_first", "credit_sgd"):
        rate = table[column] / np.maximum(table["tokens_seen"], 1)
        assert rate[~noise_N].mean() > rate[noise_N].mean(), column


def test_settings_that_cannot_be_meant_are_refused(tmp_path):
    """Unknown or missing settings, an altered target and no steps are errors with the reason."""
    run = make_run(tmp_path)

    def with_config(**extra):
        return dataclasses.replace(run, config=dataclasses.replace(run.config, extra=extra))

    with pytest.raises(GradientError, match="extra"):
        train(with_config(), tmp_path)
    with pytest.raises(GradientError, match="extra"):
        train(with_config(target="target", surprise=1), tmp_path)
    with pytest.raises(GradientError, match="target_rows"):
        train(with_config(target="target", target_rows=0), tmp_path)
    with pytest.raises(DataError, match="digest"):
        train(with_config(target="target", target_digest="0" * 64), tmp_path)
    with pytest.raises(GradientError, match="steps"):
        train(dataclasses.replace(run, steps=0), tmp_path)
    assert not (tmp_path / "result.json").exists()
