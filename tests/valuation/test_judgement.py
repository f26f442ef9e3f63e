"""The judge believes true scores, doubts random ones, and refuses scores and targets that don't belong."""

import dataclasses
import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from provenance.canonical import jcs
from trainer.data import write_tokens
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from valuation.detection import noise_tokens
from valuation.errors import EvaluationError, GradientError, HeldOutError
from valuation.evaluation import Estimate, spearman_rows
from valuation.influence import dot
from valuation.influence.scores import TokenSet
from valuation.judgement import Effort, estimate_of, judge, verdict_of
from valuation.judging import contradictions, rows_of
from valuation.subsets import Setting, fit_subset, random_subsets, retrain_subsets

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
    found = judge(
        with_scores(scores, true_QN), setting, folder, Effort(subsets=24, top_percent=20, draws=300)
    )
    assert found.lds.low > 0
    assert found.top.gap.low > 0
    assert found.verdict in ("PASS", "INCONCLUSIVE")
    assert not found.control.distinct
    wrong = judge(
        with_scores(scores, -true_QN),
        setting,
        folder,
        Effort(subsets=24, top_percent=20, draws=300),
    )
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
            judge(other, setting, folder, Effort(subsets=10))


def test_a_target_in_the_training_data_is_refused(world):
    """One query that was trained on is enough, whatever its record id."""
    setting, _, folder, rows = world
    digest = write(folder / "leak", "leak", [rows[0][1:], rows[5], rows[7][3:]])
    leaky = dataclasses.replace(setting, target=folder / "leak", target_digest=digest)
    train, queries = (TokenSet.of(store, 20) for store in leaky.stores())
    model = fit_subset(setting, np.ones(48, bool), 0).model
    with pytest.raises(HeldOutError, match=r"got 1 of target .*\('target', 1, \d+\)"):
        judge(dot.scores(model, train, queries), leaky, folder, Effort(subsets=10))


def test_too_few_subsets_have_no_verdict_and_fewer_than_two_are_refused(world):
    """Nine retrainings can't be ranked into a verdict, however good the scores; of one there is no order at all."""
    certain, nothing = Estimate(0.9, 0.8, 0.95), Estimate(0.0, -0.1, 0.1)
    assert verdict_of(9, certain, certain, nothing) == "INCONCLUSIVE"
    assert verdict_of(10, certain, certain, nothing) == "PASS"
    assert verdict_of(10, certain, certain, Estimate(0.5, 0.4, 0.6)) == "INVALID"
    with pytest.raises(EvaluationError, match="at least"):
        Effort(subsets=1)
    for again in ({"again": 1}, {"again": 61}, {"again": 10, "seeds": 2}):
        with pytest.raises(EvaluationError, match="again: expected 0, or"):
            Effort(**again)


