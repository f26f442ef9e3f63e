"""Dot products by the vector route are those of one autograd pass per record."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from trainer.data import pack
from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from valuation.capture import Capture
from valuation.errors import GradientError
from valuation.gradients import aggregate_gradient, record_dots, token_losses

VOCAB = 23
LENGTH = 16


def tiny_model(*, tied=True, seed=0, dtype=torch.float64):
    """Two layers with grouped-query attention and gains away from one."""
    spec = ModelSpec(
        vocab_size=VOCAB,
        num_layers=2,
        dim=8,
        num_heads=2,
        num_kv_heads=1,
        ffn_dim=12,
        tied=tied,
    )
    model = Transformer(spec).to(dtype)
    init_parameters(model, seed)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=noise, dtype=torch.float64).to(dtype), alpha=0.2)
    return model


def random_records(rng, count, longest=2 * LENGTH):
    """Records of 1 to `longest` tokens; the longer ones are cut at row ends."""
    return [
        (
            10 * i,
            bytes([i]) * 32,
            rng.integers(0, VOCAB, rng.integers(1, longest + 1)).astype(np.uint32),
        )
        for i in range(count)
    ]


def naive_gradients(model, record):
    """The oracle: the record alone, unpacked, without padding, positions or documents."""
    names = [name for name, _ in model.named_parameters()]
    total = torch.zeros((), dtype=torch.float64)
    tokens = torch.from_numpy(record[2].astype(np.int64))
    for first in range(0, len(tokens), LENGTH):
        piece = tokens[first : first + LENGTH]
        labels = tokens[first + 1 : first + 1 + LENGTH]
        if len(labels):
            logits = model(piece[None])[0, : len(labels)]
            total = total + functional.cross_entropy(logits, labels, reduction="sum")
    if not total.requires_grad:
        return 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return total.item(), dict(
        zip(names, torch.autograd.grad(total, list(model.parameters())), strict=True)
    )


def naive_dot(gradients, direction):
    return sum((gradients[name] * direction[name]).sum().item() for name in gradients)


def random_direction(model, seed):
    noise = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=noise, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_packed_dots_equal_one_autograd_pass_per_record(tied):
    """Packing, cuts, masks, padding and (tied) embeddings change nothing beyond 1e-10."""
    model = tiny_model(tied=tied)
    records = random_records(np.random.default_rng(1), 12)
    directions = [random_direction(model, 5), random_direction(model, 6)]
    batch = pack(records, LENGTH)
    assert (batch.documents_BT == -1).any(), "the batch should hold padding"
    assert any(len(row) > 1 for row in batch.segments), "a row should hold several records"
    got = record_dots(model, [batch], directions)
    for place, record in enumerate(records):
        nll, gradients = naive_gradients(model, record)
        assert got.index_N[place] == record[0]
        assert got.nll_N[place] == pytest.approx(nll, abs=1e-10)
        assert got.labels_N[place] == len(record[2]) - 1
        for k, direction in enumerate(directions):
            assert got.dots_NK[place, k] == pytest.approx(
                naive_dot(gradients, direction), abs=1e-10, rel=1e-10
            )


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_alone_is_exact(tied):
    """A direction that is zero but for one parameter gives that parameter's own dot product."""
    model = tiny_model(tied=tied, seed=3)
    records = random_records(np.random.default_rng(2), 4)
    oracle = [naive_gradients(model, record)[1] for record in records]
    full = random_direction(model, 9)
    directions = [
        {m: v if m == name else torch.zeros_like(v) for m, v in full.items()} for name in full
    ]
    got = record_dots(model, [pack(records, LENGTH)], directions)
    for k, name in enumerate(full):
        want = [(gradients[name] * full[name]).sum().item() for gradients in oracle]
        np.testing.assert_allclose(got.dots_NK[:, k], want, rtol=1e-10, atol=1e-10, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_batch_size_changes_nothing(seed, rows):
    """Rows scored in batches of any size give the numbers of one batch."""
    model = tiny_model()
    batch = pack(random_records(np.random.default_rng(seed), 7), LENGTH)
    direction = random_direction(model, seed % 1000)
    parts = [batch.rows(start, start + rows) for start in range(0, len(batch.segments), rows)]
    whole, cut = record_dots(model, [batch], [direction]), record_dots(model, parts, [direction])
    np.testing.assert_array_equal(whole.index_N, cut.index_N)
    np.testing.assert_allclose(whole.dots_NK, cut.dots_NK, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(whole.nll_N, cut.nll_N, rtol=1e-12, atol=1e-12)


def test_dots_with_the_own_aggregate_sum_to_its_squared_norm():
    """sum_r <G_r, V> = labels * |V|^2 when V is the mean gradient of the same records."""
    model = tiny_model(seed=2)
    batch = pack(random_records(np.random.default_rng(4), 9), LENGTH)
    target = aggregate_gradient(model, [batch.rows(0, 2), batch.rows(2, 99)])
    got = record_dots(model, [batch], [target.direction])
    squared = sum(v.square().sum().item() for v in target.direction.values())
    assert got.dots_NK.sum() == pytest.approx(target.labels * squared, rel=1e-10)
    assert got.nll_N.sum() == pytest.approx(target.labels * target.loss, rel=1e-12)
    assert target.labels == got.labels_N.sum()


def test_float32_stays_close_to_float64():
    """In float32 the route loses no more than rounding: 1e-4 of the largest score."""
    records = random_records(np.random.default_rng(8), 10)
    scores = []
    for dtype in (torch.float64, torch.float32):
        model = tiny_model(dtype=dtype)
        scores.append(
            record_dots(model, [pack(records, LENGTH)], [random_direction(model, 1)]).dots_NK
        )
    assert np.abs(scores[0] - scores[1]).max() <= 1e-4 * np.abs(scores[0]).max()


def test_scoring_leaves_the_model_untouched():
    """No gradient accumulates, no hook stays, and a later pass captures nothing."""
    model = tiny_model()
    batch = pack(random_records(np.random.default_rng(0), 3), LENGTH)
    record_dots(model, [batch], [aggregate_gradient(model, [batch]).direction])
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_dots_survive_a_weight_update():
    """Scores asked after the optimiser stepped are those of the weights that made the gradients."""
    model = tiny_model()
    batch = pack(random_records(np.random.default_rng(0), 5), LENGTH)
    direction = random_direction(model, 2)
    capture = Capture(model)
    with capture:
        token_losses(model, batch).sum().backward()
    before = capture.token_dots(direction)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    torch.testing.assert_close(capture.token_dots(direction), before, rtol=0, atol=0)


def test_what_cannot_be_exact_is_refused():
    """A bias, an unknown module, a partial or misshaped direction and a missing pass are errors, not zeros."""
    with pytest.raises(GradientError, match=r"1.weight.*LayerNorm.*capture.SITES"):
        Capture(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    with pytest.raises(GradientError, match="Embedding"):
        Capture(nn.Embedding(3, 2, max_norm=1.0))
    model = tiny_model()
    batch = pack(random_records(np.random.default_rng(0), 3), LENGTH)
    direction = random_direction(model, 0)
    with pytest.raises(GradientError, match="mismatch"):
        record_dots(model, [batch], [{k: v for k, v in direction.items() if k != "norm.weight"}])
    with pytest.raises(GradientError, match="shape"):
        record_dots(model, [batch], [direction | {"norm.weight": torch.zeros(3)}])
    with pytest.raises(GradientError, match="got none"):
        Capture(model).token_dots(direction)
    capture = Capture(model)
    with capture:
        token_losses(model, batch)
    with pytest.raises(GradientError, match="backward"):
        capture.token_dots(direction)
    with pytest.raises(GradientError, match="at least one"):
        aggregate_gradient(model, [pack([(0, b"", np.array([1]))], LENGTH)])


def test_no_batches_give_no_records():
    """An empty list of batches is an empty result, not an error."""
    got = record_dots(tiny_model(), [], [])
    assert got.index_N.shape == (0,)
    assert got.dots_NK.shape == (0, 0)
