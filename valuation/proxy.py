"""What each group of owners is worth, by training a small model on every coalition of groups.

    V(S) = - mean nats per target token of the proxy trained on the records of the groups in S
    V(empty) = the same of the untrained proxy, so that the values of the groups add up to V(all) - V(empty)

Coalition S is a bitmask: bit i stands for group i. All coalitions share everything but the data:
the initial weights (seed), and the *order*. One permutation of all records, keyed by (seed, epoch),
is made first and a coalition keeps the records that are its own, in that order, so that two
coalitions differ by what a group adds and by nothing else. The steps are in proportion to the
coalition's tokens: ``epochs`` passes, or a fixed share of them where ``run.steps`` caps the
full set. The tokens of the largest coalition give the budget, not each coalition its own cap,
because a cap that binds only for large coalitions would make data look redundant.

The *bank*, ``bank/COALITION.npz``, holds the summed loss of every target record and is written
atomically, with a key: the digest of everything the training depends on. A run that was killed
goes on with the coalitions that have no file of the right key, and a bank of other data, settings
or seed is never mistaken for this one's. Results don't depend on the number of jobs: every
training uses one thread.

What it does not show: a proxy is smaller than the model the buyer trains, one seed is one draw
(repeat with other seeds for the spread), and a group that adds a language the target doesn't
speak is worth little *to this target*.

Legend: C coalitions, Q target records, M tokens of a stream, R rows, T positions.

Source: Shapley by retraining, Ghorbani and Zou, arXiv 1904.02868; common order and initial
weights across subsets as in the subset banks of datamodels, arXiv 2202.00622.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from provenance.canonical import write_atomic
from trainer.codec import to_json
from trainer.data import IGNORE, Batch, TokenStore
from trainer.errors import EXIT_DONE, EXIT_RESUME
from trainer.inputs import initial_model, load_excluded, open_store
from trainer.journal import RESULT_FILE, write_exit, write_result
from trainer.metrics import ProgressWriter, peak_rss_bytes
from trainer.spec import run_digest
from valuation.bank import (
    ProxyPlan,
    bank_file,
    bank_key,
    losses_digest,
    read_bank,
    read_plan,
)
from valuation.errors import ProxyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from numpy.typing import NDArray

    from trainer.data import BatchPlan
    from trainer.spec import RunSpec

IDLE_WORKER_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class CoalitionRows:
    """The packed training rows of one coalition; gives batches as `trainer.data.BatchPlan` does."""

    rows: Batch
    """All rows, a whole number of batches, without segments; free places have no label."""
    batch_rows: int
    """Rows of one step."""

    @property
    def steps(self) -> int:
        """Steps that use every row once."""
        return len(self.rows.tokens_BT) // self.batch_rows

    def batch(self, step: int) -> Batch:
        """The rows of one step, 0 <= step < steps."""
        return self.rows.rows(step * self.batch_rows, (step + 1) * self.batch_rows)


def shared_order(live_N: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which *all* records stand in one pass; a coalition's order is this one, filtered.

    Args:
        live_N: indices of the records that any coalition may use, ascending.
        seed: the run's seed.
        epoch: which pass, from 0.

    Returns:
        The same indices, permuted; for the full set this is the order of `trainer.data.BatchPlan`.
    """
    # Same key and same sort as the trainer's, so that the grand coalition trains as a real run would.
    key = hashlib.sha256(f"dataworth-order-1|{seed}|{epoch}".encode()).digest()
    words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(len(live_N))
    return live_N[np.argsort(words, kind="stable")]


