"""Totals, rates and errors of level 1 per record and per owner."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import (
    TokensError,
    bigram_surprisal,
    empirical_entropy,
    entropy,
    information,
    measure_information,
)


def corpus(num_records=300, vocab_size=50, seed=0):
    """Records of different lengths (some empty) of three owners."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 40, size=num_records)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.zipf(1.5, size=offsets[-1]) % vocab_size
    return {
        "tokens_T": tokens,
        "offsets_N1": offsets,
        "bytes_N": lengths * 4,
        "fold_N": np.arange(num_records) % 2,
        "owner_N": generator.integers(0, 3, size=num_records),
        "num_owners": 3,
        "vocab_size": vocab_size,
    }


def test_rates_are_totals_over_tokens_and_over_bytes():
    """Each rate is the plain sum of the token surprisals over its own denominator."""
    data = corpus()
    records, owners = measure_information(**data)
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50)
    for index in np.flatnonzero(np.diff(data["offsets_N1"]) > 1)[:20]:
        own = bits_T[data["offsets_N1"][index] : data["offsets_N1"][index + 1]]
        assert records.surprisal_bits_per_token_N[index] == pytest.approx(own.mean())
        assert records.surprisal_bits_per_byte_N[index] == pytest.approx(own.sum() / (4 * len(own)))
        assert records.surprisal_se_N[index] == pytest.approx(own.std(ddof=1) / len(own) ** 0.5)
    owner_T = np.repeat(data["owner_N"], np.diff(data["offsets_N1"]))
    for owner in range(3):
        assert owners.surprisal_bits_per_token_N[owner] == pytest.approx(
            bits_T[owner_T == owner].mean()
        )
        assert owners.tokens_N[owner] == (owner_T == owner).sum()
    assert owners.bytes_N.sum() == records.bytes_N.sum()
    pooled = empirical_entropy(
        data["tokens_T"], data["offsets_N1"], 50, subject_N=data["owner_N"], num_subjects=3
    )
    np.testing.assert_array_equal(owners.entropy_bits_per_token_N, pooled.corrected_bits_N)


def test_the_owner_error_is_the_spread_over_resampled_records():
    """The standard error of an owner's rate equals a bootstrap over its records, within 10 %.

    2,000 draws: the bootstrap's own error is 1.6 %; the rest is the linearisation.
    """
    data = corpus(num_records=400)
    _, owners = measure_information(**data)
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50)
    lengths = np.diff(data["offsets_N1"])
    record_T = np.repeat(np.arange(400), lengths)
    bits_N = np.bincount(record_T, weights=bits_T, minlength=400)
    generator = np.random.default_rng(1)
    mine = np.flatnonzero(data["owner_N"] == 0)
    rates = []
    for _ in range(2000):
        some = generator.choice(mine, size=len(mine))
        rates.append(bits_N[some].sum() / lengths[some].sum())
    assert owners.surprisal_se_N[0] == pytest.approx(np.std(rates), rel=0.1)


def test_what_cannot_be_estimated_is_not_a_number_and_not_zero():
    """A record of one token and an owner of one record have no standard error: NaN, never 0."""
    records, owners = measure_information(
        np.array([1, 2, 3, 1]), np.array([0, 1, 4, 4]), bytes_N=np.array([4, 12, 0]),
        fold_N=np.array([0, 1, 0]), owner_N=np.array([0, 0, 1]), num_owners=3, vocab_size=5,
    )  # fmt: skip
    assert np.isnan(records.surprisal_se_N[[0, 2]]).all()
    assert records.surprisal_se_N[1] > 0
    assert owners.surprisal_se_N[0] > 0
    assert np.isnan(owners.surprisal_se_N[1:]).all()
    assert records.surprisal_bits_per_byte_N[2] == 0
    assert owners.tokens_N.tolist() == [4, 0, 0]


def test_records_in_another_order_get_the_same_numbers():
    """Shuffling the records shuffles the results: nothing depends on the neighbour in the array."""
    data = corpus(num_records=60)
    records, owners = measure_information(**data)
    order = np.random.default_rng(2).permutation(60)
    pieces = [data["tokens_T"][data["offsets_N1"][i] : data["offsets_N1"][i + 1]] for i in order]
    moved = data | {
        "tokens_T": np.concatenate(pieces),
        "offsets_N1": np.concatenate([[0], np.cumsum([len(p) for p in pieces])]),
        "bytes_N": data["bytes_N"][order],
        "fold_N": data["fold_N"][order],
        "owner_N": data["owner_N"][order],
    }
    records_moved, owners_moved = measure_information(**moved)
    np.testing.assert_allclose(
        records_moved.surprisal_bits_per_token_N,
        records.surprisal_bits_per_token_N[order],
        atol=1e-12,
    )
    np.testing.assert_allclose(owners_moved.surprisal_se_N, owners.surprisal_se_N, rtol=1e-9)


