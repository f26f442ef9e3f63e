"""Surprisal under a model: nobody is scored by one that saw it or a copy of it, sums are exact, cuts and order change nothing."""

import hashlib
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer import generate
from trainer.data import TokenStore, write_tokens
from trainer.model import Transformer, init_parameters
from trainer.spec import (
    BatchSpec,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    no_versions,
    with_extra,
)
from valuation import TokensError, folds, reference
from valuation.reference import MODEL_NAME, pieces, record_surprisal, write_model_surprisal
from valuation.surprisal import open_surprisal, record_bits, write_surprisal

VOCAB = 31
END = VOCAB - 1
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)


def texts(count=24, seed=0):
    """Texts that count in steps of three, some longer than a row."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 40, count)
    return [[*((rng.integers(END) + 3 * np.arange(size)) % END).tolist(), END] for size in sizes]


def prepared(directory, documents, fold_N):
    """A run on these documents."""
    rows = [
        (at, hashlib.sha256(b"%d" % at).digest(), "a", tokens)
        for at, tokens in enumerate(documents)
    ]
    digest = write_tokens(
        directory / "tokens", corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=END, records=rows
    )  # fmt: skip
    (directory / "run").mkdir(parents=True)
    data = np.asarray(fold_N, "<i8").tobytes()
    (directory / "run/folds.bin").write_bytes(data)
    spec = RunSpec(
        run="reference-test", kind="proxy", entry="valuation.reference:run", seed=5, tokens="../tokens", tokens_digest=digest, steps=40,
        versions=no_versions(),
        config=RunConfig(
            model=MODEL, optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=4, length=16),
            extra={"folds": ["folds.bin", hashlib.sha256(data).hexdigest()]},
        ),
    )  # fmt: skip
    return spec, directory / "run"


def measured(directory, documents, fold_N):
    """The two arrays and the borders."""
    spec, folder = prepared(directory, documents, fold_N)
    assert reference.run(spec, folder) == 0
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in documents])])
    flat = np.concatenate(documents)
    ngram = write_surprisal(directory, flat, offsets, np.asarray(fold_N), VOCAB)
    bits = write_model_surprisal(directory, folder, np.arange(len(documents)), offsets, ngram)
    return bits, ngram, offsets


@given(size=st.integers(0, 200), length=st.integers(2, 40))
def test_pieces_score_every_token_but_the_first_once_and_with_half_a_row_before_it(size, length):
    """Law: scored spans are 1 .. size in a row; none is longer than a row; from the second piece on at least half of one is context."""
    found = pieces(size, length)
    assert [at for _, first, stop in found for at in range(first, stop)] == list(range(1, size))
    assert all(0 <= start < first and stop - start <= length for start, first, stop in found)
    assert all(first - start >= length - length // 2 for start, first, _ in found[1:])


def test_bits_are_the_models_and_the_first_token_is_the_n_grams(tmp_path):
    """Against one forward pass per record: entries within float16 of the logits' own; the array is aligned with the tokens; sums are exact."""
    documents, fold_N = texts(), np.arange(24) % 3
    bits, ngram, offsets = measured(tmp_path, documents, fold_N)
    assert bits.dtype == np.float16
    np.testing.assert_array_equal(bits, open_surprisal(tmp_path, len(bits), MODEL_NAME))
    store = TokenStore.open(tmp_path / "tokens")
    spec, folder = prepared(tmp_path / "again", documents, fold_N)
    for fold in range(3):
        model = reference.fitted(spec, folder, store, np.flatnonzero(fold_N != fold))  # fmt: skip
        for row in np.flatnonzero(fold_N == fold).tolist():
            own_T = bits[offsets[row] : offsets[row + 1]]
            assert own_T[0] == ngram[offsets[row]]
            tokens = documents[row][:16]
            with torch.inference_mode():
                logp = torch.log_softmax(model(torch.tensor([tokens]))[0].double(), -1)
            by_hand = [-logp[t, tokens[t + 1]].item() / np.log(2) for t in range(len(tokens) - 1)]
            np.testing.assert_allclose(own_T[1:16], by_hand, rtol=2**-9)
    sums = record_bits(bits, offsets)
    assert sums.tolist() == [sum(float(b) for b in bits[a:z]) for a, z in pairwise(offsets)]
    # The language is one that can be learnt: what was trained knows more than what wasn't.
    blank = Transformer(MODEL)
    init_parameters(blank, 5)
    untrained = sum(part.sum(dtype=float) for part in record_surprisal(blank.eval(), iter(documents), 16))  # fmt: skip
    assert sums.sum() < 0.8 * untrained


