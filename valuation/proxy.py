"""What each group of owners is worth, by training a small model on every coalition of groups.

    V(S) = - mean nats per target token of the proxy trained on the records of the groups in S
    V(empty) = the same of the untrained proxy, so that the values of the groups add up to V(all) - V(empty)

Coalition S is a bitmask: bit i stands for group i. All coalitions share everything but the data:
the initial weights (seed), and the *order*. Where a record stands is a function of (seed, epoch, its content),
see `valuation.retraining`, so that two coalitions differ by what a group adds and by nothing else, and a record that
nobody trains on, such as a copy, changes no training. The steps are in proportion to the
coalition's tokens: ``epochs`` passes, or a fixed share of them where ``run.steps`` caps the
full set. The tokens of the largest coalition give the budget, not each coalition its own cap,
because a cap that binds only for large coalitions would make data look redundant.

The *bank*, ``bank/COALITION.npz``, holds the summed loss of every target record and is written
atomically, with a key: the digest of everything the training depends on. A run that was killed
goes on with the coalitions that have no file of the right key, and a bank of other data, settings
or seed is never mistaken for this one's. Results don't depend on the number of jobs: every
training uses one thread.

What it does not show: a proxy is smaller than the model the buyer trains, one seed is one draw
(``seeds`` names further ones, under which every coalition is trained as well: `valuation.seeds` takes means and spread), and a group that adds a language the target doesn't
speak is worth little *to this target*.

Legend: C coalitions, Q target records, M tokens of a stream, R rows, T positions.

Source: Shapley by retraining, Ghorbani and Zou, arXiv 1904.02868; common order and initial
weights across subsets as in the subset banks of datamodels, arXiv 2202.00622.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.codec import to_json
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
    part_of,
    read_bank,
    read_lots,
    read_plan,
    seed_name,
)
from valuation.errors import ProxyError
from valuation.heldout import refuse_overlap, texts
from valuation.retraining import (
    TrainingRows,
    contents,
    fit_rows,
    named,
    open_tokens,
    shared_order,
    training_rows,
    write_losses,
)
from valuation.workers import in_workers, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from numpy.typing import NDArray

    from trainer.data import TokenStore
    from trainer.spec import RunSpec


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
    seed: int | None = None
    """A further seed, which `run` then has; None for the run's own."""

    @property
    def file(self) -> Path:
        """Its bank file."""
        return bank_file(self.directory, seed_name(self.coalition, self.seed))


def retrain(run: RunSpec, directory: Path) -> int:
    """Train the proxy on every coalition, under every seed; the entry `valuation.proxy:retrain`.

    Args:
        run: `config.extra` as `read_plan` wants it; `steps` is the most steps of all groups together.
        directory: the run's folder; bank/, progress.jsonl and, last, result.json are written there.

    Returns:
        EXIT_DONE, or EXIT_RESUME after SIGTERM or SIGINT: start again, finished coalitions are kept.

    Raises:
        ProxyError: settings that can't be meant, or a damaged bank file.
        HeldOutError: a record of the target or of another one that a coalition trains on.
        DataError: tokens or excluded records are not the committed ones.
        NumericalError: a training left the finite numbers.
    """
    chosen = (run.config.precision, run.config.batch.accumulation, run.config.guard)
    if chosen != ("float32", 1, None):
        raise ProxyError(
            f"config: expected float32, accumulation 1 and no guard in a valuation, got {chosen}; "
            "coalitions are compared with each other, so all are trained in one way that the bank's key names"
        )
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
    _hold_out(run, directory, plan)
    bank = directory / "bank"
    bank.mkdir(exist_ok=True)
    for leftover in bank.glob(".*.tmp"):
        leftover.unlink()
    (directory / RESULT_FILE).unlink(missing_ok=True)
    if run.seed in plan.seeds:
        raise ProxyError(f"seeds: expected further seeds beside the run's {run.seed}, got it twice")
    jobs = _jobs(run, directory, plan, settings)
    pending = [job for job in jobs if read_bank(job.file, job.key) is None]
    # Longest first, so that no process is left alone with the full set at the end.
    pending.sort(key=lambda job: -len(plan.owners(job.coalition)))
    done = len(jobs) - len(pending)
    try:
        with _Interruptible(), ProgressWriter(directory / "progress.jsonl", done) as progress:
            for number, outcome in enumerate(
                in_workers(train_coalition, pending, plan.jobs, plan.backend), done + 1
            ):
                progress.write(
                    number, -outcome.utility, outcome.tokens, utility=outcome.utility,
                    coalition=outcome.coalition, steps=outcome.steps, worker_rss_bytes=outcome.rss_bytes,
                )  # fmt: skip
    except _StoppedError:
        write_exit(
            directory, EXIT_RESUME, "stopped by a signal; finished coalitions are in the bank"
        )
        return EXIT_RESUME
    _finish(run, directory, plan, jobs)
    return EXIT_DONE


