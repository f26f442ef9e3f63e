"""The judge believes true scores, doubts random ones, and refuses scores and targets that don't belong."""

import dataclasses
import hashlib

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import write_tokens
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from valuation.detection import noise_tokens
from valuation.errors import EvaluationError, GradientError
from valuation.influence import dot
from valuation.influence.scores import TokenSet
from valuation.judgement import judge
from valuation.subsets import Setting, fit_subset

VOCAB = 31


def write(folder, tag, rows):
    records = [
        (i, hashlib.sha256(f"{tag} {i}".encode()).digest(), "ann", row)
        for i, row in enumerate(rows)
    ]
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip


def counting(rng, step, count):
    return [
        [*((rng.integers(VOCAB) + step * np.arange(19)) % (VOCAB - 1)), VOCAB - 1]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Records that count in threes, in sevens, and noise; four queries of each language."""
    folder, rng = tmp_path_factory.mktemp("judge"), np.random.default_rng(0)
    noise = [noise_tokens(20, VOCAB, VOCAB - 1, rng) for _ in range(16)]
    rows = counting(rng, 3, 16) + counting(rng, 7, 16) + noise
    target = [row[2:] for row in counting(rng, 3, 4) + counting(rng, 7, 4)]
    setting = Setting(
        train=folder / "train", train_digest=write(folder / "train", "train", rows),
        target=folder / "target", target_digest=write(folder / "target", "target", target),
        model=ModelSpec(vocab_size=VOCAB, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24),
        optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=8, length=20), epochs=4,
    )  # fmt: skip
    train, queries = (TokenSet.of(store, 20) for store in setting.stores())
    model = fit_subset(setting, np.ones(48, bool), 0).model
    return setting, dot.scores(model, train, queries), folder, rows


def with_scores(scores, scores_QN):
    return dataclasses.replace(scores, scores_QN=np.asarray(scores_QN, dtype=np.float64))


def test_true_scores_pass_and_their_negatives_fail(world):
    """Scores that name the query's own language foretell retraining; reversed they fail; noise is inconclusive or fails."""
    setting, scores, folder, _ = world
    language_N, language_Q = np.repeat([0, 1, 2], 16), np.repeat([0, 1], 4)
    true_QN = (language_N == language_Q[:, None]).astype(float)
    found = judge(with_scores(scores, true_QN), setting, folder, num_subsets=24, top_share=0.2)
    assert found.lds.low > 0
    assert found.top.gap.low > 0
    assert found.verdict in ("PASS", "INCONCLUSIVE")
    assert not found.control.distinct
    wrong = judge(with_scores(scores, -true_QN), setting, folder, num_subsets=24, top_share=0.2)
    assert wrong.verdict == "FAIL"
    assert wrong.top.gap.estimate < 0
    document = found.document()
    assert jcs(document)
    assert document["subsets"] == 24
    assert document["distinct_from_zero"] == int(found.values.distinct_N.sum())


def test_scores_of_other_data_are_refused(world):
    """Other tokens, queries or tokenizer in the binding: the item is named."""
    setting, scores, folder, _ = world
    for item in ("tokens_digest", "query_digest", "tokenizer_digest"):
        binding = dataclasses.replace(scores.binding, **{item: "1" * 64})
        other = dataclasses.replace(scores, binding=binding)
        with pytest.raises(GradientError, match=item):
            judge(other, setting, folder, num_subsets=10)


def test_a_target_in_the_training_data_is_refused(world):
    """One query that was trained on is enough, whatever its record id."""
    setting, _, folder, rows = world
    digest = write(folder / "leak", "leak", [rows[0][1:], rows[5], rows[7][3:]])
    leaky = dataclasses.replace(setting, target=folder / "leak", target_digest=digest)
    train, queries = (TokenSet.of(store, 20) for store in leaky.stores())
    model = fit_subset(setting, np.ones(48, bool), 0).model
    with pytest.raises(EvaluationError, match="1 of 3 that are, the first at index 1"):
        judge(dot.scores(model, train, queries), leaky, folder, num_subsets=10)


def test_too_few_subsets_are_refused(world):
    """Nine retrainings can't be ranked into a verdict."""
    setting, scores, folder, _ = world
    with pytest.raises(EvaluationError, match="at least 10"):
        judge(scores, setting, folder, num_subsets=9)