def test_no_record_is_scored_by_a_model_that_saw_it_or_its_cluster(tmp_path):
    """Another text in a fold leaves every other record of that fold as it was, bit for bit, and changes those of other folds: the fold's own model read none of it."""
    documents = texts()
    cluster_N = np.arange(24)
    cluster_N[[5, 9, 17]] = 5
    ids = [hashlib.sha256(b"%d" % at).digest() for at in range(24)]
    fold_N = folds(ids, cluster_N=cluster_N)
    assert len({int(fold_N[at]) for at in (5, 9, 17)}) == 1
    bits, _, offsets = measured(tmp_path / "one", documents, fold_N)
    changed = list(documents)
    changed[9] = [*((token + 11) % END for token in documents[9][:-1]), END]
    assert len(changed[9]) > 4
    others, _, _ = measured(tmp_path / "two", changed, fold_N)
    head_T = np.zeros(len(bits), bool)
    head_T[offsets[:-1]] = True  # these are the n-gram reference's
    fold_T, row_T = (np.repeat(values, np.diff(offsets)) for values in (fold_N, np.arange(24)))
    same_T = (fold_T == fold_N[9]) & (row_T != 9) & ~head_T
    np.testing.assert_array_equal(bits[same_T], others[same_T])
    assert same_T[row_T == 5].any()
    elsewhere_T = (fold_T != fold_N[9]) & ~head_T
    assert (bits[elsewhere_T] != others[elsewhere_T]).mean() > 0.5


def test_numbers_depend_neither_on_the_order_of_records_nor_on_batches(tmp_path, monkeypatch):
    """Records the other way round, and one piece at a time: the same bits to a step of float16."""
    documents, fold_N = texts(), np.arange(24) % 2
    bits, _, offsets = measured(tmp_path / "one", documents, fold_N)
    turned, _, _ = measured(tmp_path / "turned", documents[::-1], fold_N[::-1])
    back = np.concatenate([turned[a:z] for a, z in reversed(list(pairwise(len(bits) - offsets[::-1])))])  # fmt: skip
    monkeypatch.setattr(generate, "MAX_POSITIONS", 1)
    monkeypatch.setattr(reference, "_PIECES", 1)
    single, _, _ = measured(tmp_path / "single", documents, fold_N)
    for other in (back, single):
        np.testing.assert_allclose(np.asarray(other, float), np.asarray(bits, float), rtol=2**-9)


def test_a_killed_run_goes_on_with_the_folds_that_it_lacks(tmp_path, monkeypatch):
    """Stopped in the second fold, it trains two of three again and ends with the bytes of a run that was never stopped."""
    documents, fold_N = texts(), np.arange(24) % 3
    spec, folder = prepared(tmp_path / "whole", documents, fold_N)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    assert reference.run(spec, folder) == 0
    trained, fit = [], reference.fit_rows

    def counted(*given):
        trained.append(1)
        if len(trained) == 2:
            raise KeyboardInterrupt
        fit(*given)

    monkeypatch.setattr(reference, "fit_rows", counted)
    with pytest.raises(KeyboardInterrupt):
        reference.run(spec, tmp_path / "cut/run")
    assert not (tmp_path / "cut/run/result.json").exists()
    assert reference.run(spec, tmp_path / "cut/run") == 0
    assert len(trained) == 4
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["fold-0.npz", "fold-1.npz", "fold-2.npz", "folds.bin", "result.json"]
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "cut/run" / name).read_bytes()


def test_folds_that_cannot_be_meant_are_refused(tmp_path):
    """One fold, a hole, another file, another number of leaves, further settings, records that aren't there: each says what was expected."""
    documents = texts()
    for number, (fold_N, said) in enumerate((
        (np.zeros(24), "two or more folds"),
        (np.arange(24) % 2 * 2, "two or more folds"),
        (np.zeros(23), "expected 24 folds"),
    )):  # fmt: skip
        with pytest.raises(TokensError, match=said):
            reference.run(*prepared(tmp_path / str(number), documents, fold_N))
    spec, folder = prepared(tmp_path / "other", documents, np.arange(24) % 2)
    with pytest.raises(TokensError, match="folds alone"):
        reference.run(with_extra(spec, jobs=2), folder)
    (folder / "folds.bin").write_bytes(np.zeros(24, "<i8").tobytes())
    with pytest.raises(TokensError, match="expected SHA-256"):
        reference.run(spec, folder)
    _, _, offsets = measured(tmp_path / "good", documents, np.arange(24) % 2)
    ngram = np.zeros(offsets[-1], np.float16)
    leaves = np.arange(24)
    leaves[3] = 99
    with pytest.raises(TokensError, match="got leaf 3 of none"):
        write_model_surprisal(tmp_path, tmp_path / "good/run", leaves, offsets, ngram)
    (tmp_path / "good/run/fold-1.npz").unlink()
    with pytest.raises(TokensError, match="scored by no fold"):
        write_model_surprisal(tmp_path, tmp_path / "good/run", np.arange(24), offsets, ngram)
