"""Baselines equal their formulas, and are bound to the data like every score."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import pack
from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from valuation.errors import GradientError
from valuation.influence.baselines import (
    bm25,
    embedding,
    entropy,
    mean_hidden,
    ngrams,
    random,
    words,
)
from valuation.influence.scores import TokenSet, bind

SPEC = ModelSpec(vocab_size=12, num_layers=2, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)


def tokens(*texts, first=0, length=8):
    records = [(i, bytes([first + i] * 32), np.array(text)) for i, text in enumerate(texts)]
    return TokenSet(tuple(records), length)


TRAIN = tokens([1, 2, 3], [1, 1, 4, 5], [6])
QUERIES = tokens([1, 4], [6, 6], [9], first=100)


def test_bm25_by_hand():
    """Three records of 3, 4, 1 terms; token 1 in two, token 4 in one, token 6 in one; k = 1.2, b = 0.75."""
    scores = bm25(TRAIN, QUERIES).scores_QN
    two, one = np.log(1 + 1.5 / 2.5), np.log(1 + 2.5 / 1.5)

    def gain(count, size):
        return count * 2.2 / (count + 1.2 * (0.25 + 0.75 * size / (8 / 3)))

    want = [
        [two * gain(1, 3), two * gain(2, 4) + one * gain(1, 4), 0],
        [0, 0, 2 * one * gain(1, 1)],
        [0, 0, 0],
    ]
    np.testing.assert_allclose(scores, want, rtol=1e-12)


def test_terms():
    """Runs of tokens, and words between separators, also at both ends."""
    assert ngrams(2)([1, 2, 3]) == [(1, 2), (2, 3)]
    assert ngrams(3)([1, 2]) == []
    assert words({0, 9})([0, 1, 2, 9, 9, 3]) == [(1, 2), (3,)]
    assert words(set())([1, 2]) == [(1, 2)]
    with pytest.raises(GradientError, match="at least 1"):
        ngrams(0)


@given(st.permutations(range(3)))
def test_the_order_of_records_does_not_matter(order):
    """Scores follow their records."""
    shuffled = dataclasses.replace(TRAIN, records=tuple(TRAIN.records[i] for i in order))
    one, two = bm25(TRAIN, QUERIES), bm25(shuffled, QUERIES)
    np.testing.assert_array_equal(one.scores_QN, two.scores_QN)
    assert one.binding == two.binding


@pytest.fixture(scope="module")
def model():
    made = Transformer(SPEC).double()
    init_parameters(made, 1)
    return made


def test_hidden_states_are_those_of_each_record_alone(model):
    """Packed, cut into several batches, or alone: the same mean to 1e-12."""
    long = tokens([1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 1, 2, 3], [4])
    for rows in (1, 16):
        found = mean_hidden(model, long, rows)
        for i, (*_, text) in enumerate(long.records):
            alone = pack([(0, bytes(32), text)], len(text)).tensors()
            with torch.no_grad():
                want = model.trunk(alone[0])[0][0].mean(0)
            np.testing.assert_allclose(found[i], want.numpy(), atol=1e-12)


def test_a_text_is_most_like_itself(model):
    """Cosine 1 with itself, at most 1 with others; a record without tokens is refused."""
    scores = embedding(model, TRAIN, dataclasses.replace(TRAIN)).scores_QN
    np.testing.assert_allclose(np.diagonal(scores), 1, atol=1e-12)
    assert (scores <= 1 + 1e-12).all()
    with pytest.raises(GradientError, match="at least one token"):
        embedding(model, tokens([1], []), QUERIES)


def test_entropy_is_blind_to_the_query_and_sees_noise():
    """Every row is the same, and a record of random tokens has more bits per token than those that repeat each other."""
    rng = np.random.default_rng(0)
    texts = [[1, 2, 3, 4] * 8 for _ in range(40)] + [rng.integers(1, 11, 32).tolist()]
    found = entropy(tokens(*texts, length=32), QUERIES, 12).scores_QN
    np.testing.assert_array_equal(found[0], found[2])
    assert found[0].argmax() == 40
    assert found[0, 40] > found[0, :40].max() + 1


def test_scores_are_bound(model):
    """With weights the checkpoint is in the binding, without it says "none"; random scores repeat with their generator."""
    assert embedding(model, TRAIN, QUERIES).binding == bind(model, TRAIN, QUERIES)
    lone = bm25(TRAIN, QUERIES).binding
    assert lone.checkpoint_root == "none"
    assert lone.tokens_digest == TRAIN.digest()
    one, two = (random(TRAIN, QUERIES, np.random.default_rng(3)).scores_QN for _ in range(2))
    np.testing.assert_array_equal(one, two)
