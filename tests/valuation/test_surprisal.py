"""The array of surprisals: the numbers of the plain formula, aligned, summed exactly, the same for any chunks and threads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import TokensError, bigram_surprisal, knn_shapley, measure_information
from valuation import surprisal as module
from valuation.surprisal import heat_strip, open_surprisal, record_bits, write_surprisal


def corpus(seed, num_records=30, vocab=40):
    """Records of random lengths, empty ones among them, in two or three folds."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, num_records)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.zipf(1.5, offsets[-1]).clip(1, vocab) - 1
    return tokens, offsets, rng.integers(0, 2 + seed % 2, num_records)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 3))
def test_the_array_is_the_formula_in_half_precision_for_any_chunks_and_threads(
    tmp_path_factory, seed, chunk, threads
):
    """Every entry is the float64 surprisal of the plain code to float16's 2^-11, whatever the cuts; bytes don't depend on threads."""
    tokens, offsets, fold = corpus(seed)
    folder = tmp_path_factory.mktemp("bits")
    bits = write_surprisal(folder, tokens, offsets, fold, 40, chunk_tokens=chunk, threads=threads)
    assert bits.dtype == np.float16
    np.testing.assert_allclose(bits, bigram_surprisal(tokens, offsets, fold, 40), rtol=2**-10)
    whole = write_surprisal(folder / "whole", tokens, offsets, fold, 40)
    np.testing.assert_array_equal(bits, whole)
    sums = record_bits(bits, offsets, chunk_tokens=chunk)
    by_hand = [sum(float(b) for b in bits[a:z]) for a, z in pairwise(offsets)]
    assert sums.tolist() == by_hand


def test_the_value_of_a_record_is_the_sum_of_its_entries(tmp_path):
    """`measure_information` on the array gives rates whose totals are the array's sums, to the last bit of a division."""
    tokens, offsets, fold = corpus(1)
    bits = write_surprisal(tmp_path, tokens, offsets, fold, 40)
    records, _ = measure_information(
        tokens, offsets, bytes_N=np.full(30, 20), fold_N=fold, owner_N=np.arange(30) % 3, num_owners=3, vocab_size=40, bits_T=bits,
    )  # fmt: skip
    lengths = np.diff(offsets)
    np.testing.assert_array_equal(
        records.surprisal_bits_per_token_N, record_bits(bits, offsets) / np.maximum(lengths, 1)
    )


def test_pairs_that_share_a_slot_only_lower_the_surprisal(tmp_path, monkeypatch):
    """With a table far too small, counts are too high: no surprisal is above the exact one, and most are below or equal."""
    tokens, offsets, fold = corpus(2, num_records=200)
    exact = np.array(write_surprisal(tmp_path / "exact", tokens, offsets, fold, 40))
    monkeypatch.setattr(module, "MAX_SLOTS", 64)
    hashed = np.array(write_surprisal(tmp_path / "hashed", tokens, offsets, fold, 40))
    assert (hashed <= exact).all()
    assert (hashed < exact).any()


def test_a_memory_map_of_tokens_is_read_as_it_is(tmp_path):
    """uint16 tokens on disk give the array of the same tokens in memory."""
    tokens, offsets, fold = corpus(3)
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype="<u2", mode="r")
    found = write_surprisal(tmp_path / "a", mapped, offsets, fold, 40, chunk_tokens=7)
    np.testing.assert_array_equal(found, write_surprisal(tmp_path / "b", tokens, offsets, fold, 40))


def test_duckdb_can_ask_for_the_most_surprising_tokens(tmp_path):
    """The array beside token ids is a table for SQL: the largest entry is where numpy finds it."""
    import duckdb
    import polars as pl

    tokens, offsets, fold = corpus(4)
    bits = write_surprisal(tmp_path, tokens, offsets, fold, 40)
    frame = pl.DataFrame({"token": tokens, "bits": np.asarray(bits, np.float32)}).with_row_index(
        "place"
    )
    with duckdb.connect() as connection:
        connection.register("surprisal", frame.to_arrow())
        place, value = connection.execute(
            "select place, bits from surprisal order by bits desc, place limit 1"
        ).fetchone()
    assert place == int(np.argmax(bits))
    assert value == float(bits.max())


def test_a_strip_shows_where_and_not_what():
    """Low, high, low: three levels of blocks, as wide as asked for at most, and nothing for nothing."""
    strip = heat_strip(np.repeat([1.0, 16.0, 4.0], 20), width=30)
    assert strip == "▁" * 10 + "█" * 10 + "▂" * 10
    assert heat_strip(np.array([99.0])) == "█"
    assert heat_strip(np.empty(0)) == ""


def test_random_strings_surprise_most_and_earn_nothing():
    """Noise has the highest surprisal of all, and as a neighbour of a buyer's texts it is worth nothing: entropy is no price."""
    rng = np.random.default_rng(0)
    text = (rng.integers(0, 40, (100, 1)) + 3 * np.arange(20)) % 40
    noise = rng.integers(0, 40, (20, 20))
    tokens = np.concatenate([text, noise]).ravel()
    offsets = np.arange(0, 2420, 20)
    bits = bigram_surprisal(tokens, offsets, np.arange(120) % 2, 40).reshape(120, 20).mean(axis=1)
    assert bits[100:].min() > bits[:100].max()
    # Neighbours by their steps: text goes by threes, noise doesn't.
    counts = np.stack(
        [np.bincount(np.diff(row) % 40, minlength=40) for row in tokens.reshape(120, 20)]
    ).astype(float)
    label = np.repeat([0, 1], [100, 20])
    values = knn_shapley(
        counts, label, counts[:20] + 0.01 * rng.normal(size=(20, 40)), np.zeros(20, int), 5
    ).values_N
    assert values[100:].max() <= 1e-12 < values[:100].sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_T": [0, 9]}, "ids in 0 .. 4"),
        ({"offsets_N1": [0, 1]}, "rise from 0 to 2"),
        ({"fold_N": [0, 1]}, "expected 1 folds"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, message):
    """Ids of another tokenizer, borders and folds of another corpus are named."""
    given = {"tokens_T": [0, 4], "offsets_N1": [0, 2], "fold_N": [0], "vocab_size": 5} | change
    with pytest.raises(TokensError, match=message):
        write_surprisal(tmp_path, *(np.array(given[n]) for n in ("tokens_T", "offsets_N1", "fold_N")), 5,
                        chunk_tokens=given.get("chunk_tokens", 10))  # fmt: skip


def test_an_array_of_another_corpus_or_cut_short_is_refused(tmp_path):
    """The head says how long it must be; no array, a longer corpus and a lost byte are all refused; an empty corpus is fine."""
    with pytest.raises(TokensError, match="write it again"):
        open_surprisal(tmp_path, 3)
    write_surprisal(tmp_path, np.array([0, 1, 2]), np.array([0, 3]), np.array([0]), 5)
    with pytest.raises(TokensError, match="expected 4"):
        open_surprisal(tmp_path, 4)
    path = tmp_path / "surprisal.f16"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokensError, match="5 bytes"):
        open_surprisal(tmp_path, 3)
    assert not len(
        write_surprisal(tmp_path / "none", np.empty(0, int), np.array([0]), np.empty(0, int), 5)
    )
