"""The trainer's entry that judges scores by retraining: `valuation.judging:run`.

    run.json: tokens, target, scores ──▶ judgement.json   what `valuation.judgement` found, hashed
                                     ├▶ judged.parquet    method x query x subset: what it foretold, and the loss that came
                                     ├▶ planted.parquet   value of every record, as it is and under each attack, where records were planted
                                     └▶ bank/             one file per retraining; a killed run does only what is missing there

In-run credits and planted records (`valuation.planting`) are not in the bank: a killed run makes them again.

`contradictions(document, rows, planted)` holds one against the others, so that a reader needs neither scores nor a model.

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
from valuation.credit import DEFAULT_FORMS
from valuation.errors import EvaluationError
from valuation.evaluation import agreement
from valuation.influence.scores import Scores, TokenSet
from valuation.inrun import credited_steps
from valuation.judgement import (
    BM25,
    CONTROL,
    FORMAT,
    MIN_SUBSETS,
    Effort,
    estimate_of,
    judge,
    judged_sets,
    verdict_of,
)
from valuation.planting import plant, unsupported
from valuation.subsets import Setting
from valuation.workers import one_thread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from trainer.spec import RunSpec
    from valuation.judgement import Judgement

JUDGEMENT_FILE, ROWS_FILE, PLANTED_FILE = "judgement.json", "judged.parquet", "planted.parquet"
MEASURED, AGAIN = "loss", "loss again"
"""Names of the rows that hold what was measured, nats summed over a query's tokens, under one seed and under the next."""
WHOLE = -1
"""Query of a row that is of the target as a whole."""
EXIT_DONE = 0
_EXTRA = {
    "target", "target_digest", "test", "test_digest", "scores", "epochs", "subsets", "seeds", "again", "top_queries", "random_sets",
    "curve_percents", "curve_seeds", "planted", "jobs",
}  # fmt: skip
_ROUNDING = 1e-6  # of the decimals in a document


def run(spec: RunSpec, directory: Path) -> int:
    """Judge the scores that a run names.

    Args:
        spec: one process; `config` has model, optimiser and batch of the retrainings, `config.extra` holds `target` (token folder) and
            `target_digest`, `test` and `test_digest` (the held-out part that curves are measured on, which no score has seen), `scores` (folder),
            `epochs`, `subsets`, `seeds`, `again`, `top_queries`, `random_sets`, `curve_percents`, `curve_seeds`, `planted` (records of each kind that `valuation.planting` plants; 0: none), `jobs` (processes; they change no bit).
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
        subsets=int(extra["subsets"]), seeds=int(extra["seeds"]), again=int(extra["again"]), top_queries=int(extra["top_queries"]),
        random_sets=int(extra["random_sets"]), curve_percents=tuple(extra["curve_percents"]), curve_seeds=int(extra["curve_seeds"]),
    )  # fmt: skip
    test = replace(setting, target=directory / extra["test"], target_digest=extra["test_digest"])
    scores = Scores.load(directory / extra["scores"])
    credit = None
    if effort.subsets >= MIN_SUBSETS:  # fewer rank nothing, so nothing is trained for it
        judged_sets(scores, setting, test)  # before the first training
        credit = in_run_credits(scores, setting, spec.seed)
    found = judge(
        scores,
        setting,
        directory,
        effort,
        seed=spec.seed,
        test=test,
        whole=credit,
        jobs=int(extra["jobs"]),
    )
    planted: dict[str, Any] | str = "none"
    if extra["planted"]:
        probe = plant(scores, setting, directory, int(extra["planted"]), seed=spec.seed)
        write_atomic(directory / PLANTED_FILE, probe.rows)
        planted = probe.document()
    write_atomic(directory / ROWS_FILE, rows_of(found))
    write_atomic(directory / JUDGEMENT_FILE, jcs(found.document() | {"planted": planted}))
    write_result(
        directory,
        {
            "run": spec.run, "kind": spec.kind, "status": "done", "run_digest": run_digest(spec), "tokens_digest": spec.tokens_digest,
            "method": found.method, "verdict": found.verdict, "subsets": effort.subsets, "lds": found.lds.estimate,
        },
    )  # fmt: skip
    return EXIT_DONE


def in_run_credits(scores: Scores, setting: Setting, seed: int) -> dict[str, NDArray[np.float64]]:
    """In-run credits of one training on the scored records alone, as long as a retraining on all of them, for the judged queries.

    The credits that the graph publishes are of another training, which reaches next to none of a sample in its few steps, and for another
    sample of the target: retraining can't say whether *they* are right. This asks whether the method foretells retraining.

    Args:
        scores: name the records and the queries.
        setting: what all retrainings share.
        seed: of the weights and the order.

    Returns:
        `inrun.FORM` → credits [N], for the queries as a whole.
    """
    from trainer.data import BatchPlan
    from trainer.model import Transformer, init_parameters

    (store, target), batch = setting.stores(), setting.batch
    ours = set(scores.record_ids)
    others = {name for index in store.live_N if (name := store.record_id(int(index))) not in ours}
    plan = BatchPlan(store, seed, batch, excluded=others)
    tokens = setting.epochs * int(store.lengths_N[scores.train_index_N].sum())
    steps = -(-tokens // (batch.rows * batch.length))
    optim = replace(setting.optim, warmup_steps=min(setting.optim.warmup_steps, steps // 5))
    model = Transformer(setting.model)
    init_parameters(model, seed)
    queries = TokenSet.of(target, batch.length, scores.query_index_Q)
    aim = list(queries.batches(batch.rows))
    credit_N = np.zeros(store.size)
    with one_thread():
        for step in credited_steps(model, plan, aim, optim, steps, forms=DEFAULT_FORMS):
            np.add.at(credit_N, step.segments.index_S, step.credits_S[DEFAULT_FORMS[0]])
    return {f"inrun.{DEFAULT_FORMS[0]}": credit_N[scores.train_index_N]}


def rows_of(found: Judgement) -> bytes:
    """A judgement's rows as a Parquet file: columns method, query, subset, value.

    Args:
        found: from `judge`.

    Returns:
        The file. Queries and subsets are ordinals, `WHOLE` in place of a query where a method knows none; the loss is the mean over seeds.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = {**found.told, MEASURED: found.loss_RMQ.mean(0).T, AGAIN: found.again_KQ.T}
    columns: dict[str, list[Any]] = {"method": [], "query": [], "subset": [], "value": []}
    for name, value_QM in tables.items():
        query_QM, subset_QM = np.indices(value_QM.shape)
        columns["method"] += [name] * value_QM.size
        columns["query"] += (
            query_QM.ravel()
            + (WHOLE if name in found.whole and name not in {found.method, *found.beside} else 0)
        ).tolist()
        columns["subset"] += subset_QM.ravel().tolist()
        columns["value"] += value_QM.ravel().tolist()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def contradictions(
    document: Mapping[str, Any], rows: bytes | pa.Table, planted: bytes | None = None
) -> list[str]:
    """What a judgement says that its own rows don't support, and a control that is broken.

    Args:
        document: judgement.json.
        rows: judged.parquet, as bytes or as a table.
        planted: planted.parquet, where there is one.

    Returns:
        One sentence each; none for a judgement that holds. One of an earlier version has rows that can't be held against it all.
    """
    import pyarrow.parquet as pq

    if document["format"] != FORMAT:
        earlier = "judged by an earlier version, " if document["format"] < FORMAT else ""
        return [f"{earlier}format: expected {FORMAT}, got {document['format']}; judge these values again"]  # fmt: skip
    table = pq.read_table(io.BytesIO(rows)) if isinstance(rows, bytes) else rows
    misfits = _misfits(document, table)
    problems = misfits or _by_rows(document, table)
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
    if (planted is None) != (document.get("planted", "none") == "none"):
        problems.append(f"planted records: expected {PLANTED_FILE} where the judgement tells of them and only there, got {'none' if planted is None else 'one'}")  # fmt: skip
    elif planted is not None:
        problems += unsupported(document["planted"], planted, document["records"])
    if BM25 not in document["beside"]:
        problems.append("expected BM25 beside the method, got none")
    return problems