def test_scores_of_a_sample_are_judged_on_the_sample(world):
    """With a third of the records and three queries no retraining reads another record, and the numbers have their size."""
    setting, scores, folder, _ = world
    records_K, queries_K = np.arange(0, 48, 3), np.array([1, 4, 6])
    part = dataclasses.replace(
        scores, scores_QN=scores.scores_QN[queries_K][:, records_K].copy(), train_index_N=records_K, query_index_Q=queries_K,
        record_ids=tuple(scores.record_ids[i] for i in records_K), query_ids=tuple(scores.query_ids[i] for i in queries_K),
    )  # fmt: skip
    train, queries = (
        TokenSet.of(store, 20, index)
        for store, index in zip(setting.stores(), (records_K, queries_K), strict=True)
    )
    binding = dataclasses.replace(
        scores.binding, tokens_digest=train.digest(), query_digest=queries.digest()
    )
    part = dataclasses.replace(part, binding=binding)
    seen = []

    def watched(setting, member_MN, *rest):
        seen.append(member_MN)
        return retrain_subsets(setting, member_MN, *rest)

    effort = Effort(
        subsets=4, seeds=2, top_percent=10, top_queries=2, random_sets=2, curve_percents=(25,), curve_seeds=2, draws=20
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("valuation.judgement.retrain_subsets", watched)
        patch.setattr("valuation.curves.retrain_subsets", watched)
        found = judge(part, setting, folder, effort, others={"flat": np.ones((3, 16))})
    outside = np.ones(48, dtype=bool)
    outside[records_K] = False
    assert not np.concatenate(seen)[:, outside].any()
    assert found.loss_RMQ.shape == (2, 4, 3)
    assert [arms.mode for arms in found.arms] == ["remove", "add"]
    assert list(found.beside) == ["bm25", "flat", "random"]
    assert found.verdict == "INCONCLUSIVE"
    document = found.document()
    assert jcs(document)
    assert (document["records"], document["queries"], document["top"]["queries"]) == (16, 3, 2)
    assert estimate_of(document["lds"]).estimate == pytest.approx(found.lds.estimate, abs=1e-6)
    # The rows are the numbers: LDS again from what was foretold and what was measured.
    rho_Q = spearman_rows(found.told[found.method], -found.loss_RMQ.mean(0).T)
    assert rho_Q.mean() == pytest.approx(found.lds.estimate, abs=1e-12)


def test_the_ceiling_comes_from_the_subsets_that_were_trained_twice(world):
    """By hand: the root of the mean rank correlation of two seeds' losses over the first ten subsets; of the whole target by their sums."""
    setting, scores, folder, _ = world
    effort = Effort(subsets=12, again=10, top_queries=0, draws=20)
    found = judge(scores, setting, folder, effort)
    assert (found.loss_RMQ.shape, found.again_KQ.shape) == ((1, 12, 8), (10, 8))
    first_KQ = found.loss_RMQ[0, :10]
    r = spearman_rows(first_KQ.T, found.again_KQ.T).mean()
    assert found.ceiling.each.estimate == pytest.approx(max(0, r) ** 0.5)
    (r,) = spearman_rows(first_KQ.sum(1)[None], found.again_KQ.sum(1)[None])
    assert found.ceiling.whole.estimate == pytest.approx(max(0, r) ** 0.5)
    # The second seed is the next one: what a judge of that seed measures of the same halves.
    half_MN = random_subsets(12, 48, 0.5, np.random.default_rng(0))[:10]
    again = retrain_subsets(setting, half_MN, 1, folder)
    np.testing.assert_array_equal(found.again_KQ, again.nll_MQ)
    without = judge(scores, setting, folder, dataclasses.replace(effort, again=0))
    assert without.ceiling is None
    assert without.document()["ceiling"] == "none"
    assert (without.lds, without.verdict) == (found.lds, found.verdict)


def test_values_of_the_whole_target_have_a_row_there_and_nowhere_else(world):
    """Loss of the halves is foretold by how much of the queries' languages they hold, and by a name that is taken it is refused."""
    setting, scores, folder, _ = world
    worth_N = np.repeat([1.0, 1.0, -1.0], 16)
    effort = Effort(subsets=24, top_queries=0, draws=200)
    whole = {"worth": worth_N, "flipped": -worth_N}
    found = judge(scores, setting, folder, effort, whole=whole)
    assert list(found.whole) == [scores.method, "bm25", "worth", "flipped", "random"]
    assert list(found.beside) == ["bm25", "random"]
    assert found.whole["worth"].low > 0 > found.whole["flipped"].high
    assert found.whole["worth"].estimate == pytest.approx(-found.whole["flipped"].estimate)
    assert contradictions(found.document(), rows_of(found)) == []
    with pytest.raises(EvaluationError, match=r"got \['bm25'\] twice"):
        judge(scores, setting, folder, effort, whole={"bm25": worth_N})
    with pytest.raises(EvaluationError, match=r"got none of \['silent'\]"):
        judge(scores, setting, folder, effort, whole={"silent": np.zeros(48)})
    document = found.document()
    best = {"above_bm25": document["above_bm25"] | {"estimate": "0.900000"}}
    (said,) = contradictions(document | best, rows_of(found))
    assert said.startswith("LDS above BM25's: expected")


def test_a_removal_curve_of_true_values_rises_above_the_random_one(world):
    """Who takes away what the query speaks loses more than who takes away anything, seed by seed."""
    setting, scores, folder, _ = world
    helpful_QN = np.tile(np.repeat([1.0, 1.0, 0.0], 16), (8, 1))
    effort = Effort(subsets=2, top_queries=0, curve_percents=(50,), curve_seeds=3, draws=5)
    found = judge(with_scores(scores, helpful_QN), setting, folder, effort)
    remove, add = found.arms
    assert found.top is None
    assert (
        remove.against_random("top")[0].estimate > 0 > remove.against_random("bottom")[0].estimate
    )
    assert add.against_random("top")[0].estimate < 0 < add.against_random("bottom")[0].estimate


def test_a_curves_held_out_set_is_looked_at_before_anything_is_trained(world):
    """A clean target and a leaky second set: the judge stops with no file in the bank."""
    setting, scores, folder, rows = world
    digest = write(folder / "leaky-test", "leaky-test", [rows[9], rows[0][1:]])
    test = dataclasses.replace(setting, target=folder / "leaky-test", target_digest=digest)
    with pytest.raises(HeldOutError, match=r"got 1 of test .*\('test', 0, \d+\)"):
        judge(scores, setting, folder / "untouched", Effort(subsets=10), test=test)
    assert not (folder / "untouched").exists()


@pytest.fixture(scope="module")
def published(world):
    """A judgement as it is published: its document and its rows."""
    setting, scores, folder, _ = world
    found = judge(scores, setting, folder, Effort(subsets=12, top_queries=0))
    return found.document(), pq.read_table(io.BytesIO(rows_of(found)))


def test_a_judgement_follows_from_its_rows_and_from_no_others(published):
    """The stored numbers are those of the rows; another score, another verdict, a row less or a row changed is named."""
    document, rows = published
    assert contradictions(document, rows) == []
    better = document | {"lds": document["lds"] | {"estimate": "0.990000"}}
    assert any("LDS of" in problem for problem in contradictions(better, rows))
    verdict = "FAIL" if document["verdict"] == "PASS" else "PASS"
    (said,) = contradictions(document | {"verdict": verdict}, rows)
    assert said.endswith(f"got {verdict}")
    (said,) = contradictions(document, rows.slice(1))
    assert said.startswith("rows: expected 8 x 12")
    shuffled = rows.set_column(
        3, "value", pa.array(np.random.default_rng(0).permutation(rows["value"].to_numpy()))
    )
    assert contradictions(document, shuffled)


def test_a_broken_control_is_a_contradiction_and_a_bad_score_is_none(published):
    """A random draw that seems to foretell stops whoever relies on the judge; a method that foretells nothing doesn't."""
    document, rows = published
    certain = {"estimate": document["beside"]["random"]["estimate"], "low": "0.4", "high": "0.6"}
    broken = document | {
        "verdict": "INVALID",
        "beside": document["beside"] | {"random": document["beside"]["random"] | certain},
    }
    assert any("the judge is broken" in problem for problem in contradictions(broken, rows))
    low = {"low": "-0.5", "high": "-0.1"}
    bad = document | {"verdict": "FAIL", "lds": document["lds"] | low}
    assert contradictions(bad, rows) == []
