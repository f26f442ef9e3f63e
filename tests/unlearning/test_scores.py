"""Scores of one record against plain re-implementations of the published formulas on the same logits."""

import math
import zlib as compression

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.generate import generate
from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from unlearning import extraction, memberships
from unlearning.decoding import Prefix
from unlearning.positions import Positions, teacher_forced
from unlearning.scoring import MAX_LOSS, score_spans

SPEC = ModelSpec(vocab_size=30, num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=32)


@pytest.fixture(scope="module")
def model():
    """A small model that knows nothing, with logits far enough apart to decode."""
    model = Transformer(SPEC)
    init_parameters(model, 3)
    with torch.no_grad():
        model.embed.weight.mul_(8)
    return model.eval()


def random_spans(count, seed):
    """Spans of random tokens; every second one ends in what the model says."""
    generator = np.random.default_rng(seed)
    spans = {}
    for number in range(count):
        tokens = generator.integers(0, 30, generator.integers(4, 25)).tolist()
        spans[f"{number:02x}"] = (tokens, int(generator.integers(1, len(tokens))))
    return spans


@pytest.fixture(scope="module")
def scored(model):
    """Spans, some of which the model continues itself, with their positions."""
    spans = random_spans(40, 1)
    for name in list(spans)[::2]:
        tokens, first = spans[name]
        (said,) = generate(model, [tokens[: first + 1]], 4)
        spans[name] = ([*tokens[: first + 1], *said], first)
    return spans, teacher_forced(model, spans)