def _hold_out(run: RunSpec, directory: Path, plan: ProxyPlan) -> None:
    """No target has a record that a coalition trains on."""
    store, live_N = _training_set(run, directory)
    trained_N = live_N[_membership(store, plan)(plan.everyone)[live_N]]
    held_out = {"target": texts(open_tokens(plan.target, plan.target_digest))}
    for number, other in enumerate(plan.others, 1):
        held_out[f"other target {number}"] = texts(open_tokens(*other))
    refuse_overlap(texts(store, trained_N.tolist()), held_out)


def _jobs(run: RunSpec, directory: Path, plan: ProxyPlan, settings: dict[str, Any]) -> list[_Job]:
    """Every coalition under the run's seed, then under each further one: the same key and bits as a run of that seed alone."""
    made = []
    for seed in (None, *plan.seeds):
        under = run if seed is None else replace(run, seed=seed)
        own = settings | {"seed": under.seed}
        made += [_Job(under, directory, plan, c, bank_key(own, plan, c), seed) for c in plan.coalitions]  # fmt: skip
    return made


def _settings(run: RunSpec, directory: Path, plan: ProxyPlan) -> dict[str, Any]:
    """What all coalitions share and the bank's key covers; opening the tokens checks them."""
    config = to_json(run.config)
    store = open_store(run, directory)
    read: dict[str, Any] = {
        "tokens": store.digest,
        "excluded": run.excluded.digest if run.excluded else "none",
    }
    if plan.lots is not None:
        read = {
            "lots": _lot_digests(run, directory, plan),
            "share": list(_share(run, directory, plan)),
        }
    return {
        "model": config["model"],
        "init_root": run.init_root,
        "optim": config["optim"],
        "batch": config["batch"],
        "seed": run.seed,
        "steps": run.steps,
        "target": open_tokens(plan.target, plan.target_digest).digest,
        **read,
    } | ({"others": [open_tokens(*other).digest for other in plan.others]} if plan.others else {})


def _lot_digests(run: RunSpec, directory: Path, plan: ProxyPlan) -> list[str]:
    """What each lot holds: SHA-256 over the sorted digests of its records' contents, as a training reads them."""
    store, live_N = _training_set(run, directory)
    members, digest_N = _membership(store, plan), contents(store)
    held = [sorted(digest_N[index] for index in live_N[members(1 << bit)[live_N]].tolist()) for bit in range(len(plan.groups))]  # fmt: skip
    return [hashlib.sha256(b"".join(each)).hexdigest() for each in held]


def _share(run: RunSpec, directory: Path, plan: ProxyPlan) -> tuple[int, int]:
    """(a, b): a coalition trains on a of each b of its tokens, in integers, so the same budget on every machine."""
    if plan.share is not None:
        return plan.share
    store, live_N = _training_set(run, directory)
    all_N = _membership(store, plan)(plan.everyone)
    everything = int(store.lengths_N[live_N[all_N[live_N]]].sum()) * plan.epochs
    batch = run.config.batch
    return min(everything, run.steps * batch.rows * batch.length), max(everything, 1)


def train_coalition(job: _Job) -> Outcome:
    """Train one coalition from the shared initial weights and write its bank file.

    Args:
        job: run, plan, coalition and key.

    Returns:
        Its utility and cost.

    Raises:
        NumericalError: a loss or gradient that is not finite; names the coalition and the seed.
    """
    # One thread in every process: the order of sums, and so the bank, doesn't depend on `jobs`.
    with one_thread(), named(f"coalition {job.coalition}, seed {job.run.seed}"):
        return _train(job)


