"""Each method is its formula, computed densely in float64 from gradients that autograd made."""

import math

import numpy as np
import pytest
import torch
from valuation_models import autograd, flat, jacobian, summed_loss, tiny_model, token_set

from trainer.optim import AdamW
from trainer.spec import OptimSpec
from valuation.errors import GradientError
from valuation.influence import (
    TokenSet,
    datainf,
    dot,
    ekfac,
    ekfac_cg,
    factors,
    fisher,
    kfac,
    less,
    logra,
    tracin,
    trak,
)
from valuation.influence.features import features, ridge_products
from valuation.influence.gauss_newton import GaussNewton
from valuation.influence.pairing import PASS, Pass
from valuation.projection import OneSided, TwoSided

MIXTURE = {"num_experts": 3, "experts_per_token": 2, "expert_dim": 4}


def sets(seed=0, num=9, num_queries=3):
    rng = np.random.default_rng(seed)
    return token_set(rng, num), token_set(rng, num_queries, first=100)


def adam_checkpoint(model, train):
    """Two real steps of the trainer's AdamW, so that both moments are there."""
    optimizer = AdamW(dict(model.named_parameters()), OptimSpec())
    for record in train.records[:2]:
        optimizer.zero_grad()
        summed_loss(model, record).backward()
        optimizer.step()
    optimizer.zero_grad()
    return less.AdamCheckpoint.of(model, optimizer)


METHODS = {
    "dot": dot.scores,
    "cosine": lambda *a, how: dot.scores(*a, cosine=True, how=how),
    "tracin": lambda m, *a, how: tracin.scores(
        [m, tiny_model(seed=5)], *a, weights=[0.1, 0.2], how=how
    ),
    "trak": lambda m, *a, how: trak.scores([m], *a, projection=OneSided(0, 64), how=how),
    "trak dense": lambda m, *a, how: trak.scores(
        [m], *a, projection=OneSided(0, 5, "dense"), how=how
    ),
    "datainf": datainf.scores,
    "logra": lambda *a, how: logra.scores(*a, projection=TwoSided(0, 3, 4), how=how),
    "fisher": fisher.scores,
    "kfac": kfac.scores,
    "ekfac": ekfac.scores,
    "ekfac sampled": lambda *a, how: ekfac.scores(*a, generator=np.random.default_rng(1), how=how),
    "ekfac_cg": lambda *a, how: ekfac_cg.scores(*a, steps=3, how=how),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_batches_order_and_packing_change_nothing(method):
    """Any number of rows, hence any packing and padding, and records in any order: equal to 1e-8 of the largest score."""
    model, (train, queries) = tiny_model(), sets()
    shuffled = TokenSet(tuple(reversed(train.records)), train.length)
    one = method(model, train, queries, how=Pass(rows=50))
    two = method(model, shuffled, queries, how=Pass(rows=1))
    assert one.method == two.method
    np.testing.assert_array_equal(one.train_index_N, two.train_index_N)
    error = np.abs(one.scores_QN - two.scores_QN).max()
    assert error <= 1e-8 * np.abs(one.scores_QN).max()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_query_that_is_a_record_ranks_it_high(method):
    """Every method gives a record a positive influence on itself."""
    model, (train, _) = tiny_model(), sets()
    scores = method(model, train, train, how=PASS).scores_QN
    assert (np.diagonal(scores) > 0).all()


def test_tracin_is_the_weighted_sum_of_dots():
    """sum_c lr_c <g_q(w_c), g_n(w_c)>, with autograd's gradients."""
    models, (train, queries) = [tiny_model(seed=s) for s in (1, 2)], sets()
    want = sum(
        w * jacobian(m, queries) @ jacobian(m, train).T
        for m, w in zip(models, (0.5, 2.0), strict=True)
    )
    got = tracin.scores(models, train, queries, weights=[0.5, 2.0])
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(GradientError, match="weight"):
        tracin.scores(models, train, queries, weights=[1.0])


def test_fisher_is_the_dense_inverse():
    """(J^T J / N + lam I)^-1 by a solve of the parameters' size."""
    model, (train, queries) = tiny_model(), sets()
    J, JQ = jacobian(model, train), jacobian(model, queries)
    F = J.T @ J / len(J)
    lam = 1.0 * torch.trace(F) / len(J)
    want = JQ @ torch.linalg.solve(F + lam * torch.eye(len(F), dtype=torch.float64), J.T)
    np.testing.assert_allclose(fisher.scores(model, train, queries).scores_QN, want, rtol=1e-8)


def test_datainf_is_its_closed_form_per_layer():
    """sum_l (1/lam) [<q, n> - mean_i <q, i><i, n> / (lam + |i|^2)], from formed gradients."""
    model, (train, queries) = tiny_model(), sets()
    grads, grads_q = (
        [autograd(model, r) for r in train.records],
        [autograd(model, r) for r in queries.records],
    )
    want = 0.0
    for name, p in model.named_parameters():
        J, JQ = (torch.stack([g[name].flatten() for g in gs]) for gs in (grads, grads_q))
        lam = 0.1 * J.square().sum() / len(J) / p.numel()
        inner = torch.stack(
            [
                torch.linalg.inv(
                    torch.outer(j, j) + lam * torch.eye(p.numel(), dtype=torch.float64)
                )
                for j in J
            ]
        )
        want = want + JQ @ inner.mean(0) @ J.T
    np.testing.assert_allclose(datainf.scores(model, train, queries).scores_QN, want, rtol=1e-7)


@pytest.mark.parametrize(("kind", "size"), [("sparse", 40), ("dense", 6)])
def test_trak_is_ridge_regression_on_projected_gradients(kind, size):
    """phi_q^T (Phi^T Phi + lam I)^-1 phi_n for k above and below N, averaged over models."""
    models, (train, queries) = [tiny_model(seed=s) for s in (1, 2)], sets()
    projection, want = OneSided(3, size, kind), 0.0
    for model in models:
        P = torch.cat(
            [
                projection.project(n, torch.eye(p.numel(), dtype=torch.float64))
                for n, p in model.named_parameters()
            ]
        )
        Phi, PhiQ = jacobian(model, train) @ P, jacobian(model, queries) @ P
        inner = Phi.T @ Phi
        lam = 0.1 * torch.trace(inner) / size
        want = (
            want
            + PhiQ
            @ torch.linalg.solve(inner + lam * torch.eye(size, dtype=torch.float64), Phi.T)
            / 2
        )
    got = trak.scores(models, train, queries, projection=projection)
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-7, atol=1e-10)


