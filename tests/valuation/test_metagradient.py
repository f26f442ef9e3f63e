"""Metagradients are the derivative of the final loss with respect to every record's weight, exactly."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from trainer.data import BatchPlan, TokenStore, write_tokens
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer, learning_rate
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from trainer.step import train_step
from valuation.errors import GradientError
from valuation.influence.scores import TokenSet
from valuation.metagradient import WeightedTraining, metagradients, scores, smoothness

VOCAB = 11
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
OPTIM = OptimSpec(lr=0.01, warmup_steps=2, clip_norm=0.5)


def setting(folder, *, optim=OPTIM, steps=5, eps_root=1e-6, count=8, model=MODEL):
    """A tiny float64 training, its records and two queries."""
    rng = np.random.default_rng(1)
    sets = []
    for part, num in (("tokens", count), ("target", 2)):
        records = [
            (i, hashlib.sha256(f"{part} {i}".encode()).digest(), "ann",
             [*rng.integers(0, VOCAB - 1, int(rng.integers(3, 8))).tolist(), VOCAB - 1])
            for i in range(num)
        ]  # fmt: skip
        write_tokens(
            folder / part, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
            records=records,
        )  # fmt: skip
        sets.append(TokenSet.of(TokenStore.open(folder / part), 12))
    network = Transformer(model).double()
    init_parameters(network, 3)
    plan = BatchPlan(TokenStore.open(folder / "tokens"), 7, BatchSpec(rows=2, length=12))
    return WeightedTraining(network, plan, optim, steps, eps_root=eps_root), *sets


def test_metagradients_equal_finite_differences_of_full_trainings(tmp_path):
    """Every record's derivative is the central difference of two trainings, to 1e-6, with clipping at work."""
    training, _, queries = setting(tmp_path)
    targets = [[queries.batch(range(q, q + 1))] for q in range(2)]
    got_QN, _ = metagradients(training, targets)
    step = 1e-5
    for r in range(len(training.index_N)):
        sides = []
        for sign in (1, -1):
            weight_N = training.ones()
            weight_N[r] += sign * step
            final = training.train(weight_N)
            sides.append([training.loss(final, target).item() for target in targets])
        want_Q = (np.array(sides[0]) - np.array(sides[1])) / (2 * step)
        np.testing.assert_allclose(
            got_QN[:, r], want_Q, rtol=1e-6, atol=1e-6 * np.abs(got_QN).max()
        )
    assert np.abs(got_QN).min() > 0, "every record took part"


def test_any_number_of_checkpoints_gives_the_same_bits_in_root_memory(tmp_path):
    """1, 2, sqrt and all checkpoints: equal bits; sqrt keeps at most 2 sqrt(N) + 1 states."""
    training, _, queries = setting(tmp_path, steps=9)
    target = [[queries.batch(range(2))]]
    results, peaks = [], []
    for checkpoints in (0, 1, 2, 9):
        results.append(metagradients(training, target, checkpoints=checkpoints)[0])
        peaks.append(training.peak_states)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    assert peaks[0] <= 2 * 3 + 1
    assert peaks[1] == 9, "one checkpoint keeps the whole training when it is replayed"


def test_the_training_is_the_trainers(tmp_path):
    """Without eps_root and with weights of 1 the final weights are those of the trainer's AdamW, to 1e-12."""
    training, _, _ = setting(tmp_path, eps_root=0.0)
    final = training.train()
    model = Transformer(MODEL).double()
    init_parameters(model, 3)
    optimizer, objective = build_optimizer(model, OPTIM), LanguageModelling(training.plan)
    for step in range(training.steps):
        optimizer.lr = learning_rate(step, OPTIM, training.steps)
        batch = objective.batch(step, 0, 1)
        train_step(
            model, optimizer, objective, batch, objective.counts(batch), clip_norm=OPTIM.clip_norm
        )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            training.weights_of(final)[name], parameter.detach(), rtol=1e-10, atol=1e-12
        )


def test_a_weight_of_zero_leaves_a_record_out(tmp_path):
    """Other tokens in a record of weight 0 change nothing; a weight of 1 would have shown them."""
    training, _, _ = setting(tmp_path)
    weight_N = training.ones()
    weight_N[3] = 0
    final = training.train(weight_N)
    batches = [training.plan.batch(step) for step in range(training.steps)]
    for batch in batches:
        for row, segments in enumerate(batch.segments):
            for segment in segments:
                if segment.index == 3:
                    part = slice(segment.column, segment.column + segment.count)
                    batch.tokens_BT[row, part] = 0
    training.plan.batch = batches.__getitem__
    for one, two in zip(final, training.train(weight_N), strict=True):
        assert torch.equal(one, two)
    assert not all(torch.equal(a, b) for a, b in zip(final, training.train(), strict=True))


def test_scores_have_the_promised_sign_and_binding(tmp_path):
    """Positive = leaving the record out raises the query's loss, checked by retraining; the sum of queries is their aggregate."""
    training, train, queries = setting(tmp_path, eps_root=1e-5)
    found = scores(training, train, queries)
    totals_N = found.totals_N()
    target = [queries.batch(range(2))]
    start = training.loss(training.train(), target).item()
    weight_N = training.ones()
    best = int(np.argmax(np.abs(totals_N)))
    weight_N[best] -= 0.01
    change = training.loss(training.train(weight_N), target).item() - start
    assert np.sign(change) == np.sign(totals_N[best])
    assert change == pytest.approx(0.01 * totals_N[best], rel=0.2)
    whole = scores(training, train, queries, aggregate=True)
    np.testing.assert_allclose(whole.totals_N(), totals_N, rtol=1e-9)
    assert found.binding == whole.binding
    some = scores(training, train.take([5, 1]), queries)
    np.testing.assert_array_equal(some.scores_QN, found.scores_QN[:, [1, 5]])


def test_smoothness_tells_a_smooth_training_from_a_rough_one(tmp_path):
    """Small steps are metasmooth, large ones without eps_root are less so."""
    rng = np.random.default_rng(0)
    smooth = smoothness(setting(tmp_path / "a", eps_root=1e-4)[0], rng, size=0.05)
    wild = dataclasses.replace(OPTIM, lr=0.5, clip_norm=0.0)
    rough = smoothness(setting(tmp_path / "b", optim=wild, eps_root=0.0, steps=12)[0], rng)
    assert smooth > 0.95
    assert rough < smooth


def test_what_has_no_metagradient_is_refused(tmp_path):
    """Muon, experts, bfloat16, no steps, strangers and checkpoints beyond the steps are errors."""
    training, train, queries = setting(tmp_path)
    model, plan = training.model, training.plan
    with pytest.raises(GradientError, match="adamw"):
        WeightedTraining(model, plan, dataclasses.replace(OPTIM, name="muon"), 3)
    experts = Transformer(
        dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_dim=8)
    )
    with pytest.raises(GradientError, match="mixture"):
        WeightedTraining(experts, plan, OPTIM, 3)
    with pytest.raises(GradientError, match="float32"):
        WeightedTraining(Transformer(MODEL).bfloat16(), plan, OPTIM, 3)
    with pytest.raises(GradientError, match="steps"):
        WeightedTraining(model, plan, OPTIM, 0)
    with pytest.raises(GradientError, match="checkpoints"):
        metagradients(training, [[queries.batch(range(2))]], checkpoints=99)
    stranger = TokenSet(
        ((99, bytes(32), np.array([1, 2, 3])),), 12, train.data_root, train.tokenizer_digest
    )
    with pytest.raises(GradientError, match="99"):
        scores(training, stranger, queries)
