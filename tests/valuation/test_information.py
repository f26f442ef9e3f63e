"""Totals, rates and errors of level 1 per record and per owner."""

from __future__ import annotations

import numpy as np
import pytest

from valuation import (
    TokensError,
    bigram_surprisal,
    empirical_entropy,
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


@pytest.mark.parametrize("chunk_tokens", [1, 7, 500])
def test_chunks_of_any_size_give_the_same_numbers(chunk_tokens, monkeypatch):
    """Larger than memory: small chunks and one for all agree to the last bit, on a float16 array."""
    data = corpus()
    bits_T = bigram_surprisal(data["tokens_T"], data["offsets_N1"], data["fold_N"], 50)
    whole = measure_information(**data, bits_T=bits_T.astype(np.float16))
    monkeypatch.setattr(information, "CHUNK_TOKENS", chunk_tokens)
    parts = measure_information(**data, bits_T=bits_T.astype(np.float16))
    for one, other in zip(whole, parts, strict=True):
        for name in one.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