def test_trak_without_ridge_is_refused_where_the_inverse_does_not_exist():
    """K > n, and dependent features, are errors; a peer's default ranks at random there."""
    model, (train, queries) = tiny_model(), sets()
    with pytest.raises(GradientError, match=r"ridge.*64 features of 9 records"):
        trak.scores([model], train, queries, projection=OneSided(0, 64), ridge=0.0)
    phi = np.ones((9, 3))
    with pytest.raises(GradientError, match="dependent"):
        ridge_products(phi, phi, 0.0)
    with pytest.raises(GradientError, match="at least one"):
        trak.scores([], train, queries)


def test_influence_on_ridge_regression_is_one_minus_leverage_times_the_truth():
    """Leaving record n out moves the prediction at q by -tau r_n / (1 - tau_nn): retrained exactly, to 1e-10."""
    rng = np.random.default_rng(4)
    X, XQ, y = rng.normal(size=(12, 4)), rng.normal(size=(3, 4)), rng.normal(size=12)
    lam = 0.3 * np.square(X).sum() / 4

    def prediction(kept):
        inner = X[kept].T @ X[kept] + lam * np.eye(4)
        return np.linalg.solve(inner, X[kept].T @ y[kept])

    theta, everyone = prediction(np.arange(12)), np.arange(12)
    residual, leverage = y - X @ theta, np.diagonal(ridge_products(X, X, 0.3))
    tau = ridge_products(XQ, X, 0.3)
    for n in range(12):
        truth = XQ @ (prediction(np.delete(everyone, n)) - theta)
        influence = -tau[:, n] * residual[n]
        np.testing.assert_allclose(influence, (1 - leverage[n]) * truth, rtol=1e-9, atol=1e-12)


def test_logra_is_the_damped_inverse_of_projected_gradients():
    """Per parameter, P_o G P_i^T from autograd's G, then (F + c mean diag)^-1; gains are not projected."""
    model, (train, queries) = tiny_model(**MIXTURE), sets()
    projection, want = TwoSided(1, 3, 2), 0.0
    phi = features(model, train, projection, PASS)
    phi_q = features(model, queries, projection, PASS)
    for name, p in model.named_parameters():
        F = phi[name].T @ phi[name] / len(phi[name])
        damped = F + 0.1 * np.trace(F) / len(F) * np.eye(len(F))
        want = want + phi_q[name] @ np.linalg.solve(damped, phi[name].T)
        G = np.stack([autograd(model, r)[name].numpy() for r in train.records])
        if p.dim() == 1:
            np.testing.assert_allclose(phi[name], G, rtol=1e-10, atol=1e-12)
    got = logra.scores(model, train, queries, projection=projection)
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-8)


