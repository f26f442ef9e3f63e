"""Token entropy and surprisal: closed forms, a brute-force reference, and the cross-fitting law."""

from __future__ import annotations

from collections import Counter
from math import log, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import TokensError, bigram_surprisal, empirical_entropy, entropy, folds, packed_bytes
from valuation.entropy import CONTEXT_STRENGTH, UNIFORM_COUNT

VOCAB = 6


def flat(records):
    """Lists of tokens as CSR arrays."""
    offsets = np.cumsum([0, *(len(record) for record in records)])
    return np.array([token for record in records for token in record], dtype=np.uint32), offsets


def surprisal_by_counting(records, fold_N, vocab_size):
    """The formula of the module docstring, with dictionaries, one token at a time."""
    bits = []
    for record, fold in zip(records, fold_N, strict=True):
        others = [r for r, f in zip(records, fold_N, strict=True) if f != fold]
        unigram = Counter(token for other in others for token in other)
        bigram = Counter(
            pair for other in others for pair in zip(["start", *other], other, strict=False)
        )
        context = Counter()
        for (left, _), count in bigram.items():
            context[left] += count
        size = sum(unigram.values())
        for left, right in zip(["start", *record], record, strict=False):
            p_word = (unigram[right] + UNIFORM_COUNT) / (size + UNIFORM_COUNT * vocab_size)
            numerator = bigram[left, right] + CONTEXT_STRENGTH * p_word
            bits.append(-log2(numerator / (context[left] + CONTEXT_STRENGTH)))
    return np.array(bits)


@st.composite
def corpora(draw, min_records=1):
    """Small corpora over six tokens, empty records included, with a fold for each record."""
    record = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    records = draw(st.lists(record, min_size=min_records, max_size=8))
    fold_N = draw(st.lists(st.integers(0, 2), min_size=len(records), max_size=len(records)))
    return records, np.array(fold_N, dtype=np.int64)


# --- empirical entropy -----------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 256, 2048])
def test_a_uniform_distribution_has_log2_v_bits(vocab_size):
    """Every token equally often: exactly log2 V, and the correction is (V - 1) / (2 n ln 2)."""
    tokens, offsets = flat([list(range(vocab_size)) * 3])
    result = empirical_entropy(tokens, offsets, vocab_size)
    assert result.bits_N[0] == pytest.approx(log2(vocab_size), abs=1e-12)
    correction = (vocab_size - 1) / (2 * 3 * vocab_size * log(2))
    assert result.corrected_bits_N[0] == pytest.approx(log2(vocab_size) + correction, abs=1e-12)
    assert result.distinct_N[0] == vocab_size
    assert result.tokens_N[0] == 3 * vocab_size


def test_known_distributions():
    """Golden values: (1/2, 1/4, 1/4) has 1.5 bits, a constant has none, a fair coin has one."""
    tokens, offsets = flat([[0, 0, 1, 2], [5] * 9, [3, 4], []])
    result = empirical_entropy(tokens, offsets, VOCAB)
    np.testing.assert_allclose(result.bits_N, [1.5, 0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(
        result.corrected_bits_N, [1.5 + 2 / (8 * log(2)), 0, 1 + 1 / (4 * log(2)), 0], atol=1e-12
    )
    np.testing.assert_array_equal(result.distinct_N, [3, 1, 2, 0])


def test_the_correction_removes_most_of_the_bias():
    """Samples of 200 from a uniform 32: plug-in is 0.11 bits low, corrected is within 0.01.

    2,000 samples; the spread of one corrected entropy is about 0.03 bits, so the mean of 2,000 has
    a standard error below 0.001.
    """
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 32, size=200 * 2000)
    result = empirical_entropy(tokens, np.arange(2001) * 200, 32)
    assert 5 - result.bits_N.mean() > 0.1
    assert abs(5 - result.corrected_bits_N.mean()) < 0.01


@settings(deadline=None, max_examples=80)
@given(corpora())
def test_entropy_is_between_nothing_and_log2_of_the_distinct_tokens(corpus):
    """0 <= H <= log2 m, with m distinct tokens: no rounding takes it below zero."""
    records, _ = corpus
    result = empirical_entropy(*flat(records), VOCAB)
    assert (result.bits_N >= 0).all()
    assert (result.bits_N <= np.log2(np.maximum(result.distinct_N, 1)) + 1e-12).all()


@settings(deadline=None, max_examples=60)
@given(corpora(), st.data())
def test_an_owner_is_the_record_of_all_its_tokens(corpus, data):
    """Pooling by owner code equals the entropy of the records glued together."""
    records, _ = corpus
    owner_N = np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=len(records), max_size=len(records)))
    )
    pooled = empirical_entropy(*flat(records), VOCAB, subject_N=owner_N, num_subjects=3)
    glued = [
        [
            token
            for record, owner in zip(records, owner_N, strict=True)
            if owner == code
            for token in record
        ]
        for code in range(3)
    ]
    alone = empirical_entropy(*flat(glued), VOCAB)
    np.testing.assert_allclose(pooled.bits_N, alone.bits_N, atol=1e-12)
    np.testing.assert_array_equal(pooled.distinct_N, alone.distinct_N)
    np.testing.assert_array_equal(pooled.tokens_N, alone.tokens_N)