def coalition_rows(
    store: TokenStore,
    index_R: NDArray[np.int64],
    budget: int,
    batch_rows: int,
    length: int,
) -> CoalitionRows:
    """Lay documents end to end, cut the stream after `budget` tokens, and fold it into rows.

    Args:
        store: the tokens.
        index_R: records in the order of training, with repeats for several passes.
        budget: tokens to use at most.
        batch_rows: rows of one step.
        length: tokens in a row.

    Returns:
        Rows with labels inside documents only and positions counted from the start of each piece.
    """
    length_R = store.lengths_N[index_R]
    parts = [np.empty(0, np.int64), *(store.tokens(int(index)) for index in index_R)]
    token_M = np.concatenate(parts).astype(np.int64)
    label_M = np.append(token_M[1:], IGNORE)[: len(token_M)]
    label_M[np.cumsum(length_R) - 1] = IGNORE  # the last token of a document predicts nothing
    document_M = np.repeat(np.arange(len(index_R)), length_R)
    used = min(budget, len(token_M))
    shape = (-(-used // (batch_rows * length)) * batch_rows, length)

    def fold(values_M: NDArray[np.int64], free: int) -> NDArray[np.int64]:
        row_RT = np.full(shape[0] * length, free, dtype=np.int64)
        row_RT[:used] = values_M[:used]
        return row_RT.reshape(shape)

    documents_RT = fold(document_M, -1)
    first_RT = np.zeros(shape, dtype=np.int64)
    first_RT[:, 1:] = np.where(documents_RT[:, 1:] != documents_RT[:, :-1], np.arange(1, length), 0)
    positions_RT = np.arange(length) - np.maximum.accumulate(first_RT, axis=1)
    rows = Batch(
        fold(token_M, 0), fold(label_M, IGNORE), positions_RT, documents_RT, ((),) * shape[0]
    )
    return CoalitionRows(rows=rows, batch_rows=batch_rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trained coalition."""

    coalition: int
    """Bitmask."""
    utility: float
    """- mean nats per target token."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Training tokens read."""
    rss_bytes: int
    """Peak memory of the process that trained it."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker process needs; small, because it travels by pickle."""

    run: RunSpec
    directory: Path
    plan: ProxyPlan
    coalition: int
    key: str
    parent: int


def retrain(run: RunSpec, directory: Path) -> int:
    """Train the proxy on every coalition; the entry `valuation.proxy:retrain`.

    Args:
        run: `config.extra` as `read_plan` wants it; `steps` is the most steps of all groups together.
        directory: the run's folder; bank/, progress.jsonl and, last, result.json are written there.

    Returns:
        EXIT_DONE, or EXIT_RESUME after SIGTERM or SIGINT: start again, finished coalitions are kept.

    Raises:
        ProxyError: settings that can't be meant, or a damaged bank file.
        DataError: tokens or excluded records are not the committed ones.
        NumericalError: a training left the finite numbers.
    """
    plan = read_plan(run.config.extra, directory)
    settings = _settings(run, directory, plan)
    if run.layout.world_size != 1 or run.steps < 1:
        raise ProxyError(
            f"run: expected one process and steps >= 1, got {run.layout.world_size} and {run.steps}; "
            "parallelism is config.extra.jobs",
        )
    if run.config.mixture.repeats:
        raise ProxyError(
            "config.mixture: expected no repeats in a valuation, got some; every record stands once per pass"
        )
    bank = directory / "bank"
    bank.mkdir(exist_ok=True)
    for leftover in bank.glob(".*.tmp"):
        leftover.unlink()
    (directory / RESULT_FILE).unlink(missing_ok=True)
    keys = {c: bank_key(settings, plan, c) for c in plan.coalitions}
    pending = [c for c in plan.coalitions if read_bank(bank_file(directory, c), keys[c]) is None]
    # Longest first, so that no process is left alone with the full set at the end.
    pending.sort(key=lambda c: (-len(plan.owners(c)), c))
    jobs = [_Job(run, directory, plan, c, keys[c], os.getpid()) for c in pending]
    done = len(plan.coalitions) - len(pending)
    try:
        with _Interruptible(), ProgressWriter(directory / "progress.jsonl", done) as progress:
            for number, outcome in enumerate(_outcomes(jobs, plan.jobs), done + 1):
                progress.write(
                    number, -outcome.utility, outcome.tokens, utility=outcome.utility,
                    coalition=outcome.coalition, steps=outcome.steps, worker_rss_bytes=outcome.rss_bytes,
                )  # fmt: skip
    except _StoppedError:
        write_exit(
            directory, EXIT_RESUME, "stopped by a signal; finished coalitions are in the bank"
        )
        return EXIT_RESUME
    _finish(run, directory, plan, keys)
    return EXIT_DONE


def _settings(run: RunSpec, directory: Path, plan: ProxyPlan) -> dict[str, Any]:
    """What all coalitions share and the bank's key covers; opening the tokens checks them."""
    config = to_json(run.config)
    return {
        "model": config["model"],
        "init_root": run.init_root,
        "optim": config["optim"],
        "batch": config["batch"],
        "seed": run.seed,
        "steps": run.steps,
        "excluded": run.excluded.digest if run.excluded else "none",
        "tokens": open_store(run, directory).digest,
        "target": _open(plan.target, plan.target_digest).digest,
    }


def _outcomes(jobs: Sequence[_Job], processes: int) -> Iterator[Outcome]:
    """Outcomes in the order in which they end."""
    if processes == 1 or len(jobs) < 2:
        yield from map(train_coalition, jobs)
        return
    import joblib

    with joblib.parallel_config(
        backend="loky", inner_max_num_threads=1, idle_worker_timeout=IDLE_WORKER_TIMEOUT_S,
    ):  # fmt: skip
        parallel = joblib.Parallel(
            n_jobs=min(processes, len(jobs)), return_as="generator_unordered", pre_dispatch="all"
        )
        yield from parallel(joblib.delayed(train_coalition)(job) for job in jobs)


def train_coalition(job: _Job) -> Outcome:
    """Train one coalition from the shared initial weights and write its bank file.

    Args:
        job: run, plan, coalition and key.

    Returns:
        Its utility and cost.

    Raises:
        NumericalError: a loss or gradient that is not finite.
    """
    import torch

    _follow(job.parent)
    threads = torch.get_num_threads()
    # One thread in every process: the order of sums, and so the bank, doesn't depend on `jobs`.
    torch.set_num_threads(1)
    try:
        return _train(job)
    finally:
        torch.set_num_threads(threads)


def _train(job: _Job) -> Outcome:
    from trainer.generate import evaluate
    from trainer.objective import LanguageModelling
    from trainer.optim import build_optimizer, learning_rate
    from trainer.step import train_step

    run, batch = job.run, job.run.config.batch
    rows = _training_rows(job)
    # A warm-up longer than the training would leave the shortest coalitions at a fraction of the step size.
    optim = replace(
        run.config.optim, warmup_steps=min(run.config.optim.warmup_steps, rows.steps // 5)
    )
    model = initial_model(run, job.directory)
    optimizer = build_optimizer(model, optim)
    # The objective asks its plan for batches only, and CoalitionRows answers as a BatchPlan does.
    objective = LanguageModelling(cast("BatchPlan", rows))
    for step in range(rows.steps):
        optimizer.lr = learning_rate(step, optim, rows.steps)
        part = objective.batch(step, 0, 1)
        train_step(
            model, optimizer, objective, part, objective.counts(part), clip_norm=optim.clip_norm
        )
    target = _open(job.plan.target, job.plan.target_digest)
    sequences = [target.tokens(int(index)) for index in target.live_N]
    nll_Q, tokens_Q = evaluate(model, sequences, batch.rows, batch.length)
    if not tokens_Q.sum():
        raise ProxyError("target: expected records of 2 or more tokens, got nothing to predict")
    num_tokens = int((rows.rows.documents_BT >= 0).sum())
    buffer = io.BytesIO()
    np.savez(
        buffer, key=np.array(job.key), nll_Q=nll_Q, tokens_Q=tokens_Q, index_Q=target.live_N,
        steps=np.array(rows.steps), tokens=np.array(num_tokens),
    )  # fmt: skip
    write_atomic(bank_file(job.directory, job.coalition), buffer.getvalue())
    utility = float(-nll_Q.sum() / tokens_Q.sum())
    return Outcome(job.coalition, utility, rows.steps, num_tokens, peak_rss_bytes())


def _training_rows(job: _Job) -> CoalitionRows:
    """The rows of a coalition: the shared order, filtered, up to the coalition's share of the budget."""
    run, plan, batch = job.run, job.plan, job.run.config.batch
    store, live_N = _training_set(run, job.directory)
    codes = {owner: code for code, owner in enumerate(store.owners)}
    unknown = sorted({owner for _, owners in plan.groups for owner in owners} - set(codes))
    if unknown:
        raise ProxyError(f"groups: no owner {unknown[0]!r} in the tokens; take it out of its group")

    def members(coalition: int) -> NDArray[np.bool_]:
        wanted = np.array([codes[owner] for owner in plan.owners(coalition)], dtype=np.int64)
        return np.isin(store.owner_codes_N, wanted)

    member_N, all_N = members(job.coalition), members(plan.everyone)
    # Integers throughout: the same budget on every machine.
    everything = int(store.lengths_N[live_N[all_N[live_N]]].sum()) * plan.epochs
    own = int(store.lengths_N[live_N[member_N[live_N]]].sum()) * plan.epochs
    limit = min(everything, run.steps * batch.rows * batch.length)
    budget = own * limit // max(everything, 1)
    order = [shared_order(live_N, run.seed, epoch) for epoch in range(plan.epochs)]
    index_R = np.concatenate([epoch_N[member_N[epoch_N]] for epoch_N in order])
    return coalition_rows(store, index_R, budget, batch.rows, batch.length)


def _training_set(run: RunSpec, directory: Path) -> tuple[TokenStore, NDArray[np.int64]]:
    """The run's documents, and the indices of those that any coalition may use."""
    store, excluded = (
        _open(directory / run.tokens, run.tokens_digest),
        load_excluded(run, directory),
    )
    kept = [int(index) for index in store.live_N if store.record_id(int(index)) not in excluded]
    return store, np.array(kept, dtype=np.int64)


@lru_cache(maxsize=4)  # a worker trains many coalitions of one run
def _open(folder: Path, digest: str | None) -> TokenStore:
    return TokenStore.open(folder, digest)


@lru_cache(maxsize=1)  # one watcher per process
def _follow(parent: int) -> None:
    """Let a worker end with the process that started it, also when that was killed without a word."""
    if os.getpid() == parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)  # bank files are written atomically: nothing can be half done

    threading.Thread(target=watch, daemon=True).start()


class _StoppedError(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT; not an Exception, so that nothing on the way keeps it."""


class _Interruptible:
    """Turns SIGTERM and SIGINT into `_StoppedError`; a context manager."""

    def __enter__(self) -> None:
        """Catch the signals; only a main thread may."""
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._raise)

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        del frame
        raise _StoppedError(number)


def _finish(run: RunSpec, directory: Path, plan: ProxyPlan, keys: dict[int, str]) -> None:
    """Write result.json: the utility of every coalition, and the digest of the losses behind it."""
    coalitions = {}
    for coalition, key in keys.items():
        content = read_bank(bank_file(directory, coalition), key)
        assert content is not None, "every coalition was trained"
        coalitions[str(coalition)] = {
            "utility": to_json(float(-content["nll_Q"].sum() / content["tokens_Q"].sum())),
            "steps": int(content["steps"]),
            "tokens": int(content["tokens"]),
            "losses_digest": losses_digest(content),
        }
    write_result(
        directory,
        {
            "run": run.run,
            "kind": run.kind,
            "status": "done",
            "steps": sum(entry["steps"] for entry in coalitions.values()),
            "final_loss": "none",
            "checkpoint_root": "none",
            "run_digest": run_digest(run),
            "tokens_digest": run.tokens_digest,
            "target_digest": _open(plan.target, plan.target_digest).digest,
            "unit": "nat",
            "groups": [{"id": name, "owners": list(owners)} for name, owners in plan.groups],
            "coalitions": coalitions,
        },
    )