def logits_of(model, tokens, first):
    """Logits that predict the span, one sequence at a time, in float64."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0, first - 1 : -1].double().numpy()


def oracle(logits, truth):
    """All numbers of one span in loops over plain Python floats."""
    logprobs, greedy, means, deviations = [], [], [], []
    for row, true in zip(logits, truth, strict=True):
        top = max(row)
        total = sum(math.exp(x - top) for x in row)
        logp = [x - top - math.log(total) for x in row]
        mean = sum(math.exp(one) * one for one in logp)
        square = sum(math.exp(one) * one * one for one in logp)
        logprobs.append(logp[true])
        greedy.append(max(range(len(row)), key=lambda v: row[v]))
        means.append(mean)
        deviations.append(math.sqrt(square - mean * mean))
    return logprobs, greedy, means, deviations


def test_positions_are_those_of_each_span_alone(model, scored):
    """Batched, padded positions equal a loop over one sequence at a time, and carry the id they were asked with."""
    spans, positions = scored
    assert list(positions) == list(spans)
    for name, (tokens, first) in spans.items():
        logprobs, greedy, means, deviations = oracle(
            logits_of(model, tokens, first), tokens[first:]
        )
        assert positions[name].truth_T.tolist() == tokens[first:]
        assert positions[name].greedy_T.tolist() == greedy
        assert positions[name].logprob_T == pytest.approx(logprobs, abs=1e-5)
        assert positions[name].mean_T == pytest.approx(means, abs=1e-5)
        assert positions[name].deviation_T == pytest.approx(deviations, abs=1e-4)


def test_scores_do_not_depend_on_the_order_of_records(model, scored):
    """Ids, not places: the reversed mapping gives every record its own score."""
    spans, positions = scored
    again = teacher_forced(model, dict(reversed(spans.items())))
    for name in spans:
        assert extraction.secret_logprob(again[name]) == pytest.approx(
            extraction.secret_logprob(positions[name]), abs=1e-6
        )


def test_extraction_scores_equal_the_published_formulas(model, scored):
    """Exact memorisation, extraction strength, log-probability and leak@k against loops."""
    spans, positions = scored
    strengths = set()
    for name, (tokens, first) in spans.items():
        truth = tokens[first:]
        logprobs, greedy, _, _ = oracle(logits_of(model, tokens, first), truth)
        matches = [a == b for a, b in zip(greedy, truth, strict=True)]
        suffixes = [k for k in range(len(truth)) if all(matches[k:])]
        strength = 1 - suffixes[0] / len(truth) if suffixes else 0
        one = positions[name]
        strengths.add(strength)
        assert extraction.exact_memorisation(one) == pytest.approx(sum(matches) / len(matches))
        assert extraction.extraction_strength(one) == pytest.approx(strength)
        assert extraction.secret_logprob(one) == pytest.approx(
            sum(logprobs) / len(logprobs), abs=1e-5
        )
        assert extraction.leak_at_k(one, 16) == pytest.approx(
            1 - (1 - math.exp(sum(logprobs))) ** 16, rel=1e-3, abs=1e-12
        )
    assert {0.0} < strengths


def test_no_matching_suffix_is_no_extraction():
    """Trap of published code: a span whose last token is wrong has strength 0, not 1/T; all right is 1."""

    def said(truth, greedy):
        flat = np.zeros(len(truth))
        return Positions(np.array(truth), np.array(greedy), flat, flat, flat)

    assert extraction.extraction_strength(said([1, 2, 3, 4], [1, 2, 3, 9])) == 0.0
    assert extraction.extraction_strength(said([1, 2, 3, 4], [9, 9, 9, 4])) == 0.25
    assert extraction.extraction_strength(said([1, 2, 3, 4], [1, 2, 3, 4])) == 1.0
    assert extraction.extraction_strength(said([1], [2])) == 0.0


def test_membership_scores_equal_the_published_formulas(model, scored):
    """Loss, zlib, Min-K, Min-K++ and reference against loops; all higher for less likely members."""
    spans, positions = scored
    bigrams = memberships.Bigrams([[1, 2, 1, 2, 3]], 30)
    for name, (tokens, first) in spans.items():
        truth = tokens[first:]
        logprobs, _, means, deviations = oracle(logits_of(model, tokens, first), truth)
        kept = max(1, int(0.2 * len(truth)))
        loss = -sum(logprobs) / len(logprobs)
        standard = sorted((a - m) / d for a, m, d in zip(logprobs, means, deviations, strict=True))
        text = f"record {name} of some text".encode()
        expected = {
            "loss": loss,
            "zlib": loss / len(compression.compress(text)),
            "min_k": -sum(sorted(logprobs)[:kept]) / kept,
            "min_k_plus_plus": -sum(standard[:kept]) / kept,
            "reference": loss - bigrams.loss(tokens),
        }
        for score, value in expected.items():
            found = memberships.score_of(score, text, tokens, bigrams)(positions[name])
            assert found == pytest.approx(value, rel=1e-4, abs=1e-4), score


def test_bigrams_are_smoothed_counts():
    """p(2 | 1) = (2 + 1) / (2 + V) when 1 was followed by 2 twice; an unseen first token is uniform."""
    bigrams = memberships.Bigrams([[1, 2, 1, 2]], 10)
    assert bigrams.loss([1, 2]) == pytest.approx(-math.log(3 / 12))
    assert bigrams.loss([7, 1]) == pytest.approx(-math.log(1 / 10))


def test_truth_ratio_is_a_geometric_mean_and_has_two_forms():
    """Log TR against a plain product of probabilities; min(TR, 1/TR) and p/(p + q) as in TOFU."""

    def of(*logprobs):
        flat = np.zeros(len(logprobs))
        return Positions(flat.astype(int), flat.astype(int), np.array(logprobs), flat, flat)

    correct, wrong = of(-1.0, -2.0), [of(-3.0, -1.0), of(-4.0)]
    geometric = (math.exp(-2.0) * math.exp(-4.0)) ** 0.5
    ratio = geometric / math.exp(-1.5)
    log_ratio = extraction.log_truth_ratio(wrong, correct)
    assert log_ratio == pytest.approx(math.log(ratio))
    assert extraction.min_form(log_ratio) == pytest.approx(min(ratio, 1 / ratio))
    p_correct = math.exp(-1.5)
    assert extraction.prob_form(log_ratio) == pytest.approx(p_correct / (p_correct + geometric))
    assert extraction.prob_form(2000.0) == 0.0
    assert extraction.prob_form(-2000.0) == 1.0
    with pytest.raises(ValueError, match="wrong answer"):
        extraction.log_truth_ratio([], correct)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_rouge_l_recall_is_the_longest_common_subsequence(truth, said):
    """Against the recursive definition of a common subsequence."""

    def longest(a, b):
        if not a or not b:
            return 0
        if a[-1] == b[-1]:
            return longest(a[:-1], b[:-1]) + 1
        return max(longest(a[:-1], b), longest(a, b[:-1]))

    assert extraction.rouge_l_recall(truth, said) == longest(truth, said) / len(truth)


def test_exposure_counts_ranks_in_bits():
    """First of 101 is log2(101) bits, last is 0, ties count half."""
    others = np.linspace(-5.0, -1.0, 100)
    assert extraction.exposure(0.0, others) == pytest.approx(math.log2(101))
    assert extraction.exposure(-9.0, others) == pytest.approx(0.0)
    assert extraction.exposure(-2.0, np.full(100, -2.0)) == pytest.approx(math.log2(101 / 51))


def test_a_broken_model_gives_finite_scores(model):
    """Numbers that are none give the smallest log-probability and no match."""
    broken = Transformer(SPEC)
    torch.nn.init.constant_(broken.norm.weight, float("nan"))
    (one,) = teacher_forced(broken.eval(), {"a": ([1, 2, 3], 1)}).values()
    assert one.logprob_T.tolist() == [-MAX_LOSS] * 2
    assert extraction.exact_memorisation(one) == extraction.extraction_strength(one) == 0.0


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_a_shared_prefix_gives_the_scores_of_whole_sequences(model, kept):
    """Scores through the cache equal scores of prefix plus question, also for a part of the prefix."""
    generator = np.random.default_rng(5)
    prefix = generator.integers(0, 30, 7).tolist()
    questions = [
        (generator.integers(0, 30, n).tolist(), int(generator.integers(1, n)))
        for n in (2, 5, 9, 9, 3)
    ]
    if kept:
        questions.append(([4, 5, 6], 0))
    found = Prefix(model, prefix).scores(questions, kept)
    whole = score_spans(
        model, [[*prefix[:kept], *q] for q, _ in questions], [kept + f for _, f in questions]
    )
    assert found.loss_N == pytest.approx(whole.loss_N, abs=1e-5)
    assert found.exact_N.tolist() == whole.exact_N.tolist()


def test_greedy_sampling_is_the_decoder(model):
    """Temperature 0 after a prefix gives the trainer's greedy continuation in every row."""
    (expected,) = generate(model, [[1, 2, 3, 4, 5]], 6)
    generator = torch.Generator().manual_seed(0)
    for prefix, question in (([1, 2, 3], [4, 5]), ([], [1, 2, 3, 4, 5]), ([1, 2, 3, 4, 5], [])):
        said = Prefix(model, prefix).sampled(question, 3, 6, 0.0, generator)
        assert said.tolist() == [expected] * 3


def test_leak_at_k_is_what_sampling_finds(model):
    """4,000 samples of two tokens bring a secret out as often as the exact chance says, within four standard errors."""
    question, tries, temperature = [3, 1, 4], 4000, 0.7
    (secret,) = generate(model, [question], 2)
    spans = {"a": ([*question, *secret], 3)}
    chance = extraction.leak_at_k(teacher_forced(model, spans, temperature)["a"], 1)
    said = Prefix(model, question[:2]).sampled(
        question[2:], tries, 2, temperature, torch.Generator().manual_seed(1)
    )
    share = (said == torch.tensor(secret)).all(1).double().mean().item()
    assert 0.01 < chance < 0.9
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / tries)
