"""Influence of records on a held-out target at one checkpoint, as a run: from run.json to a table with intervals.

Entry `valuation.influence.attribution:run`. The run names everything that the scores are bound to: tokens by digest and
corpus root, tokenizer, checkpoint by root, target by digest; each is recomputed before anything is scored.

Records and queries are fixed samples, the first by SHA-256(seed, record id) that fit a number of rows, so a larger
sample holds the smaller one. A query that stands word for word among the training records is refused: a model that has
seen the question tells nothing about who taught the answer.

    value_n = sum_q score_qn / (M sum_q t_q)        nats per target token; positive = training on n lowers the loss

with M the documents of the training: a score is a derivative by the weight of one document in a sum, and leaving it out
of a mean over M changes that weight by 1/M. Order and sign are what EK-FAC is good for. The scale is that of a converged
model, which a short training is far from.

The table comes with the ratio estimate's interval over queries (`valuation.evaluation.record_values`). Records that don't survive
Holm's correction over all scored ones are *not distinguishable* from 0, and the table says so. What the interval doesn't hold: the seed of the training, and what EK-FAC
itself misses of a retraining (`valuation.evaluation` measures that).

Legend: Q queries, N records, O owners of records, P owners of queries.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance.canonical import write_atomic
from trainer.data import TokenStore
from trainer.errors import EXIT_DONE
from trainer.inputs import initial_model, load_excluded, open_store
from trainer.journal import RESULT_FILE, write_result
from trainer.spec import run_digest
from valuation.errors import GradientError
from valuation.evaluation import record_values
from valuation.heldout import refuse_overlap, texts
from valuation.influence import ekfac
from valuation.influence.scores import TokenSet

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.spec import RunSpec
    from valuation.influence.scores import Scores

RECORDS_FILE, OWNERS_FILE, SCORES_FOLDER = "records.parquet", "owners.parquet", "scores"
METHOD = "influence.ekfac"
LEVEL = 0.95
_EXTRA = {"target", "target_digest", "record_rows", "query_rows"}


def run(spec: RunSpec, directory: Path) -> int:
    """Score records at the run's checkpoint.

    Args:
        spec: one process; `init` and `init_root` name the weights, `config.extra` holds `target` (token folder),
            `record_rows` and `query_rows` (rows of `batch.length` tokens to sample), optionally `target_digest`.
        directory: the run's folder; scores, records.parquet, owners.parquet and, last, result.json are written there.

    Returns:
        EXIT_DONE.

    Raises:
        GradientError: settings that can't be meant, or fewer than two queries.
        HeldOutError: queries among the training records.
        DataError: tokens, target or tokenizer are not those named.
        CheckpointError: the checkpoint is not the one named.
    """
    extra, length = spec.config.extra, spec.config.batch.length
    missing = sorted((_EXTRA - {"target_digest"}) - set(extra))
    unknown = sorted(set(extra) - _EXTRA)
    if missing or unknown or spec.init == "none" or spec.layout.world_size != 1:
        raise GradientError(
            f"run: expected one process, a checkpoint in init, and in config.extra {sorted(_EXTRA)}; "
            f"missing {missing}, unknown {unknown}, init {spec.init!r}"
        )
    (directory / RESULT_FILE).unlink(missing_ok=True)
    store = open_store(spec, directory)
    target = TokenStore.open(directory / extra["target"], extra.get("target_digest"))
    seed, excluded = spec.seed, load_excluded(spec, directory)
    train = TokenSet.of(
        store, length, sample(store, seed, int(extra["record_rows"]) * length, excluded)
    )
    queries = TokenSet.of(
        target, length, sample(target, seed, int(extra["query_rows"]) * length, least=2)
    )
    if len(queries.records) < 2:
        raise GradientError(
            f"target: expected 2 or more records of 2 or more tokens, got {len(queries.records)}; hold more out"
        )
    kept = [int(i) for i in store.live_N if store.record_id(int(i)) not in excluded]
    refuse_overlap(texts(store, kept), {"target": queries.texts()})
    found = ekfac.scores(initial_model(spec, directory).eval(), train, queries)
    documents = sum(store.record_id(int(i)) not in excluded for i in store.live_N)
    found.save(directory / SCORES_FOLDER)
    found_per_document = replace(found, scores_QN=found.scores_QN / documents)
    values = record_table(found_per_document, queries.labels_N)
    owners = owner_table(
        found_per_document, queries.labels_N, _owners(store, train), _names(target, queries)
    )
    write_atomic(directory / RECORDS_FILE, _parquet({"owner": _owners(store, train), **values}))
    write_atomic(directory / OWNERS_FILE, _parquet(owners))
    write_result(
        directory,
        {
            "run": spec.run, "kind": spec.kind, "status": "done", "run_digest": run_digest(spec), "method": METHOD,
            "tokens_digest": spec.tokens_digest, "target_digest": target.digest, "binding": asdict(found.binding),
            "records": len(train.records), "queries": len(queries.records), "target_labels": int(queries.labels_N.sum()),
            "distinguishable": int(np.sum(values["distinguishable"])), "level": str(LEVEL), "unit": "nat",
        },
    )  # fmt: skip
    return EXIT_DONE


def sample(
    store: TokenStore,
    seed: int,
    num_tokens: int,
    excluded: Collection[bytes] = frozenset(),
    least: int = 1,
) -> list[int]:
    """Records that fit a number of tokens, in the order of SHA-256(seed, record_id).

    Args:
        store: the documents.
        seed: key of the sample.
        num_tokens: what they may fill together.
        excluded: record ids that are not wanted.
        least: records that are taken even if they fill more.

    Returns:
        Their indices, of records with 2 or more tokens.
    """
    live = [int(i) for i in store.live_N if store.lengths_N[int(i)] >= 2]
    kept = [i for i in live if not excluded or store.record_id(i) not in excluded]
    ordered = sorted(
        kept,
        key=lambda i: hashlib.sha256(
            b"dataworth-influence-1|%d|" % seed + store.record_id(i)
        ).digest(),
    )
    filled = np.cumsum(store.lengths_N[ordered])
    return ordered[: max(least, int(np.searchsorted(filled, num_tokens, side="right")))]


def record_table(scores: Scores, labels_Q: NDArray[np.int64]) -> dict[str, Any]:
    """Value, error and interval of every record, nats per target token.

    Args:
        scores: of summed losses, divided by the documents of the training.
        labels_Q: predicted tokens of each query.

    Returns:
        Columns record_id, index, value, se, ci_low, ci_high, distinguishable.
    """
    tokens_Q = labels_Q.astype(np.float64)
    found = record_values(scores.scores_QN / tokens_Q[:, None], tokens_Q, LEVEL)
    return {
        "record_id": list(scores.record_ids), "index": scores.train_index_N, "value": found.value_N, "se": found.se_N,
        "ci_low": found.low_N, "ci_high": found.high_N, "distinguishable": found.distinct_N,
    }  # fmt: skip


def owner_table(
    scores: Scores,
    labels_Q: NDArray[np.int64],
    owner_N: Sequence[str],
    target_owner_Q: Sequence[str],
) -> dict[str, Any]:
    """Influence of every owner's sampled records on every target owner's queries.

    Args:
        scores: of summed losses, divided by the documents of the training.
        labels_Q: predicted tokens of each query.
        owner_N: owner of each record.
        target_owner_Q: owner of each query.

    Returns:
        Columns owner, target_owner, value (mean over the owner's records of nats per token of these queries), records, queries.
    """
    left, left_of = np.unique(np.array(owner_N), return_inverse=True)
    right, right_of = np.unique(np.array(target_owner_Q), return_inverse=True)
    records_O, queries_P = np.bincount(left_of), np.bincount(right_of)
    sums_PO = np.zeros((len(right), len(left)))
    np.add.at(sums_PO, (right_of[:, None], left_of[None, :]), scores.scores_QN)
    tokens_P = np.bincount(right_of, weights=labels_Q)
    means_PO = sums_PO / tokens_P[:, None] / records_O
    rows = [(o, p) for o in range(len(left)) for p in range(len(right))]
    return {
        "owner": [str(left[o]) for o, _ in rows], "target_owner": [str(right[p]) for _, p in rows],
        "value": np.array([means_PO[p, o] for o, p in rows]), "records": np.array([records_O[o] for o, _ in rows]),
        "queries": np.array([queries_P[p] for _, p in rows]),
    }  # fmt: skip


def _owners(store: TokenStore, tokens: TokenSet) -> list[str]:
    names = list(store.owners)
    return [str(names[store.owner_codes_N[index]]) for index in tokens.index_N]


def _names(target: TokenStore, queries: TokenSet) -> list[str]:
    """Owner of each query; where all are one owner's, each query stands for itself, by owner and id."""
    owners = _owners(target, queries)
    if len(set(owners)) > 1:
        return owners
    return [
        f"{owner} {record_id.hex()[:6]}"
        for owner, record_id in zip(owners, queries.ids, strict=True)
    ]


def _parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {
        name: pa.array(values, pa.binary(32)) if name == "record_id" else pa.array(values)
        for name, values in columns.items()
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), sink)
    return sink.getvalue().to_pybytes()
