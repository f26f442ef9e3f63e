"""One retraining: the rows it reads, the steps it makes, the losses it leaves.

`valuation.proxy` retrains coalitions of owners and `valuation.subsets` retrains subsets of records;
both do it with these functions, so that a coalition and the same set of records train alike.

In which order a record stands is decided by its *content* and by nothing else:

    place(record, epoch) = BLAKE2b(SHA-256(its token ids); key = SHA-256(seed, epoch)),    the least first

a keyed pseudo-random function, so places are as good as drawn, and whoever has the committed seed and tokens can draw them
again. Neither leaf index nor owner enters, nor who else is there: a record that comes or goes, is copied, delivered earlier or under another
name, leaves the order of all others as it was. An order drawn over leaf indices does not have this: there a copy that is worth nothing
and is trained on by nobody shifts indices, reorders every training and moves every value.

When it is wrong: two records of the same content stand side by side in a training that keeps both; and a batch holds what
stands next to each other, so a record that is *trained on* still shifts the borders of batches behind it.

Legend: N records, K live records, R rows, B rows of a batch, T positions, S steps, Q target records.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance.canonical import write_atomic
from trainer.data import IGNORE, Batch, TokenStore
from trainer.errors import NumericalError
from valuation.bank import ORDER
from valuation.errors import ProxyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.choices import BatchSpec, OptimSpec
    from trainer.model import Transformer
    from trainer.optim import Stateful


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The packed rows of one training; gives batches as `trainer.data.BatchPlan` does."""

    rows: Batch
    """All rows, a whole number of batches, without segments; free places have no label."""
    batch_rows: int
    """Rows of one step."""
    divisor_S: NDArray[np.int64] | None = None
    """What each step's sum of losses is divided by; None = its own number of labels."""

    @property
    def steps(self) -> int:
        """Steps that use every row once."""
        return len(self.rows.tokens_BT) // self.batch_rows

    def batch(self, step: int) -> Batch:
        """The rows of one step, 0 <= step < steps."""
        return self.rows.rows(step * self.batch_rows, (step + 1) * self.batch_rows)


@lru_cache(maxsize=8)  # every training of a store asks for them
def contents(store: TokenStore) -> tuple[bytes, ...]:
    """SHA-256 of each record's token ids (little-endian uint32), in the order of the store.

    Args:
        store: the tokens.

    Returns:
        N digests of 32 bytes; equal texts have equal ones, whoever delivers them. A tombstone has that of no tokens.
    """
    return tuple(
        hashlib.sha256(store.tokens(index).astype("<u4").tobytes()).digest()
        for index in range(store.size)
    )


def shared_order(
    digest_N: Sequence[bytes], live_K: NDArray[np.int64], seed: int, epoch: int
) -> NDArray[np.int64]:
    """The order in which records stand in one pass: by a keyed function of their content; a subset's order is this one, filtered.

    Args:
        digest_N: of each record's content (see `contents`).
        live_K: indices of the records that any subset may use.
        seed: key of the order, from the committed plan.
        epoch: which pass, from 0.

    Returns:
        The same indices, permuted.
    """
    key = hashlib.sha256(f"dataworth-order-{ORDER}|{seed}|{epoch}".encode()).digest()
    place_K = [
        hashlib.blake2b(digest_N[index], key=key, digest_size=16).digest()
        for index in live_K.tolist()
    ]
    # Equal places mean equal contents, so it makes no difference which of them the sort puts first.
    return live_K[np.array(sorted(range(len(live_K)), key=place_K.__getitem__), dtype=np.int64)]


def training_rows(
    store: TokenStore,
    index_R: NDArray[np.int64],
    budget: int,
    batch_rows: int,
    length: int,
) -> TrainingRows:
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
    return TrainingRows(rows=rows, batch_rows=batch_rows)