def test_less_is_the_cosine_with_an_adam_step():
    """Gamma is what the trainer's AdamW would have moved by, from the record's own mean gradient."""
    model, (train, queries) = tiny_model(), sets()
    checkpoint = adam_checkpoint(model, train)
    got = less.scores([checkpoint], train, queries)
    b1, b2 = checkpoint.betas
    t = checkpoint.count + 1
    m, v = flat(checkpoint.first), flat(checkpoint.second)
    J, JQ = (
        jacobian(model, train) / torch.from_numpy(train.labels_N)[:, None],
        jacobian(model, queries),
    )
    Gamma = ((b1 * m + (1 - b1) * J) / (1 - b1**t)) / (
        ((b2 * v + (1 - b2) * J**2) / (1 - b2**t)).sqrt() + checkpoint.eps
    )
    want = checkpoint.lr * torch.nn.functional.cosine_similarity(JQ[:, None], Gamma[None], dim=-1)
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-7)
    bare = less.AdamCheckpoint(
        model=model, lr=1.0, first={}, second={}, count=0, betas=(0.9, 0.99), eps=1e-8
    )
    with pytest.raises(GradientError, match="both moments"):
        less.scores([bare], train, queries)
    with pytest.raises(GradientError, match="at least one"):
        less.scores([], train, queries)


def dense_gauss_newton(model, train):
    """(1/N) sum J^T (diag p - p p^T) J, one record, row and position after another."""
    named = dict(model.named_parameters())
    total = 0.0
    for _, _, tokens in train.records:
        for start in range(0, len(tokens), train.length):
            piece = torch.from_numpy(tokens[start : start + train.length].astype(np.int64))
            num = min(len(piece), len(tokens) - 1 - start)
            for t in range(num):
                logits = model(piece[None])[0, t]
                p = logits.detach().softmax(-1)
                rows = [
                    flat(
                        dict(
                            zip(
                                named,
                                torch.autograd.grad(z, list(named.values()), retain_graph=True),
                                strict=True,
                            )
                        )
                    )
                    for z in logits
                ]
                J = torch.stack(rows)
                total = total + J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
    return total / len(train.records)


@pytest.mark.parametrize("shape", [{}, MIXTURE], ids=["tied", "experts"])
def test_gauss_newton_products_and_cg_equal_the_dense_matrix(shape):
    """G v to 1e-9, and, given enough steps, (G + D)^-1 g by a dense solve; no steps at all is EK-FAC."""
    model = tiny_model(**shape)
    rng = np.random.default_rng(2)
    train, queries = token_set(rng, 3, longest=7), token_set(rng, 2, longest=5, first=100)
    G = dense_gauss_newton(model, train)
    noise = torch.Generator().manual_seed(0)
    v = {
        n: torch.randn(2, *p.shape, generator=noise, dtype=torch.float64)
        for n, p in model.named_parameters()
    }
    product = GaussNewton(model, train, Pass(rows=1)).product(v)
    flat_v, flat_product = (torch.cat([x.flatten(1) for x in d.values()], 1) for d in (v, product))
    torch.testing.assert_close(flat_product, flat_v @ G, rtol=1e-9, atol=1e-9)
    fitted = factors.fit(model, train, PASS)
    mean = {n: fitted.blocks[n].eigenvalues.mean().item() for n, _ in model.named_parameters()}
    D = torch.cat(
        [
            torch.full((p.numel(),), 10 * mean[n], dtype=torch.float64)
            for n, p in model.named_parameters()
        ]
    )
    want = jacobian(model, queries) @ torch.linalg.solve(
        G + torch.diag(D), jacobian(model, train).T
    )
    got = ekfac_cg.scores(model, train, queries, damping=10, steps=60, factors=fitted)
    assert float(got.notes["residual"]) < 1e-6
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-5, atol=1e-6 * want.abs().max().item())
    few = ekfac_cg.scores(model, train, queries, damping=10, steps=2, factors=fitted)
    assert float(few.notes["residual"]) > float(got.notes["residual"])
    none = ekfac_cg.scores(model, train, queries, damping=0.1, steps=0, factors=fitted)
    np.testing.assert_allclose(
        none.scores_QN, ekfac.scores(model, train, queries, factors=fitted).scores_QN
    )
    with pytest.raises(GradientError, match="steps"):
        ekfac_cg.scores(model, train, queries, steps=-1)


@pytest.mark.parametrize("method", [ekfac, kfac, datainf, logra, fisher, ekfac_cg])
def test_no_damping_is_refused(method):
    """A singular matrix has no inverse, and zero damping would leave it so."""
    model, (train, queries) = tiny_model(), sets(num=2, num_queries=1)
    with pytest.raises(GradientError, match="damping"):
        method.scores(model, train, queries, damping=0.0)


def test_too_many_records_for_the_kernel_are_refused(monkeypatch):
    """The kernel grows with the square of the records."""
    monkeypatch.setattr(fisher, "MAX_RECORDS", 3)
    model, (train, queries) = tiny_model(), sets()
    with pytest.raises(GradientError, match="at most 3"):
        fisher.scores(model, train, queries)
    assert math.isfinite(dot.scores(model, train, queries).totals_N().sum())
