"""Factors are the curvature's own eigenbases, and their inverse is the dense one where the form is exact."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from valuation_models import LENGTH, autograd, jacobian, tiny_model, token_set

from valuation.errors import GradientError
from valuation.influence import TokenSet, ekfac, factors, kfac
from valuation.influence.pairing import PASS, Pass

MIXTURE = {"num_experts": 3, "experts_per_token": 2, "expert_dim": 4, "shared_expert_dim": 4}


class Factorial(nn.Module):
    """Logits that don't depend on the input while `middle` is zero: then a is the token's alone, g the label's."""

    def __init__(self, vocab, inputs, outputs):
        super().__init__()
        noise = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=noise, dtype=torch.float64)  # noqa: E731
        self.embed = nn.Embedding(vocab, inputs, _weight=draw(vocab, inputs))
        self.middle = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
        self.head = nn.Linear(outputs, vocab, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.middle.weight.zero_()
            self.head.weight.copy_(draw(vocab, outputs))
        for frozen in (self.embed, self.head):
            frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens_BT, *_):
        """Logits; positions and documents have no part in them."""
        return self.head(self.middle(self.embed(tokens_BT)))


def every_pair(vocab):
    """One record of two tokens for each (input, label)."""
    records = [
        (vocab * x + y, bytes([x, y]) * 16, np.array([x, y]))
        for x in range(vocab)
        for y in range(vocab)
    ]
    return TokenSet(tuple(records), 2)


def dense(block):
    """The matrix that a block stands for, on flattened parameters."""
    K, O, I = block.eigenvalues.shape  # noqa: E741
    eye = torch.eye(K * O * I, dtype=torch.float64)
    turned = block.rotate(eye).flatten(1)
    return turned @ torch.diag(block.eigenvalues.flatten()) @ turned.T


@pytest.mark.parametrize("method", [kfac, ekfac])
def test_the_inverse_is_the_dense_one_where_the_form_is_exact(method):
    """With independent inputs and output gradients F is S (x) C, and both methods equal (F + damping)^-1 by a solve."""
    model, train = Factorial(5, 4, 3), every_pair(5)
    queries = TokenSet(
        tuple((100 + i, bytes([9, i]) * 16, np.array([i, 4 - i])) for i in range(3)), 2
    )
    J, JQ = (
        torch.stack([autograd(model, r)["middle.weight"].flatten() for r in s.records])
        for s in (train, queries)
    )
    F = J.T @ J / len(train.records)
    fitted = factors.fit(model, train, PASS, corrected=method is ekfac)
    np.testing.assert_allclose(dense(fitted.blocks["middle.weight"]), F, atol=1e-12)
    damped = F + 0.1 * torch.diagonal(F).mean() * torch.eye(len(F), dtype=torch.float64)
    want = JQ @ torch.linalg.solve(damped, J.T)
    got = method.scores(model, train, queries, how=Pass(rows=3)).scores_QN
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    with torch.no_grad():  # negative control: the form is no longer exact
        model.middle.weight.add_(0.5)
    J = torch.stack([autograd(model, r)["middle.weight"].flatten() for r in train.records])
    off = dense(factors.fit(model, train, PASS).blocks["middle.weight"]) - J.T @ J / len(J)
    assert off.abs().max() > 1e-3


@pytest.mark.parametrize(
    "shape", [{}, {"tied": False, "qk_norm": True}, MIXTURE], ids=["tied", "untied", "experts"]
)
def test_eigenvalues_are_mean_squares_of_the_documents_gradients(shape):
    """Lam = (1/N) sum_n (W^T G_n U)^2 with G_n by autograd, for every kind of parameter, and W, U are orthonormal."""
    model, train = tiny_model(**shape), token_set(np.random.default_rng(1), 9)
    fitted = factors.fit(model, train, Pass(rows=2))
    grads = [autograd(model, record) for record in train.records]
    for name, block in fitted.blocks.items():
        G = torch.stack([g[name] for g in grads])
        torch.testing.assert_close(
            block.eigenvalues, block.rotate(G).square().mean(0), rtol=1e-9, atol=1e-13, msg=name
        )
        for basis in (block.rows, block.columns):
            if basis is not None:
                eye = torch.eye(basis.shape[1], dtype=torch.float64).expand_as(basis)
                torch.testing.assert_close(basis.mT @ basis, eye, rtol=1e-10, atol=1e-10)
        F = dense(block)
        damped = F + 0.1 * block.eigenvalues.mean() * torch.eye(len(F), dtype=torch.float64)
        want = torch.linalg.solve(damped, G.flatten(1).T).T.view_as(G)
        torch.testing.assert_close(block.solve(G, 0.1), want, rtol=1e-8, atol=1e-10, msg=name)


