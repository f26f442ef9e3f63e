"""Retraining on subsets of records, and the bank that keeps what each retraining left.

    S -> w(S) = the weights after `epochs` passes over the records in S, from one initial model
    bank/KEY.npz = nll_q(w(S)) for every target record q,      KEY = SHA-256(setting, contents of S, seed)

This is the truth that every value is held against (`valuation.evaluation`), and one bank serves all
of it: linear datamodeling scores, removal curves, group removal, and later any semivalue, because a
file is named by *what was trained*, not by who asked: the contents of the records, not their places or owners, so a
new delivery, a copy or another name finds the files of before. Two subsets of one seed share everything but
their records: the initial weights, and the order, in which a record's content decides where it stands
(`valuation.retraining`). There are two ways to leave a record out:

    refill   its place is closed, rows are packed anew; steps in proportion to tokens. What a buyer would do.
    mask     its place stays, its labels don't count, and sums are still divided by the labels of the full batch, so
             that L_step = sum_i w_i l_i / n is linear in the records' weights w: the game of metagradients.

`valuation.proxy` trains coalitions of *owners* with the same functions: a coalition is the subset of
its owners' records.

Cost: one small training per (subset, seed). A bank can be killed at any time; files are written
atomically and a second call trains what is missing. Results don't depend on the number of processes.

Legend: M subsets, N records of the store, K live records, Q target records, R rows, T positions.

Source: datamodels, arXiv 2202.00622 (common initial weights and order across subsets); linear in the
weights: MAGIC, arXiv 2504.16430 section 2.
"""

# ruff: noqa: N802 - shape suffixes in attribute names (STYLE 2)
from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from provenance.canonical import jcs
from trainer.codec import to_json
from trainer.data import IGNORE
from valuation.bank import BANK_FORMAT, ORDER, bank_file, read_bank
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
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.choices import BatchSpec, OptimSpec
    from trainer.data import TokenStore
    from trainer.model import Transformer
    from trainer.optim import Stateful
    from trainer.shape import ModelSpec
    from valuation.workers import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that the retrainings of a bank share, apart from seed and records."""

    train: Path
    """Token folder of the records."""
    target: Path
    """Token folder of the records whose loss is measured."""
    train_digest: str
    """What train's tokens.json must have; another corpus is refused, not trained on."""
    target_digest: str
    """The same of target."""
    model: ModelSpec
    """Shape of the model."""
    optim: OptimSpec
    """Optimiser and schedule; the schedule is stretched over each training's own steps."""
    batch: BatchSpec
    """Rows of a step and their length."""
    epochs: int = 1
    """Passes over the records of a subset, >= 1."""
    leave_out: Literal["refill", "mask"] = "refill"
    """What happens to the place of a record that is not in the subset."""
    max_tokens: int | None = None
    """Most tokens of one training, >= 1; the passes are cut there. None = whole passes."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ProxyError: epochs or max_tokens < 1, or an unknown way of leaving out.
        """
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ProxyError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if self.epochs < 1:
            raise ProxyError(f"epochs: expected at least 1, got {self.epochs}")
        if self.leave_out not in ("refill", "mask"):
            raise ProxyError(f"leave_out: expected refill or mask, got {self.leave_out!r}")

    def stores(self) -> tuple[TokenStore, TokenStore]:
        """Training and target tokens.

        Raises:
            DataError: altered, or not those of the digests.
        """
        return open_tokens(self.train, self.train_digest), open_tokens(
            self.target, self.target_digest
        )

    def key(self, member_N: NDArray[np.bool_], seed: int) -> str:
        """Hex digest of everything that a retraining's losses depend on.

        Args:
            member_N: which records of the store are in the subset.
            seed: of the initial weights and of the order.

        Returns:
            64 hex digits.
        """
        train, _ = self.stores()
        live_N, digest_N = _live(train, member_N), contents(train)
        inside = sorted(digest_N[index] for index in np.flatnonzero(live_N).tolist())
        body = {
            "format": BANK_FORMAT,
            "order": ORDER,
            "model": to_json(self.model),
            "optim": to_json(self.optim),
            "batch": to_json(self.batch),
            "epochs": self.epochs,
            "leave_out": self.leave_out,
            "max_tokens": "none" if self.max_tokens is None else self.max_tokens,
            "target": self.target_digest,
            "records": hashlib.sha256(b"".join(inside)).hexdigest(),
            "seed": seed,
        }
        if (
            self.leave_out == "mask"
        ):  # whoever is left out keeps a place, so everybody is part of the training
            places = hashlib.sha256(np.packbits(live_N).tobytes()).hexdigest()
            body |= {"tokens": self.train_digest, "places": places}
        return hashlib.sha256(jcs(body)).hexdigest()

    def rows(self, member_N: NDArray[np.bool_], seed: int) -> TrainingRows:
        """The rows that a subset trains on.

        Args:
            member_N: which records of the store are in the subset.
            seed: key of the order.

        Returns:
            `epochs` passes of the shared order, filtered or masked.
        """
        store, _ = self.stores()
        digest_N = contents(store)
        order = [shared_order(digest_N, store.live_N, seed, epoch) for epoch in range(self.epochs)]
        index_R = np.concatenate(order)
        kept_R = member_N[index_R]
        if self.leave_out == "refill":
            index_R = index_R[kept_R]
        budget = int(store.lengths_N[index_R].sum())
        if self.max_tokens is not None:
            budget = min(budget, self.max_tokens)
        full = training_rows(store, index_R, budget, self.batch.rows, self.batch.length)
        if self.leave_out == "refill":
            return full
        documents_BT, labels_BT = full.rows.documents_BT, full.rows.labels_BT
        left_out_BT = (documents_BT >= 0) & ~kept_R[documents_BT]
        rows = replace(full.rows, labels_BT=np.where(left_out_BT, IGNORE, labels_BT))
        labels_S = (labels_BT != IGNORE).reshape(full.steps, -1).sum(1)
        return TrainingRows(rows=rows, batch_rows=full.batch_rows, divisor_S=labels_S)