def fit_rows(
    model: Transformer,
    rows: TrainingRows,
    optim: OptimSpec,
    after: Callable[[int, Transformer, Stateful], None] | None = None,
) -> None:
    """Train a model on rows, in their order, every row once.

    Args:
        model: changed in place.
        rows: the training.
        optim: a warm-up longer than a fifth of the steps is cut to it, else the shortest subsets would train with a
            fraction of the step size.
        after: called with the number of finished steps, from 0, the model and the optimiser.

    Raises:
        NumericalError: a loss or gradient that is not finite.
    """
    import torch

    from trainer.objective import LanguageModelling
    from trainer.optim import build_optimizer, learning_rate
    from trainer.step import train_step

    optim = replace(optim, warmup_steps=min(optim.warmup_steps, rows.steps // 5))
    optimizer = build_optimizer(model, optim)
    # The objective asks its plan for batches only, and TrainingRows answers as a BatchPlan does.
    objective = LanguageModelling(rows)  # type: ignore[arg-type]
    if after:
        after(0, model, optimizer)
    for step in range(rows.steps):
        optimizer.lr = learning_rate(step, optim, rows.steps)
        part = objective.batch(step, 0, 1)
        totals_K = objective.counts(part)
        if rows.divisor_S is not None:
            totals_K = torch.tensor([rows.divisor_S[step]], dtype=totals_K.dtype)
        train_step(model, optimizer, objective, part, totals_K, clip_norm=optim.clip_norm)
        if after:
            after(step + 1, model, optimizer)


@contextmanager
def named(training: str) -> Iterator[None]:
    """Let an error of numbers say in which of many trainings it was found.

    Args:
        training: which one, such as "coalition 5, seed 1".

    Raises:
        NumericalError: the one from inside, with the name before its words.
    """
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{training}: {error}") from error


@lru_cache(maxsize=8)  # a worker trains many subsets of one store
def open_tokens(folder: Path, digest: str | None = None) -> TokenStore:
    """A token folder, checked once per process; see `trainer.data.TokenStore.open`."""
    return TokenStore.open(folder, digest)


def write_losses(
    path: Path,
    key: str,
    model: Transformer,
    target: TokenStore,
    batch: BatchSpec,
    *,
    others: Sequence[TokenStore] = (),
    **counts: int,
) -> float:
    """Measure the target and write a bank file, atomically.

    Args:
        path: the file.
        key: digest of what was trained.
        model: the trained model.
        target: its live records are the queries.
        batch: rows and length of the evaluation.
        others: further targets; each is measured by itself, so that no number of the first depends on them.
        counts: what else the file should say, such as `steps`.

    Returns:
        Mean nats per token of `target`.

    Raises:
        ProxyError: a target has nothing to predict.
        NumericalError: a loss that is not finite; no file is written.
    """
    from trainer.generate import evaluate

    parts = []
    for number, store in enumerate((target, *others)):
        sequences = [store.tokens(int(index)) for index in store.live_N]
        nll_Q, tokens_Q = evaluate(model, sequences, batch.rows, batch.length)
        if not tokens_Q.sum():
            raise ProxyError("target: expected records of 2 or more tokens, got nothing to predict")
        if not np.isfinite(nll_Q).all():
            wrong = np.flatnonzero(~np.isfinite(nll_Q))
            raise NumericalError(
                f"{f'other target {number}' if number else 'target'}: expected finite losses, got {nll_Q[wrong[0]]} for record "
                f"{store.live_N[wrong[0]]} and {len(wrong)} of {len(nll_Q)} in all; the training diverged, lower lr"
            )
        parts.append((nll_Q, tokens_Q, store.live_N))
    (first_nll_Q, first_tokens_Q, _), *_ = parts
    nll_Q, tokens_Q, index_Q = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    arrays: dict[str, Any] = {name: np.array(count) for name, count in counts.items()}
    if others:
        arrays["parts_P"] = np.array([len(part[0]) for part in parts], dtype=np.int64)
    buffer = io.BytesIO()
    np.savez(buffer, key=np.array(key), nll_Q=nll_Q, tokens_Q=tokens_Q, index_Q=index_Q, **arrays)
    write_atomic(path, buffer.getvalue())
    return float(first_nll_Q.sum() / first_tokens_Q.sum())