# --- cross-fitted surprisal ------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(corpora())
def test_surprisal_is_what_counting_by_hand_gives(corpus):
    """The vectorised counts equal a dictionary of counts over the other folds."""
    records, fold_N = corpus
    bits = bigram_surprisal(*flat(records), fold_N, VOCAB)
    np.testing.assert_allclose(bits, surprisal_by_counting(records, fold_N, VOCAB), atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(corpora(min_records=2), st.lists(st.integers(0, VOCAB - 1), max_size=12))
def test_no_record_is_scored_by_a_model_that_saw_it(corpus, other):
    """Replacing a record changes no score of its own fold, so it was in none of their models."""
    records, fold_N = corpus
    before = bigram_surprisal(*flat(records), fold_N, VOCAB)
    changed = [other, *records[1:]]
    after = bigram_surprisal(*flat(changed), fold_N, VOCAB)
    rows_before = np.repeat(np.arange(len(records)), [len(r) for r in records])
    rows_after = np.repeat(np.arange(len(records)), [len(r) for r in changed])
    for row in range(1, len(records)):
        if fold_N[row] == fold_N[0]:
            np.testing.assert_array_equal(before[rows_before == row], after[rows_after == row])


def test_the_model_is_a_distribution():
    """In every context the probabilities of all tokens sum to 1."""
    reference = [[0, 1, 2, 1, 0, 3], [3, 3, 1]]
    for context in ([], [0], [3, 4], [5]):
        probes = [[*context, token] for token in range(VOCAB)]
        records = [*reference, *probes]
        fold_N = np.array([0, 0] + [1] * VOCAB)
        bits = bigram_surprisal(*flat(records), fold_N, VOCAB)
        last = np.cumsum([len(r) for r in records])[2:] - 1
        assert (2.0 ** -bits[last]).sum() == pytest.approx(1, abs=1e-12)


def test_an_empty_reference_costs_log2_v_bits():
    """With every record in one fold nothing is known, and each token costs exactly log2 V."""
    bits = bigram_surprisal(*flat([[0, 1, 1], [5, 5]]), np.zeros(2, dtype=int), 64)
    np.testing.assert_allclose(bits, 6, atol=1e-12)


def test_what_the_others_said_is_cheap_and_what_nobody_said_is_dear():
    """A text that the other fold repeats costs far less than one of unseen tokens."""
    common, rare = [0, 1, 2, 3] * 30, [4, 5] * 60
    bits = bigram_surprisal(*flat([common, common, rare]), np.array([0, 1, 1]), VOCAB)
    assert bits[120:240].mean() < 1
    assert bits[240:].mean() > 5


def test_folds_depend_on_the_digest_only_and_keep_clusters_together():
    """A record keeps its fold when others are added; copies share the fold of the original."""
    generator = np.random.default_rng(0)
    ids = [generator.bytes(32) for _ in range(400)]
    fold_N = folds(ids)
    np.testing.assert_array_equal(folds(ids[100:]), fold_N[100:])
    assert set(fold_N.tolist()) == {0, 1}
    assert abs(fold_N.mean() - 0.5) < 5 * 0.5 / 20  # five standard errors of 400 fair coins
    cluster_N = np.arange(400)
    cluster_N[[10, 20, 30]] = 5
    together = folds(ids, cluster_N=cluster_N)
    assert len(set(together[[5, 10, 20, 30]].tolist())) == 1
    others = np.setdiff1d(np.arange(400), [10, 20, 30])
    np.testing.assert_array_equal(together[others], fold_N[others])


def test_a_copy_in_the_other_fold_would_leak_and_clusters_stop_it():
    """The attack: a copy makes its original look worthless, unless their folds are the same."""
    generator = np.random.default_rng(1)
    text = generator.integers(0, 500, size=200).tolist()
    others = [generator.integers(0, 500, size=200).tolist() for _ in range(6)]
    arrays = flat([text, text, *others])
    apart = bigram_surprisal(*arrays, np.array([0, 1, 0, 1, 0, 1, 0, 1]), 500, context_strength=1.0)
    kept = bigram_surprisal(*arrays, np.array([0, 0, 0, 1, 0, 1, 0, 1]), 500, context_strength=1.0)
    assert apart[:200].mean() < 3
    assert kept[:200].mean() > 8


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_counts_are_those_of_a_dictionary(dtype):
    """Keys rise and counts are right, for codes whose keys need 32 bits, 33 bits or more, and for nothing."""
    generator = np.random.default_rng(2)
    for length, code in (
        (0, 0),
        (1, 5),
        (300, 0),
        (300, (1 << 32) // 50 - 2),
        (300, (1 << 32) // 50),
        (300, 1 << 40),
    ):
        ids = generator.integers(0, 50, size=length).astype(dtype)
        lengths = np.array([length // 2, length - length // 2])
        keys, counts = entropy.token_counts(ids, lengths, np.array([code, code + 1]), 50)
        owner = [code] * int(lengths[0]) + [code + 1] * int(lengths[1])
        expected = Counter(o * 50 + t for o, t in zip(owner, ids.tolist(), strict=True))
        assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected
        assert keys.tolist() == sorted(expected)


# --- bytes and refusals ----------------------------------------------------------------------


def test_zstd_sees_repetition_and_not_random_letters():
    """A repeated phrase shrinks to almost nothing, random letters keep log2 26 / 8 of their size."""
    generator = np.random.default_rng(0)
    noise = "".join(chr(97 + c) for c in generator.integers(0, 26, size=4000))
    sizes = packed_bytes(["the same " * 400, noise, ""])
    assert sizes[0] < 60
    assert 0.58 < sizes[1] / 4000 < 0.68
    assert sizes[2] <= 2


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        ([0, 1, 2], [0, 2], "from 0 to 3"),
        ([0, 1, 2], [1, 3], "from 0 to 3"),
        ([0, 1, 2], [], "no entries"),
        ([0, 1, 2], [0, 2, 1, 3], "never fall"),
        ([0, 6, 2], [0, 3], r"ids in 0 .. 5, got 0 .. 6; is this the right tokenizer"),
        ([0, -1, 2], [0, 3], "got -1 .. 2"),
    ],
)
def test_arrays_that_are_no_records_are_refused(tokens, offsets, message):
    """Wrong borders or ids of another vocabulary are errors, not silently other entropies."""
    with pytest.raises(TokensError, match=message):
        empirical_entropy(np.array(tokens), np.array(offsets, dtype=np.int64), VOCAB)


def test_folds_and_subjects_that_do_not_fit_are_refused():
    """Each mistake in the side arrays has its own message."""
    tokens, offsets = flat([[0, 1], [2]])
    with pytest.raises(TokensError, match="expected 2 folds of at least 0"):
        bigram_surprisal(tokens, offsets, np.array([0]), VOCAB)
    with pytest.raises(TokensError, match="expected 2 folds of at least 0"):
        bigram_surprisal(tokens, offsets, np.array([0, -1]), VOCAB)
    with pytest.raises(TokensError, match="both above 0"):
        bigram_surprisal(tokens, offsets, np.array([0, 1]), VOCAB, context_strength=0)
    with pytest.raises(TokensError, match="together with num_subjects"):
        empirical_entropy(tokens, offsets, VOCAB, subject_N=np.array([0, 1]))
    with pytest.raises(TokensError, match=r"codes in 0 \.\. 1"):
        empirical_entropy(tokens, offsets, VOCAB, subject_N=np.array([0, 2]), num_subjects=2)
    with pytest.raises(TokensError, match="at least 2 for cross-fitting"):
        folds([b"12345678"], num_folds=1)
    with pytest.raises(TokensError, match="at least 8 bytes"):
        folds([b"1234567"])
    with pytest.raises(TokensError, match="expected 1 entries, got 2"):
        folds([b"12345678"], cluster_N=np.array([0, 0]))