def _heights(document: Mapping[str, Any]) -> dict[str, int]:
    """Rows of queries that each method must have, and the losses."""
    each = [document["method"], *document["beside"], MEASURED]
    return {**dict.fromkeys(document["whole"], 1), **dict.fromkeys(each, document["queries"])}


def _misfits(document: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Rows that are not there, or too many."""
    names = table["method"].to_pylist()
    subsets, again = document["subsets"], document["again"]
    expected = {name: height * subsets for name, height in _heights(document).items()}
    expected |= {AGAIN: document["queries"] * again} if again else {}
    counts = {name: names.count(name) for name in sorted(set(names))}
    if counts == expected:
        return []
    return [f"rows: expected {document['queries']} x {subsets}, in all {expected}, got {counts}"]


def _by_rows(document: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Numbers that the rows don't give."""
    method_R, value_R = np.array(table["method"].to_pylist()), table["value"].to_numpy()

    def rows(name: str, queries: int) -> NDArray[np.float64]:
        return np.asarray(value_R[method_R == name].reshape(queries, -1))

    # The judge ranks what a subset's scores add up to against how far the loss fell.
    told = {name: rows(name, height) for name, height in _heights(document).items()}
    fall_QM = -told[MEASURED]
    each = {document["method"]: document["lds"], **document["beside"]}
    checks = [
        (f"LDS of {name}", agreement(told[name], fall_QM).mean(), text)
        for name, text in each.items()
    ]
    checks += [
        (f"LDS of {name}, target as a whole", agreement(_sum(told[name]), _sum(fall_QM))[0], text)
        for name, text in document["whole"].items()
    ]
    of = {name: agreement(told[name], fall_QM).mean() for name in (document["method"], BM25)}
    checks.append(("LDS above BM25's", of[document["method"]] - of[BM25], document["above_bm25"]))
    if again := document["again"]:
        twice_QK = -rows(AGAIN, document["queries"])
        for kind in ("each", "whole"):
            r = agreement(fall_QM[:, :again], twice_QK, whole=kind == "whole").mean()
            checks.append((f"ceiling, {kind}", max(0.0, r) ** 0.5, document["ceiling"][kind]))
    return [
        f"{what}: expected {got:.6f} by the rows, got {text['estimate']}"
        for what, got, text in checks
        if abs(got - float(text["estimate"])) > _ROUNDING
    ]


def _sum(values_QM: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(values_QM.sum(0, keepdims=True))