def _live(store: TokenStore, member_N: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if member_N.shape != (store.size,) or member_N.dtype != bool:
        raise ProxyError(
            f"subset: expected booleans [{store.size}], one per record of the tokens, got "
            f"{member_N.dtype} {list(member_N.shape)}"
        )
    return member_N & (store.lengths_N > 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A training in its middle."""

    weights: dict[str, Tensor]
    """Copies of the weights by parameter name."""
    optimizer: dict[str, Tensor]
    """Copies of the optimiser's state, named as `trainer.optim` names it."""
    lr: float
    """Step size of the last step."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A model trained on a subset, with weights it had on the way."""

    model: Transformer
    """After the last step."""
    states: dict[int, Snapshot]
    """By number of finished steps."""
    steps: int
    """Optimiser steps."""


def fit_subset(
    setting: Setting, member_N: NDArray[np.bool_], seed: int, keep: Collection[int] = ()
) -> Fit:
    """Train on a subset in this process and keep the model, for methods that need its gradients.

    Args:
        setting: what all retrainings share.
        member_N: which records.
        seed: of initial weights and order.
        keep: numbers of finished steps at which to copy weights and optimiser; negative ones count from the end, -1 = the last.

    Returns:
        The model and the copies: the same bits as a retraining of the bank has.
    """
    from trainer.model import Transformer, init_parameters

    rows = setting.rows(_live(setting.stores()[0], member_N), seed)
    wanted = {step if step >= 0 else rows.steps + 1 + step for step in keep}
    states: dict[int, Snapshot] = {}

    def copy(step: int, model: Transformer, optimizer: Stateful) -> None:
        if step in wanted:
            states[step] = Snapshot(
                {name: p.detach().clone() for name, p in model.named_parameters()},
                {name: value.detach().clone() for name, value in optimizer.state().items()},
                optimizer.lr,
            )

    model = Transformer(setting.model)
    init_parameters(model, seed)
    with one_thread():
        fit_rows(model, rows, setting.optim, copy)
    return Fit(model=model, states=states, steps=rows.steps)


@dataclass(frozen=True, slots=True)
class SubsetLosses:
    """What the retrainings left, in the order asked for."""

    nll_MQ: NDArray[np.float64]
    """Summed loss of each target record in nats."""
    tokens_Q: NDArray[np.int64]
    """Predicted tokens of each target record."""
    index_Q: NDArray[np.int64]
    """Index of each target record in the target's tokens."""
    steps_M: NDArray[np.int64]
    """Optimiser steps of each retraining."""
    keys: tuple[str, ...]
    """Digest that names each retraining."""

    @property
    def mean_M(self) -> NDArray[np.float64]:
        """Mean nats per target token."""
        return self.nll_MQ.sum(1) / self.tokens_Q.sum()

    def of(self, query_index_Q: NDArray[np.int64]) -> SubsetLosses:
        """The losses of some target records only.

        Args:
            query_index_Q: their indices in the target's tokens, each once.

        Raises:
            ProxyError: an index whose loss was not measured.
        """
        place = {int(index): q for q, index in enumerate(self.index_Q)}
        if missing := [int(i) for i in query_index_Q if int(i) not in place]:
            raise ProxyError(
                f"queries: expected live records of the target, got {len(missing)} others, the first at index {missing[0]}"
            )
        at_Q = np.array([place[int(index)] for index in query_index_Q], dtype=np.int64)
        return replace(
            self,
            nll_MQ=self.nll_MQ[:, at_Q],
            tokens_Q=self.tokens_Q[at_Q],
            index_Q=self.index_Q[at_Q],
        )


@dataclass(frozen=True, slots=True)
class _Retraining:
    """What a worker process needs; small, because it travels by pickle."""

    setting: Setting
    directory: Path
    member_N: NDArray[np.bool_]
    seed: int
    key: str
    number: int
    """Row of the subset, for an error."""


def retrain_subsets(
    setting: Setting,
    member_MN: NDArray[np.bool_],
    seeds: Sequence[int] | int,
    directory: Path,
    jobs: int = 1,
    backend: Backend = "processes",
) -> SubsetLosses:
    """Losses of every subset, from the bank or from a retraining.

    Args:
        setting: what all retrainings share.
        member_MN: which records of the store are in each subset.
        seeds: one per subset, or one for all.
        directory: folder that holds `bank/`, made if needed; many settings may share it.
        jobs: trainings at the same time, >= 1.
        backend: where they run, see `valuation.workers`.

    Returns:
        The losses, row m of subset m.

    Raises:
        ProxyError: a subset of the wrong shape, nothing to predict, or a damaged bank file.
        HeldOutError: a target record that a subset trains on.
        NumericalError: a training left the finite numbers; names the subset and the seed.
    """
    seed_M = [seeds] * len(member_MN) if isinstance(seeds, int) else list(seeds)
    if len(seed_M) != len(member_MN) or jobs < 1:
        raise ProxyError(
            f"seeds and jobs: expected {len(member_MN)} seeds and jobs >= 1, got {len(seed_M)} and {jobs}"
        )
    (directory / "bank").mkdir(parents=True, exist_ok=True)
    keys = [setting.key(member_N, s) for member_N, s in zip(member_MN, seed_M, strict=True)]
    store, target = setting.stores()
    trained_N = np.flatnonzero(np.any(member_MN, axis=0) & (store.lengths_N > 0))
    refuse_overlap(texts(store, trained_N.tolist()), {"target": texts(target)})
    todo = {
        key: _Retraining(setting, directory, member_N, seed, key, number)
        for number, (key, member_N, seed) in enumerate(zip(keys, member_MN, seed_M, strict=True))
        if read_bank(bank_file(directory, key), key) is None
    }
    # Longest first, so that no process is left alone with a full set at the end.
    longest_first = sorted(todo.values(), key=lambda j: -j.member_N.sum())
    for _ in in_workers(_retrain, longest_first, jobs, backend):
        pass
    contents = [read_bank(bank_file(directory, key), key) for key in keys]
    found = [content for content in contents if content is not None]
    if len(found) < len(keys):
        raise ProxyError(
            f"bank: expected {len(keys)} files in {directory.name}/bank, got {len(found)}; the nodes of a cluster must share that folder"
        )
    if not found:
        raise ProxyError("subsets: expected at least one, got none")
    return SubsetLosses(
        nll_MQ=np.stack([content["nll_Q"] for content in found]),
        tokens_Q=found[0]["tokens_Q"],
        index_Q=found[0]["index_Q"],
        steps_M=np.array([int(content["steps"]) for content in found], dtype=np.int64),
        keys=tuple(keys),
    )


def _retrain(job: _Retraining) -> None:
    name = f"subset {job.number} of {int(job.member_N.sum())} records, seed {job.seed}"
    with one_thread(), named(name):
        fit = fit_subset(job.setting, job.member_N, job.seed)
        write_losses(
            bank_file(job.directory, job.key), job.key, fit.model, job.setting.stores()[1],
            job.setting.batch, steps=fit.steps,
        )  # fmt: skip


def random_subsets(
    num_subsets: int, size: int, share: float, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Subsets of equal size, drawn uniformly without replacement.

    Args:
        num_subsets: M.
        size: N, number of records.
        share: of the records in each subset, in (0, 1); the number is rounded.
        generator: source of randomness.

    Returns:
        member_MN.

    Raises:
        ProxyError: a share that leaves no record in or none out.
    """
    chosen = round(share * size)
    if not 0 < chosen < size:
        raise ProxyError(
            f"share: expected some of {size} records in and some out, got {chosen} in for a share of {share}"
        )
    ranks_MN = generator.random((num_subsets, size)).argsort(1).argsort(1)
    return np.asarray(ranks_MN < chosen)


def spread(
    member_MK: NDArray[np.bool_], index_K: NDArray[np.int64], size: int
) -> NDArray[np.bool_]:
    """Subsets of a sample as subsets of the whole store; whoever isn't in the sample is in none of them.

    Args:
        member_MK: which records of the sample each subset has.
        index_K: place of each of them in the store, each once.
        size: N, records of the store.

    Returns:
        member_MN.

    Raises:
        ProxyError: not one place in 0 .. size - 1 per record of the sample.
    """
    places = np.unique(index_K)
    if member_MK.shape[1:] != places.shape or (
        len(places) and not 0 <= places[0] <= places[-1] < size
    ):
        raise ProxyError(
            f"sample: expected {member_MK.shape[1]} different places in 0 .. {size - 1}, got {len(places)}"
        )
    member_MN = np.zeros((len(member_MK), size), dtype=bool)
    member_MN[:, index_K] = member_MK
    return member_MN
