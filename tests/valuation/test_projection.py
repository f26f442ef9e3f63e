"""Projections keep inner products on average, for every layer shape, and depend on nothing but their seed."""

import math

import numpy as np
import pytest
import torch
from valuation_models import LENGTH, autograd, tiny_model, token_set

from trainer.data import pack
from valuation.capture import Capture
from valuation.errors import GradientError
from valuation.gradients import Segments, captured_pass
from valuation.projection import OneSided, TwoSided, _side

SEEDS = 1000
SHAPES = [(3, 40), (40, 3), (24, 24), (2, 7, 9)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_sided_products_are_unbiased_with_the_stated_variance(kind, shape):
    """Over 1000 seeds the mean is <x, y> within 4 standard errors, and the variance the formula's within 4 of its own.

    A projection scaled by the number of inputs in place of outputs misses the mean by the ratio of the two.
    """
    size = 8
    x, y = random(1, *shape), 0.5 * random(1, *shape) + random(1, *shape, seed=1)
    products = []
    for seed in range(SEEDS):
        projection = OneSided(seed, size, kind)
        products.append((projection.project("w", x) @ projection.project("w", y).T).item())
    truth, squares = (x * y).sum().item(), (x * x).sum().item() * (y * y).sum().item()
    variance = (squares + truth**2 - 2 * (x * x * y * y).sum().item()) / size
    assert abs(np.mean(products) - truth) < 4 * math.sqrt(variance / SEEDS)
    spread = np.square(np.array(products) - truth)
    error = spread.std() / math.sqrt(
        SEEDS
    )  # of the variance, with the kurtosis that the draws have
    assert abs(spread.mean() - variance) < 4 * error
    assert 4 * error < 0.5 * variance, "the test must be able to fail"


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20)], ids=str)
def test_two_sided_products_are_unbiased(shape):
    """Against the unprojected truth, for wide, tall and square layers alike, within 4 standard errors of 1000 seeds."""
    x, y = random(*shape), 0.5 * random(*shape) + random(*shape, seed=1)
    products = []
    for seed in range(SEEDS):
        out, into = _side(seed, "w", "rows", 6, shape[0]), _side(seed, "w", "columns", 6, shape[1])
        products.append((out @ x @ into.T * (out @ y @ into.T)).sum().item())
    error = np.std(products) / math.sqrt(SEEDS)
    assert abs(np.mean(products) - (x * y).sum().item()) < 4 * error
    assert 4 * error < 0.6 * (x * y).sum().item(), "the test must be able to fail"


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (4, 50)])
def test_entries_have_variance_one_over_rows(rows, columns):
    """Of both sides and of the dense kind: over the outputs, not the inputs."""
    entries = torch.cat([_side(seed, "w", "rows", rows, columns).flatten() for seed in range(200)])
    assert entries.var().item() == pytest.approx(1 / rows, rel=5 * math.sqrt(2 / len(entries)))
    dense = OneSided(0, rows, "dense").project("w", torch.eye(columns, dtype=torch.float64))
    torch.testing.assert_close(dense.square(), torch.full_like(dense, 1 / rows), rtol=1e-6, atol=0)
    sparse = OneSided(0, rows).project("w", torch.eye(columns, dtype=torch.float64))
    assert ((sparse != 0).sum(1) == 1).all()
    assert (sparse.square().sum(1) == 1).all()


@pytest.mark.parametrize(
    "shape", [{}, {"tied": False}, {"num_experts": 3, "experts_per_token": 2, "expert_dim": 4}]
)
def test_factors_are_projected_as_the_formed_gradient_would_be(shape):
    """P_o G P_i^T with G from autograd, for every kind of matrix, tied ones as the sum of both uses."""
    model, tokens = tiny_model(**shape), token_set(np.random.default_rng(3), 5)
    capture, batch = Capture(model), pack(tokens.records, LENGTH)
    captured_pass(model, batch, capture)
    projection = TwoSided(2, rows=5, columns=6)
    found = projection.features(capture, Segments.of(batch).groups())
    for name, p in model.named_parameters():
        G = torch.stack([autograd(model, r)[name] for r in tokens.records])
        if p.dim() > 1:
            out, into = (
                _side(2, name, "rows", 5, p.shape[-2]),
                _side(2, name, "columns", 6, p.shape[-1]),
            )
            G = G if out is None else out @ G
            G = G if into is None else G @ into.T
        torch.testing.assert_close(found[name], G.flatten(1), rtol=1e-9, atol=1e-10, msg=name)


def test_projections_depend_on_seed_and_parameter_only():
    """The same in any process and batch; other seeds, parameters and blocks are independent."""
    x = random(3, 70_000)  # more than one block of columns
    one = OneSided(1, 16).project("a", x)
    torch.testing.assert_close(
        OneSided(1, 16).project("a", x[1:2]), one[1:2], rtol=1e-12, atol=1e-12
    )
    assert not torch.equal(OneSided(2, 16).project("a", x), one)
    assert not torch.equal(OneSided(1, 16).project("b", x), one)
    # Golden: another generator or another order of draws would change stored features.
    for kind, want in (("sparse", [0.0, 5.0, 4.0, 6.0]), ("dense", [9.5, 9.5, -0.5, -3.5])):
        ramp = torch.arange(1.0, 7.0, dtype=torch.float64)[None]
        assert OneSided(7, 4, kind).project("w", ramp).tolist() == [want]
    first, second = (torch.zeros(1, 140_000, dtype=torch.float64) for _ in range(2))
    first[0, 5], second[0, 65_536 + 5] = 1, 1
    rows = [OneSided(s, 64).project("a", torch.cat([first, second])) for s in range(40)]
    assert len({int(r[0].argmax()) - int(r[1].abs().argmax()) for r in rows}) > 5, (
        "blocks must differ"
    )


def test_bad_sizes_are_refused():
    """A projection to nothing, or a negative seed."""
    with pytest.raises(GradientError, match="size"):
        OneSided(0, 0)
    with pytest.raises(GradientError, match="rows"):
        TwoSided(-1)
