"""Claims about asking a model: batching changes no answer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import END, MODEL, documents

from trainer.errors import DataError
from trainer.generate import evaluate, generate, sequence_logprobs
from trainer.model import Transformer, init_parameters


@pytest.fixture(scope="module")
def model():
    """A model in float64 with large weights, so that its answers differ."""
    model = Transformer(MODEL)
    init_parameters(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model.double().eval()


def _greedy(model, prompt, count):
    """The oracle: the whole sequence again for every token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_cached_batched_decoding_is_greedy_decoding(model):
    """Oracle: 30 prompts of mixed lengths get the answers of the naive loop, in their order."""
    prompts = documents(30, seed=1, longest=12)
    assert generate(model, prompts, 6) == [_greedy(model, prompt, 6) for prompt in prompts]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(8)))
def test_an_answer_does_not_depend_on_its_neighbours(model, order):
    """Law: permuting the prompts permutes the answers."""
    prompts = documents(8, seed=2, longest=8)
    answers = generate(model, prompts, 4)
    assert generate(model, [prompts[i] for i in order], 4) == [answers[i] for i in order]


def test_a_stop_token_ends_an_answer(model):
    """The answer is cut before the first stop token; without one it has full length."""
    prompts = documents(20, seed=3, longest=8)
    free = generate(model, prompts, 8)
    stop = free[0][3]
    for short, full in zip(generate(model, prompts, 8, stop_token=stop), free, strict=True):
        assert short == (full[: full.index(stop)] if stop in full else full)
    assert generate(model, prompts, 0) == [[] for _ in prompts]
    assert generate(model, [], 5) == []


def test_log_probabilities_are_those_of_the_softmax(model):
    """Oracle: log_softmax of each sequence alone, gathered at its own next tokens."""
    sequences = [*documents(25, seed=4, longest=40), [5]]
    for sequence, got in zip(sequences, sequence_logprobs(model, sequences), strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([sequence])).log_softmax(-1)[0]
        want = [float(logp[t, token]) for t, token in enumerate(sequence[1:])]
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("batch_rows", [1, 3, 64])
def test_loss_per_record_is_the_sum_of_its_log_probabilities(model, batch_rows):
    """Sums of `evaluate` are those of `sequence_logprobs` for records that fit a row, whatever the batch size."""
    records = [np.array(doc, dtype=np.uint32) for doc in documents(40, seed=5, longest=30)]
    nll, tokens = evaluate(model, records, batch_rows, 48)
    want = [-logp.sum() for logp in sequence_logprobs(model, records)]
    np.testing.assert_allclose(nll, want, rtol=1e-10)
    assert tokens.tolist() == [len(record) - 1 for record in records]


def test_a_record_longer_than_a_row_keeps_all_its_labels(model):
    """Cut records lose context, never a label; empty records count nothing."""
    long = documents(1, seed=6, longest=59)[0] * 3
    nll, tokens = evaluate(model, [long, [], [END]], 4, 32)
    assert tokens.tolist() == [len(long) - 1, 0, 0]
    pieces = [
        sequence_logprobs(model, [long[k : k + 33]])[0].sum() for k in range(0, len(long) - 1, 32)
    ]
    assert nll[0] == pytest.approx(-sum(pieces), rel=1e-10)
    assert nll[1:].tolist() == [0, 0]


def test_empty_sequences_are_refused(model):
    """There is nothing to continue or to score."""
    with pytest.raises(DataError, match="at least one token"):
        generate(model, [[1], []], 2)
    with pytest.raises(DataError, match="at least one token"):
        sequence_logprobs(model, [[], [1]])