def test_bases_are_those_of_the_layers_covariances():
    """W and U diagonalise S and C, which a hook on the layer and a loop over single records give."""
    model, train = tiny_model(tied=False), token_set(np.random.default_rng(4), 6, longest=LENGTH)
    block = factors.fit(model, train, PASS).blocks["blocks.0.ffn.w2.weight"]
    seen = {}
    layer = model.blocks["0"].ffn.w2
    layer.register_forward_hook(
        lambda _, a, out: (seen.update(a=a[0]), out.register_hook(lambda g: seen.update(g=g)))[0]
    )
    S, C = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    for record in train.records:
        tokens = torch.from_numpy(record[2])
        logits = model(tokens[None])[0, :-1]
        nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").backward()
        S, C = S + seen["g"][0].T @ seen["g"][0], C + seen["a"][0].T @ seen["a"][0]
    for covariance, basis in ((S, block.rows[0]), (C, block.columns[0])):
        turned = basis.T @ covariance @ basis
        assert (turned - torch.diag(turned.diagonal())).abs().max() < 1e-10 * turned.abs().max()


def test_ekfac_is_nearer_to_the_fisher_matrix_than_kfac_and_the_identity():
    """In Frobenius norm, over all blocks of a random model: the theorem of George et al., section 3."""
    model, train = tiny_model(tied=False), token_set(np.random.default_rng(2), 30)
    errors = {}
    for corrected in (True, False):
        fitted, start = factors.fit(model, train, PASS, corrected=corrected), 0
        J, total = jacobian(model, train), 0.0
        for name, p in model.named_parameters():
            F = J[:, start : start + p.numel()].T @ J[:, start : start + p.numel()] / len(J)
            total += (F - dense(fitted.blocks[name])).square().sum().item()
            start += p.numel()
        errors[corrected] = math.sqrt(total)
    assert errors[True] < errors[False]


def test_sampled_labels_do_not_depend_on_batches_and_average_to_the_true_fisher():
    """The same draws for any number of rows; their mean over seeds nears the Fisher matrix of the prediction."""
    model, train = tiny_model(), token_set(np.random.default_rng(3), 4)
    one = factors.fit(model, train, Pass(rows=1), generator=np.random.default_rng(7))
    many = factors.fit(model, train, Pass(rows=9), generator=np.random.default_rng(7))
    other = factors.fit(model, train, Pass(rows=9), generator=np.random.default_rng(8))
    for name, block in one.blocks.items():
        torch.testing.assert_close(
            block.eigenvalues.sum(), many.blocks[name].eigenvalues.sum(), rtol=1e-8, atol=0
        )
    assert (
        one.blocks["norm.weight"].eigenvalues.sum() != other.blocks["norm.weight"].eigenvalues.sum()
    )
    single = Factorial(4, 2, 2)
    train = TokenSet(((0, bytes(32), np.array([1, 2])),), 2)
    p = torch.full((4,), 0.25, dtype=torch.float64)
    head, a = single.head.weight, single.embed.weight[1]
    want = (
        sum(
            p[y] * (head.T @ (p - torch.eye(4, dtype=torch.float64)[y])).square().sum()
            for y in range(4)
        )
        * a.square().sum()
    )
    seeds = 400
    draws = [
        factors.fit(single, train, PASS, generator=np.random.default_rng(s))
        .blocks["middle.weight"]
        .eigenvalues.sum()
        .item()
        for s in range(seeds)
    ]
    error = np.std(draws) / math.sqrt(seeds)
    assert abs(np.mean(draws) - want.item()) < 4 * error  # 4 standard errors of 400 draws


def test_long_axes_keep_the_identity(monkeypatch):
    """Beyond MAX_SIDE an axis has no eigenbasis, and the eigenvalues are still exact."""
    monkeypatch.setattr(factors, "MAX_SIDE", 10)
    model, train = tiny_model(tied=False), token_set(np.random.default_rng(1), 5)
    block = factors.fit(model, train, PASS).blocks["head.weight"]
    G = torch.stack([autograd(model, r)["head.weight"] for r in train.records])
    assert block.rows is None
    torch.testing.assert_close(
        block.eigenvalues, block.rotate(G).square().mean(0), rtol=1e-9, atol=1e-12
    )


def test_factors_of_other_weights_or_records_are_refused():
    """Stale factors would give plausible numbers."""
    rng = np.random.default_rng(0)
    model, train, queries = tiny_model(), token_set(rng, 4), token_set(rng, 2, first=90)
    fitted = factors.fit(model, train, PASS)
    with pytest.raises(GradientError, match="tokens_digest"):
        ekfac.scores(model, train.take([0, 1]), queries, factors=fitted)
    with pytest.raises(GradientError, match="checkpoint_root"):
        ekfac.scores(tiny_model(seed=1), train, queries, factors=fitted)
    with pytest.raises(GradientError, match="damping"):
        ekfac.scores(model, train, queries, damping=0.0)
    with pytest.raises(GradientError, match="documents"):
        factors.fit(model, TokenSet((), 4), PASS)