def _train(job: _Job) -> Outcome:
    run = job.run
    rows = _rows(job)
    model = initial_model(run, job.directory)
    fit_rows(model, rows, run.config.optim)
    num_tokens = int((rows.rows.documents_BT >= 0).sum())
    loss = write_losses(
        job.file, job.key, model, open_tokens(job.plan.target, job.plan.target_digest),
        run.config.batch, others=[open_tokens(*other) for other in job.plan.others], steps=rows.steps, tokens=num_tokens,
    )  # fmt: skip
    return Outcome(job.coalition, -loss, rows.steps, num_tokens, peak_rss_bytes())


def _rows(job: _Job) -> TrainingRows:
    """The rows of a coalition: the shared order, filtered, up to the coalition's share of the budget."""
    run, plan, batch = job.run, job.plan, job.run.config.batch
    store, live_N = _training_set(run, job.directory)
    members = _membership(store, plan)
    member_N = members(job.coalition)
    own = int(store.lengths_N[live_N[member_N[live_N]]].sum()) * plan.epochs
    part, whole = _share(run, job.directory, plan)
    budget = own * part // whole
    digest_N = contents(store)
    order = [shared_order(digest_N, live_N, run.seed, epoch) for epoch in range(plan.epochs)]
    index_R = np.concatenate([epoch_N[member_N[epoch_N]] for epoch_N in order])
    return training_rows(store, index_R, budget, batch.rows, batch.length)


def _membership(store: TokenStore, plan: ProxyPlan) -> Callable[[int], NDArray[np.bool_]]:
    """Which records stand in a coalition: those of its owners, or of its lots."""
    lot_N = read_lots(plan, store.size)
    if lot_N is not None:

        def in_lots(coalition: int) -> NDArray[np.bool_]:
            bit_K = np.array([coalition >> bit & 1 for bit in range(len(plan.groups))], dtype=bool)
            return bit_K[lot_N] & (lot_N >= 0)

        return in_lots
    codes = {owner: code for code, owner in enumerate(store.owners)}
    unknown = sorted({owner for _, owners in plan.groups for owner in owners} - set(codes))
    if unknown:
        raise ProxyError(f"groups: no owner {unknown[0]!r} in the tokens; take it out of its group")

    def of_owners(coalition: int) -> NDArray[np.bool_]:
        wanted = np.array([codes[owner] for owner in plan.owners(coalition)], dtype=np.int64)
        return np.isin(store.owner_codes_N, wanted)

    return of_owners


def _training_set(run: RunSpec, directory: Path) -> tuple[TokenStore, NDArray[np.int64]]:
    """The run's documents, and the indices of those that any coalition may use."""
    store, excluded = (
        open_tokens(directory / run.tokens, run.tokens_digest),
        load_excluded(run, directory),
    )
    kept = [int(index) for index in store.live_N if store.record_id(int(index)) not in excluded]
    return store, np.array(kept, dtype=np.int64)


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


def _finish(run: RunSpec, directory: Path, plan: ProxyPlan, jobs: list[_Job]) -> None:
    """Write result.json: the utility of every coalition under every seed, and the digest of the losses behind it."""
    told: dict[int | None, dict[str, Any]] = {}
    for job in jobs:
        content = read_bank(job.file, job.key)
        assert content is not None, "every coalition was trained"
        own = part_of(content, 0)
        told.setdefault(job.seed, {})[str(job.coalition)] = {
            "utility": to_json(float(-own["nll_Q"].sum() / own["tokens_Q"].sum())),
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
            "steps": sum(entry["steps"] for each in told.values() for entry in each.values()),
            "final_loss": "none",
            "checkpoint_root": "none",
            "run_digest": run_digest(run),
            "tokens_digest": run.tokens_digest,
            "target_digest": open_tokens(plan.target, plan.target_digest).digest,
            "unit": "nat",
            "groups": [{"id": name, "owners": list(owners)} for name, owners in plan.groups],
            "coalitions": told[None],
        }
        | ({"first": plan.first} if plan.first is not None else {})
        | ({"seeds": {str(seed): told[seed] for seed in plan.seeds}} if plan.seeds else {})
        | ({"other_targets": [digest for _, digest in plan.others]} if plan.others else {}),
    )
