"""Planted records are found by values that know something, and attacks pay what the shares of known values say, by hand."""

import dataclasses
import hashlib
import io
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import write_tokens
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from valuation.detection import noise_tokens
from valuation.errors import EvaluationError
from valuation.influence import ekfac
from valuation.influence.baselines import bm25
from valuation.influence.scores import TokenSet
from valuation.planting import plant, unsupported
from valuation.subsets import Setting, fit_subset

VOCAB = 31


def write(folder, tag, rows, owners):
    records = [
        (i, hashlib.sha256(f"{tag} {i}".encode()).digest(), owner, row)
        for i, (owner, row) in enumerate(zip(owners, rows, strict=True))
    ]
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1, records=records
    )  # fmt: skip


def counting(rng, count):
    """Texts that count in threes, no two alike, which is what the buyer's do."""
    return [
        [*((start + 3 * np.arange(19)) % (VOCAB - 1)).tolist(), VOCAB - 1]
        for start in rng.permutation(VOCAB - 1)[:count]
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Ann has 16 of the texts that count, bob 8 of them, cid 8 of noise; a sample leaves out ann's last two."""
    folder, rng = tmp_path_factory.mktemp("planting"), np.random.default_rng(0)
    noise = [noise_tokens(20, VOCAB, VOCAB - 1, rng).tolist() for _ in range(8)]
    rows, owners = counting(rng, 24) + noise, ["ann"] * 16 + ["bob"] * 8 + ["cid"] * 8
    order = [*range(0, 32, 2), *range(1, 32, 2)]  # owners stand mixed
    rows, owners = [rows[i] for i in order], [owners[i] for i in order]
    target = [row[2:] for row in counting(rng, 6)]
    setting = Setting(
        train=folder / "train", train_digest=write(folder / "train", "train", rows, owners),
        target=folder / "target", target_digest=write(folder / "target", "target", target, ["buyer"] * 6),
        model=ModelSpec(vocab_size=VOCAB, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24),
        optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=8, length=20), epochs=6,
    )  # fmt: skip
    kept = [i for i in range(32) if i not in [j for j in range(32) if owners[j] == "ann"][-2:]]
    store, questions = setting.stores()
    train, queries = TokenSet.of(store, 20, kept), TokenSet.of(questions, 20)
    model = fit_subset(setting, np.ones(32, bool), 0).model.eval()
    return setting, ekfac.scores(model, train, queries), folder


def known(scores, worth):
    """A method whose value of a text is known: it counts in threes or not."""

    def score(_, train, queries):
        value = [worth(len(np.unique(np.diff(tokens[:-1].astype(int)) % (VOCAB - 1))) == 1) for *_, tokens in train.records]  # fmt: skip
        scores_QN = np.tile(np.array(value, dtype=float), (len(queries.records), 1))
        return dataclasses.replace(bm25(train, queries), scores_QN=scores_QN, method=scores.method)

    return score


def test_values_of_retrained_models_find_noise_and_disorder(world):
    """EK-FAC of models that were trained on the planted records too; nothing stays on disk."""
    setting, scores, folder = world
    found = plant(scores, setting, folder / "run", 10, seed=1)
    assert found.records == 10
    assert 0 < found.share < 1
    assert found.auc["noise"].low > 0.5
    assert found.auc["shuffled"].low > 0.5
    assert list(found.gains) == ["noise", "shuffled", "duplicate"]
    assert not (folder / "run" / "planted").exists()
    assert found == plant(scores, setting, folder / "run", 10, seed=1)