def test_an_empty_corpus_has_no_rows_and_is_no_error():
    """Nothing in, nothing out."""
    empty = np.zeros(0, dtype=np.int64)
    records, owners = measure_information(
        empty, np.array([0]), bytes_N=empty, fold_N=empty, owner_N=empty, num_owners=0, vocab_size=5
    )
    assert len(records.tokens_N) == len(owners.tokens_N) == 0


def test_byte_counts_of_another_length_are_refused():
    """Sizes that don't belong to the records are an error."""
    data = corpus(num_records=5)
    with pytest.raises(TokensError, match="expected 5 sizes of at least 0, got 4"):
        measure_information(**(data | {"bytes_N": data["bytes_N"][:4]}))


def by_definition(data, bits_T):
    """What the module's docstring says, one record after the other; sums run in order of tokens."""
    offsets, vocab = data["offsets_N1"], data["vocab_size"]

    def entropy(tokens):
        counts = np.bincount(tokens, minlength=vocab)
        counts = counts[counts > 0]
        total = 0.0
        for term in (counts * np.log2(counts)).tolist():
            total += term
        size = max(len(tokens), 1)
        return max(np.log2(float(size)) - total / size, 0.0) + max(len(counts) - 1, 0) / (
            2.0 * size * np.log(2)
        )

    spans = [slice(a, b) for a, b in pairwise(offsets.tolist())]
    tokens_T, float_T = data["tokens_T"].astype(np.int64), bits_T.astype(np.float64)
    sums = [sum(float_T[span].tolist()) for span in spans]
    errors = []
    for span, total in zip(spans, sums, strict=True):
        size = span.stop - span.start
        spread = (
            sum(((x - total / size) ** 2 for x in float_T[span].tolist()), 0.0) if size else 0.0
        )
        errors.append(np.sqrt(size / (size - 1) * spread) / size if size > 1 else np.nan)
    owners = [
        np.concatenate(
            [[], *(tokens_T[s] for s, o in zip(spans, data["owner_N"], strict=True) if o == owner)]
        )
        for owner in range(data["num_owners"])
    ]
    return {
        "records": [entropy(tokens_T[span]) for span in spans],
        "rates": np.array(sums) / np.maximum(np.diff(offsets), 1),
        "errors": errors,
        "owners": [entropy(tokens.astype(np.int64)) for tokens in owners],
    }


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 3), st.sampled_from([0, 1 << 24]), st.sampled_from([0, 32]), st.sampled_from([np.uint16, np.uint32, np.int64]),
)  # fmt: skip
def test_any_chunks_threads_and_counters_give_the_numbers_of_the_definition_to_the_bit(
    seed, chunk_tokens, threads, counters, dense, dtype
):
    """Larger than memory: cuts, threads, kinds of counters and of integers change nothing, and nothing differs from the plain loop."""
    data = corpus(num_records=40, seed=seed)
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50).astype(
        np.float16
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(information, "CHUNK_TOKENS", chunk_tokens)
        patch.setattr(information, "DENSE_COUNTERS", counters)
        patch.setattr(entropy, "DENSE_COUNTERS", dense)
        given_T = data["tokens_T"].astype(dtype)
        records, owners = measure_information(
            **data | {"tokens_T": given_T}, bits_T=bits_T, threads=threads
        )
    expected = by_definition(data, bits_T)
    np.testing.assert_array_equal(records.entropy_bits_per_token_N, expected["records"])
    np.testing.assert_array_equal(records.surprisal_bits_per_token_N, expected["rates"])
    np.testing.assert_array_equal(records.surprisal_se_N, expected["errors"])
    np.testing.assert_array_equal(owners.entropy_bits_per_token_N, expected["owners"])
    whole = measure_information(**data, bits_T=bits_T)
    for one, other in zip(whole, (records, owners), strict=True):
        for name in one.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def test_the_definition_can_tell(monkeypatch):
    """Negative control: with owners' counts added one short, the equality goes red."""
    data = corpus(num_records=40)
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50)
    add = information._OwnerCounts.add

    def less(self, ids, lengths, codes):
        add(
            self,
            ids[:-1],
            lengths - (np.arange(len(lengths)) == np.flatnonzero(lengths)[-1]),
            codes,
        )

    monkeypatch.setattr(information._OwnerCounts, "add", less)
    _, owners = measure_information(**data, bits_T=bits_T.astype(np.float16))
    assert (owners.entropy_bits_per_token_N != by_definition(data, bits_T)["owners"]).any()


def test_ids_of_another_vocabulary_and_no_threads_are_refused():
    """Found in whatever chunk they are, by whatever thread."""
    data = corpus()
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50)
    broken = data["tokens_T"].copy()
    broken[-1] = 50
    with pytest.raises(TokensError, match=r"ids in 0 .. 49"):
        measure_information(**data | {"tokens_T": broken}, bits_T=bits_T, threads=2)
    with pytest.raises(TokensError, match="at least 1, got 0"):
        measure_information(**data, bits_T=bits_T, threads=0)
