"""The trainer's entry that judges scores by retraining: `valuation.judging:run`.

    run.json: tokens, target, scores ──▶ judgement.json   what `valuation.judgement` found, hashed
                                     ├▶ judged.parquet    method x query x subset: what it foretold, and the loss that came
                                     └▶ bank/             one file per retraining; a killed run does only what is missing

`contradictions(document, rows)` holds one against the other, so that a reader needs neither scores nor a model.

Legend: Q queries, M subsets.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance import jcs, write_atomic
from trainer.inputs import open_store
from trainer.journal import RESULT_FILE, write_result
from trainer.spec import run_digest
from valuation.errors import EvaluationError
from valuation.evaluation import spearman_rows
from valuation.influence.scores import Scores
from valuation.judgement import BM25, CONTROL, Effort, estimate_of, judge, verdict_of
from valuation.subsets import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

    from trainer.spec import RunSpec
    from valuation.judgement import Judgement

JUDGEMENT_FILE, ROWS_FILE = "judgement.json", "judged.parquet"
MEASURED = "loss"
"""Name of the rows that hold what was measured, nats summed over a query's tokens."""
EXIT_DONE = 0
_EXTRA = {
    "target", "target_digest", "test", "test_digest", "scores", "epochs", "subsets", "seeds", "top_queries", "random_sets",
    "curve_percents", "curve_seeds", "jobs",
}  # fmt: skip
_ROUNDING = 1e-6  # of the decimals in a document


def run(spec: RunSpec, directory: Path) -> int:
    """Judge the scores that a run names.

    Args:
        spec: one process; `config` has model, optimiser and batch of the retrainings, `config.extra` holds `target` (token folder) and
            `target_digest`, `test` and `test_digest` (the held-out part that curves are measured on, which no score has seen), `scores` (folder),
            `epochs`, `subsets`, `seeds`, `top_queries`, `random_sets`, `curve_percents`, `curve_seeds`, `jobs` (processes; they change no bit).
        directory: the run's folder; the bank, judged.parquet, judgement.json and, last, result.json are written there.

    Returns:
        0.

    Raises:
        EvaluationError: settings that can't be meant.
        HeldOutError: a record of target or test that stands in the training data.
        GradientError: scores of other data.
        DataError: tokens are not those named.
    """
    extra = spec.config.extra
    if set(extra) != _EXTRA or spec.layout.world_size != 1:
        raise EvaluationError(
            f"run: expected one process and in config.extra {sorted(_EXTRA)}, got {sorted(extra)}"
        )
    (directory / RESULT_FILE).unlink(missing_ok=True)
    store = open_store(spec, directory)
    setting = Setting(
        train=directory / spec.tokens, target=directory / extra["target"], train_digest=store.digest,
        target_digest=extra["target_digest"], model=spec.config.model, optim=spec.config.optim,
        batch=spec.config.batch, epochs=int(extra["epochs"]),
    )  # fmt: skip
    effort = Effort(
        subsets=int(extra["subsets"]), seeds=int(extra["seeds"]), top_queries=int(extra["top_queries"]),
        random_sets=int(extra["random_sets"]), curve_percents=tuple(extra["curve_percents"]), curve_seeds=int(extra["curve_seeds"]),
    )  # fmt: skip
    test = replace(setting, target=directory / extra["test"], target_digest=extra["test_digest"])
    found = judge(
        Scores.load(directory / extra["scores"]), setting, directory, effort, seed=spec.seed, test=test, jobs=int(extra["jobs"]),
    )  # fmt: skip
    write_atomic(directory / ROWS_FILE, rows_of(found))
    write_atomic(directory / JUDGEMENT_FILE, jcs(found.document()))
    write_result(
        directory,
        {
            "run": spec.run, "kind": spec.kind, "status": "done", "run_digest": run_digest(spec), "tokens_digest": spec.tokens_digest,
            "method": found.method, "verdict": found.verdict, "subsets": effort.subsets, "lds": found.lds.estimate,
        },
    )  # fmt: skip
    return EXIT_DONE


def rows_of(found: Judgement) -> bytes:
    """A judgement's rows as a Parquet file: columns method, query, subset, value.

    Args:
        found: from `judge`.

    Returns:
        The file. Queries and subsets are ordinals; the loss is the mean over seeds.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = {**found.told, MEASURED: found.loss_RMQ.mean(0).T}
    shape = found.loss_RMQ.shape[2], found.loss_RMQ.shape[1]
    query_QM, subset_QM = np.indices(shape)
    columns = {
        "method": [name for name in tables for _ in range(query_QM.size)],
        "query": np.tile(query_QM.ravel(), len(tables)),
        "subset": np.tile(subset_QM.ravel(), len(tables)),
        "value": np.concatenate([np.asarray(values_QM).ravel() for values_QM in tables.values()]),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def contradictions(document: Mapping[str, Any], rows: bytes | pa.Table) -> list[str]:
    """What a judgement says that its own rows don't support, and a control that is broken.

    Args:
        document: judgement.json.
        rows: judged.parquet, as bytes or as a table.

    Returns:
        One sentence each; none for a judgement that holds.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(rows)) if isinstance(rows, bytes) else rows
    method_R, value_R = np.array(table["method"].to_pylist()), table["value"].to_numpy()
    shape = document["queries"], document["subsets"]
    stated = {document["method"]: document["lds"], **document["beside"]}
    counts = {str(name): int((method_R == name).sum()) for name in set(method_R.tolist())}
    if counts != dict.fromkeys([*stated, MEASURED], shape[0] * shape[1]):
        return [f"rows: expected {shape[0]} x {shape[1]} for each of {sorted([*stated, MEASURED])}, got {counts}"]  # fmt: skip
    fall_QM = -value_R[method_R == MEASURED].reshape(shape)
    problems = []
    for name, text in stated.items():
        # The judge ranks what a subset's scores add up to against how far the loss fell.
        got = float(spearman_rows(value_R[method_R == name].reshape(shape), fall_QM).mean())
        if abs(got - float(text["estimate"])) > _ROUNDING:
            problems.append(
                f"LDS of {name}: expected {got:.6f} by the rows, got {text['estimate']}"
            )
    verdict = verdict_of(
        document["subsets"], estimate_of(document["lds"]), estimate_of(document["above_bm25"]),
        estimate_of(document["beside"][CONTROL]),
    )  # fmt: skip
    if verdict != document["verdict"]:
        problems.append(f"verdict: expected {verdict} by the numbers, got {document['verdict']}")
    if verdict == "INVALID":
        problems.append(
            "a random draw's LDS is distinct from 0: the judge is broken, not the method"
        )
    if BM25 not in document["beside"]:
        problems.append("expected BM25 beside the method, got none")
    return problems