def test_gains_are_those_of_known_values_by_hand(world):
    """Texts that count are worth 1, others -1: 14 of 22 texts are ann's and no attack pays. If all are worth 1, noise pays: 24 of 40 in place of 14 of 30."""
    setting, scores, folder = world
    right = plant(
        scores, setting, folder, 10, seed=1, score=known(scores, lambda it: 1 if it else -1)
    )
    assert right.share == pytest.approx(14 / 22)
    assert {name: round(value, 12) for name, value in right.gains.items()} == dict.fromkeys(right.gains, 0)  # fmt: skip
    assert right.auc["noise"].estimate == pytest.approx(1 - 8 / 30 / 2), (
        "cid's noise is worth as little"
    )
    blind = plant(scores, setting, folder, 10, seed=1, score=known(scores, lambda _: 1))
    assert blind.auc["noise"].estimate == 0.5
    assert blind.gains["noise"] == pytest.approx(24 / 40 - 14 / 30)
    assert blind.gains["shuffled"] == pytest.approx(24 / 40 - 14 / 30)
    assert blind.gains["duplicate"] == pytest.approx(0), "a text is paid once"
    rounded = dataclasses.replace(right, gains=right.gains | {"noise": -1e-17}).document()
    assert rounded["gains"]["noise"] == "0.000000"
    document = right.document()
    assert document["gains"]["duplicate"] == "0.000000"
    assert document["auc"]["noise"]["level"] == "0.950000"


def test_figures_follow_from_rows_that_name_nobody(world):
    """All of them are made again from values and flags; each one changed, or rows changed, dropped or handed to another state, is named."""
    setting, scores, folder = world
    found = plant(scores, setting, folder, 10, seed=1)
    told = found.document()
    assert unsupported(told, found.rows, 30) == []
    table = pq.read_table(io.BytesIO(found.rows))
    assert table.column_names == ["state", "mine", "first", "planted", "value"]
    assert table.num_rows == 30 + 40 + 40 + 44
    assert not any(text in found.rows for text in (b"ann", b"bob", b"cid"))
    for place, key in (("share", None), ("gains", "noise"), ("gains", "duplicate"), ("auc", "noise"), ("auc", "shuffled")):  # fmt: skip
        for end in ("estimate", "low", "high") if place == "auc" else (None,):
            better = {**told, place: "0.9"} if key is None else {**told, place: {**told[place], key: {**told[place][key], end: "0.9"} if end else "0.9"}}  # fmt: skip
            (said,) = unsupported(better, found.rows, 30)
            assert re.search(r"expected -?\d\.\d{6} by the rows, got 0\.9", said)
            assert (key or place) in said

    def changed(**columns):
        data = table.to_pydict() | columns
        sink = io.BytesIO()
        pq.write_table(pa.table(data), sink)
        return sink.getvalue()

    rows = table.to_pydict()
    other = changed(value=[*rows["value"][1:], rows["value"][0]])
    assert unsupported(told, other, 30)[0].startswith("planted records: expected rows with SHA-256")
    # Who may write the judgement may write its digest too; then the figures speak.
    assert any("AUC of noise" in said for said in unsupported({**told, "rows": hashlib.sha256(other).hexdigest()}, other, 30))  # fmt: skip
    for column, value in (("planted", True), ("mine", False), ("first", False)):
        wrong = changed(**{column: [value] * 154})
        said = unsupported({**told, "rows": hashlib.sha256(wrong).hexdigest()}, wrong, 30)
        assert ("share" if column == "first" else "got other rows") in said[0]
    (said,) = unsupported({**told, "records": 9}, found.rows, 30)
    assert "expected the 30 judged ones and 9 more" in said
    (said,) = unsupported(told, found.rows, 29)
    assert "expected the 29 judged ones" in said
    (said,) = unsupported({**told, "gains": {"noise": told["gains"]["noise"]}}, found.rows, 30)
    assert said.startswith("planted records: expected rows of ['noise']")


def test_another_method_and_nothing_to_plant_are_refused(world):
    """The probe speaks of the method that is judged, or not at all; what it had written is gone."""
    setting, scores, folder = world
    with pytest.raises(EvaluationError, match=r"method: expected ekfac.*, got bm25"):
        plant(scores, setting, folder / "other", 2, score=lambda _, train, queries: bm25(train, queries))  # fmt: skip
    assert not (folder / "other" / "planted").exists()
    with pytest.raises(EvaluationError, match="at least 1"):
        plant(scores, setting, folder, 0)
