"""Scores are exact, independent of how the passes are made, and refuse other data than their own."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from valuation_models import LENGTH, VOCAB, autograd, jacobian, summed_loss, tiny_model, token_set

from valuation.errors import GradientError
from valuation.influence import Scores, TokenSet, bind, dot
from valuation.influence.pairing import Pass


@pytest.mark.parametrize("tied", [True, False])
def test_dot_and_cosine_equal_autograd(tied):
    """Both are those of one autograd pass per record, to 1e-10."""
    rng, model = np.random.default_rng(3), tiny_model(tied=tied)
    train, queries = token_set(rng, 7), token_set(rng, 3, first=100)
    left, right = jacobian(model, queries), jacobian(model, train)
    want = (left @ right.T).numpy()
    got = dot.scores(model, train, queries)
    np.testing.assert_allclose(got.scores_QN, want, rtol=1e-10, atol=1e-10)
    cosine = want / np.outer(left.norm(dim=1), right.norm(dim=1))
    np.testing.assert_allclose(
        dot.scores(model, train, queries, cosine=True).scores_QN, cosine, rtol=1e-10, atol=1e-12
    )
    per_token = dot.scores(model, train, queries, per_token=True).scores_QN
    np.testing.assert_allclose(
        per_token, want / np.outer(queries.labels_N, train.labels_N), rtol=1e-10
    )


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 9))
def test_rows_and_order_of_records_change_nothing(seed, rows):
    """Any batch size, and records given in any order, give the same scores of the same records."""
    rng, model = np.random.default_rng(seed), tiny_model()
    train, queries = token_set(rng, 6, shortest=1), token_set(rng, 2, first=100)
    shuffled = TokenSet(tuple(train.records[i] for i in rng.permutation(6)), LENGTH)
    one, other = (
        dot.scores(model, train, queries),
        dot.scores(model, shuffled, queries, how=Pass(rows=rows)),
    )
    np.testing.assert_allclose(one.scores_QN, other.scores_QN, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(one.train_index_N, other.train_index_N)
    assert one.binding == other.binding


def test_positive_means_that_training_on_the_record_helps():
    """One small step on a record moves each query's loss by -lr times its score, to first order."""
    rng, model = np.random.default_rng(5), tiny_model()
    train, queries = token_set(rng, 3), token_set(rng, 2, first=100)
    scores = dot.scores(model, train, queries).scores_QN
    step, before = 1e-6, [p.detach().clone() for p in model.parameters()]

    base = [summed_loss(model, q).item() for q in queries.records]
    for n, record in enumerate(train.records):
        grads = autograd(model, record).values()
        with torch.no_grad():
            for p, old, g in zip(model.parameters(), before, grads, strict=True):
                p.copy_(old - step * g)
        fall = [
            (b - summed_loss(model, q).item()) / step
            for b, q in zip(base, queries.records, strict=True)
        ]
        np.testing.assert_allclose(fall, scores[:, n], rtol=1e-3, atol=1e-2)


def test_scores_are_refused_for_anything_but_their_own_data(tmp_path):
    """Each of the five digests is checked, and a changed file is refused."""
    rng, model = np.random.default_rng(0), tiny_model()
    train, queries = token_set(rng, 3), token_set(rng, 2, first=100)
    scores = dot.scores(model, train, queries)
    scores.save(tmp_path)
    again = Scores.load(tmp_path, bind(model, train, queries))
    np.testing.assert_array_equal(again.scores_QN, scores.scores_QN)
    assert again.record_ids == scores.record_ids
    for item in dataclasses.fields(scores.binding):
        other = dataclasses.replace(scores.binding, **{item.name: "f" * 64})
        with pytest.raises(GradientError, match=rf"{item.name}: expected f+, got"):
            Scores.load(tmp_path, other)
    index, record_id, tokens = train.records[1]
    changed = TokenSet(
        (train.records[0], (index, record_id, (tokens + 1) % VOCAB), train.records[2]), LENGTH
    )
    with pytest.raises(GradientError, match="tokens_digest"):
        scores.require(bind(model, changed, queries))
    with torch.no_grad():
        model.norm.weight[0] += 1
    with pytest.raises(GradientError, match="checkpoint_root"):
        scores.require(bind(model, train, queries))
    with pytest.raises(GradientError, match="tokenizer"):
        bind(
            model,
            dataclasses.replace(train, tokenizer_digest="a"),
            dataclasses.replace(queries, tokenizer_digest="b"),
        )
    data = dict(np.load(tmp_path / "scores.npz"))
    data["scores_QN"][0, 0] += 1
    np.savez(tmp_path / "scores.npz", **data)
    with pytest.raises(GradientError, match="altered"):
        Scores.load(tmp_path)


def test_bad_input_is_refused():
    """NaN weights, queries that predict nothing, records given twice and rows below one are errors, not zeros."""
    rng, model = np.random.default_rng(0), tiny_model()
    train, queries = token_set(rng, 3), token_set(rng, 2, first=100)
    with pytest.raises(GradientError, match="2 tokens or more"):
        dot.scores(model, train, TokenSet(((9, bytes(32), np.array([1])),), LENGTH))
    with pytest.raises(GradientError, match="at least one"):
        dot.scores(model, train, TokenSet((), LENGTH))
    with pytest.raises(GradientError, match="each once"):
        TokenSet((*train.records, train.records[0]), LENGTH)
    with pytest.raises(GradientError, match="32 bytes"):
        TokenSet(((0, b"short", np.array([1, 2])),), LENGTH)
    with pytest.raises(GradientError, match="rows"):
        dot.scores(model, train, queries, how=Pass(rows=0))
    with pytest.raises(GradientError, match="names"):
        dot.scores(model, train, queries, how=Pass(names=frozenset({"nothing"})))
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(GradientError, match=r"finite.*record indices"):
        dot.scores(model, train, queries)
    short = TokenSet((*train.records, (500, b"x" * 32, np.array([1]))), LENGTH)
    assert not dot.scores(tiny_model(), short, queries).scores_QN[:, -1].any()
