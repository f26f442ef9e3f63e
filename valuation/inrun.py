"""In-run data value: what each record did to the buyer's loss in one real training.

Step t moves the weights from w_t to w_{t+1}. To first order the target loss L falls by
``<grad L(w_t), w_t - w_{t+1}>``, and that is linear in what moved the weights. AdamW with clip
factor c_t and D_t = sqrt(v/(1-b2^t)) + eps, *both moments taken after the step*, makes it four parts:

    L(w_t) - L(w_{t+1}) = own + momentum + decay + curvature
    own       = sum_r credit_r,
    credit_r  = lr_t (1-b1)/(1-b1^t) c_t <D_t^-1 grad L(w_t), G_r / n_t>       this step's gradients
    momentum  = the first moment's older gradients;  decay = lr_t wd <grad L, w_t> on matrices
    curvature = what the first order misses

G_r is the gradient of record r's summed loss and n_t the labels in the batch, so one backward pass
and `valuation.gradients.Capture` give all credits. **A record is credited for its gradient in the
step that computes it and in no later one**: with b1 = 0.9 most of the movement is momentum, which
is reported, not attributed. The *residual* ``drop - own`` of every step stands in residuals.jsonl
with its three parts. It is large, and it is the point: unscaled credits must not be read as shares
of the loss.

The *rescaled* credit closes the books: ``rescaled_r = credit_r + residual |credit_r| / sum |credit|``.
When all credits of a step have one sign this is multiplication by drop / own, and unlike that it
stays bounded when own is near zero. Summed over records and steps it is L(w_0) - L(w_T) exactly.
The *SGD form* ``lr_t c_t <grad L, G_r / n_t>``, the published one, is reported beside it; under AdamW
it is a heuristic.

Cost: per step one forward and backward pass over a fixed sample of target rows; the target loss
after step t is the one that step t + 1 needs anyhow, so only the last step adds a forward pass.

What it does not show: the value of a record in *another* run. Credits depend on when a record was
seen, and duplicates share what one copy would have got. For pay use retraining (`valuation.proxy`).

Legend: N records of the corpus, S segments of a batch.

Source: In-Run Data Shapley, arXiv 2406.11011, eq. 4 (first order); the AdamW form, the split of the
residual and the rescaling are ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from provenance.canonical import write_atomic
from trainer.data import BatchPlan, TokenStore, pack
from trainer.errors import EXIT_DONE
from trainer.inputs import batch_plan, initial_model
from trainer.journal import RESULT_FILE, write_result
from trainer.metrics import ProgressWriter
from trainer.objective import LanguageModelling
from trainer.optim import AdamW, build_optimizer, learning_rate
from trainer.root import state_root
from trainer.spec import run_digest
from trainer.step import StepReport, train_step
from valuation.errors import GradientError
from valuation.gradients import Aggregate, Capture, Segments, aggregate_gradient, mean_loss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from trainer.data import Batch
    from trainer.spec import OptimSpec, RunSpec

# Rounding of float32 sums is near 1e-5 of the credits' size; a missed use of a parameter is near 1.
COMPLETENESS_TOLERANCE = 1e-2
INFLUENCE_FILE, RESIDUALS_FILE = "influence.parquet", "residuals.jsonl"
_EXTRA = {"target", "target_digest", "target_rows"}


@dataclass(frozen=True, slots=True)
class Residual:
    """The books of one step, in nats per target token; positive = the target loss fell."""

    step: int
    """Counted from 1."""
    drop: float
    """True fall of the target loss: L(w_t) - L(w_{t+1})."""
    credit: float
    """Sum of the records' credits (own)."""
    credit_sgd: float
    """Sum of the credits in SGD form."""
    residual: float
    """drop - credit = momentum + decay + curvature."""
    momentum: float
    """First-order effect of older gradients in the first moment."""
    decay: float
    """First-order effect of weight decay."""
    curvature: float
    """drop minus the whole first-order effect of the step."""
    target_loss: float
    """L(w_t)."""
    lr: float
    """Step size."""
    clip_factor: float
    """Factor on the gradient, 1 when it was not clipped."""


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Credits of one step, per segment of its batch."""

    segments: Segments
    """Which record each segment is of."""
    credit_S: NDArray[np.float64]
    """AdamW form."""
    sgd_S: NDArray[np.float64]
    """SGD form."""
    rescaled_S: NDArray[np.float64]
    """AdamW form, rescaled: sums to `residual.drop`."""
    residual: Residual
    """The books of the step."""
    report: StepReport
    """Training loss, norm and tokens."""


def rescale(
    credit_S: NDArray[np.float64], drop: float, weight_S: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Credits that sum to the true drop, moved in proportion to their size.

    Args:
        credit_S: first-order credits.
        drop: what they must sum to.
        weight_S: shares to use when all credits are zero, such as tokens; not all zero.

    Returns:
        credit + (drop - sum credit) * |credit| / sum |credit|.
    """
    size_S = np.abs(credit_S)
    if not size_S.sum() > 0:
        size_S = weight_S
    # fsum: the promise is an exact sum, so no more rounding than the result itself needs.
    return credit_S + (drop - math.fsum(credit_S)) * (size_S / size_S.sum())


def credited_steps(
    model: nn.Module,
    plan: BatchPlan,
    target: list[Batch],
    optim: OptimSpec,
    steps: int,
) -> Iterator[StepCredit]:
    """Train, and say after every step what each record did to the target loss.

    Args:
        model: a `trainer.model.Transformer`; it is trained in place, exactly as `trainer.loop` trains it.
        plan: the batches.
        target: packed rows of the target sample, the same for every step.
        optim: optimiser and schedule.
        steps: number of steps.

    Yields:
        One StepCredit per step.

    Raises:
        NumericalError: loss or gradient is not finite.
        GradientError: the target predicts no token, the model has a part without formula, or the optimiser is not adamw.
    """
    optimizer, capture = build_optimizer(model, optim), Capture(model)
    if not isinstance(optimizer, AdamW):
        raise GradientError(f"optim.name: the credits are those of adamw, got {optim.name!r}")
    objective = LanguageModelling(plan)
    aim = aggregate_gradient(model, target)
    for step in range(steps):
        optimizer.lr = learning_rate(step, optim, steps)
        before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
        batch = plan.batch(step)
        with capture:
            tensors = batch.tensors()
            report = train_step(
                model, optimizer, objective, tensors, objective.counts(tensors), clip_norm=optim.clip_norm,
            )  # fmt: skip
        segments = Segments.of(batch)
        clip = _clip_factor(report.grad_norm, optim.clip_norm)
        share = optimizer.lr * clip * _own_share(optimizer)
        credit_S = share * segments.sums(
            capture.token_dots(_preconditioned(aim, optimizer)).numpy()
        )
        sgd_S = optimizer.lr * clip * segments.sums(capture.token_dots(aim.direction).numpy())
        _check_complete(sgd_S, aim, optimizer)
        after = aggregate_gradient(model, target) if step + 1 < steps else None
        drop = aim.loss - (after.loss if after else mean_loss(model, target))
        first_order, decay = _first_order(aim, before, optimizer)
        own = math.fsum(credit_S)
        yield StepCredit(
            segments=segments,
            credit_S=credit_S,
            sgd_S=sgd_S,
            rescaled_S=rescale(credit_S, drop, segments.count_S.astype(np.float64)),
            residual=Residual(
                step=step + 1,
                drop=drop,
                credit=own,
                credit_sgd=math.fsum(sgd_S),
                residual=drop - own,
                momentum=first_order - own - decay,
                decay=decay,
                curvature=drop - first_order,
                target_loss=aim.loss,
                lr=optimizer.lr,
                clip_factor=clip,
            ),
            report=report,
        )
        if after:
            aim = after


def _check_complete(sgd_S: NDArray[np.float64], aim: Aggregate, optimizer: AdamW) -> None:
    """The credits in SGD form must add up to what the whole gradient gives.

    A use of a parameter that the capture doesn't see (a head called as a function, say) would
    otherwise be a silent zero. The clipped gradient is still there, so the control is free.
    """
    whole = math.fsum(
        (aim.direction[name].double() * p.grad.double()).sum().item()
        for name, p in optimizer.parameters.items()
        if p.grad is not None
    )
    size = float(np.abs(sgd_S).sum()) + 1e-30
    error = abs(optimizer.lr * whole - math.fsum(sgd_S)) / size
    if error > COMPLETENESS_TOLERANCE:
        raise GradientError(
            f"credits: expected them to add up to the whole gradient's, got a relative error of {error:.1e}; "
            "the model uses a parameter where the capture can't see it",
        )


def _clip_factor(norm: float, clip_norm: float) -> float:
    """What `trainer.step.train_step` multiplies the gradient by."""
    return clip_norm / (norm + 1e-6) if clip_norm and norm > clip_norm else 1.0


def _own_share(optimizer: AdamW) -> float:
    """Weight of the newest gradient in the bias-corrected first moment."""
    beta = optimizer.spec.betas[0]
    return (1 - beta) / (1 - beta ** int(optimizer.count.item()))


def _preconditioned(aim: Aggregate, optimizer: AdamW) -> dict[str, Tensor]:
    """D^-1 grad L, with D as the step that was just done used it."""
    correction = 1 - optimizer.spec.betas[1] ** int(optimizer.count.item())
    return {
        name: grad / ((optimizer.second[name] / correction).sqrt() + optimizer.spec.eps)
        for name, grad in aim.direction.items()
    }


def _first_order(
    aim: Aggregate, before: dict[str, Tensor], optimizer: AdamW
) -> tuple[float, float]:
    """<grad L, w_t - w_{t+1}>, and the part of it that is weight decay, both in float64."""
    moved, decayed = [], []
    for name, old in before.items():
        grad = aim.direction[name].double()
        moved.append(
            (grad * (old.double() - optimizer.parameters[name].detach().double())).sum().item()
        )
        if old.dim() > 1:  # as in trainer.optim: matrices only
            decayed.append((grad * old.double()).sum().item())
    return math.fsum(moved), optimizer.lr * optimizer.spec.weight_decay * math.fsum(decayed)


def target_sample(
    store: TokenStore, seed: int, num_rows: int, length: int, batch_rows: int
) -> list[Batch]:
    """A fixed sample of target records, packed into about `num_rows` rows.

    Args:
        store: the target's tokens.
        seed: key of the sample.
        num_rows: rows of `length` tokens to fill; all records if they need fewer.
        length: tokens in a row.
        batch_rows: rows per batch.

    Returns:
        Batches; the first records in the order of SHA-256(seed, record_id), so that a larger sample contains a smaller one.
    """
    ordered = sorted(
        (int(index) for index in store.live_N),
        key=lambda index: hashlib.sha256(
            b"dataworth-target-1|%d|" % seed + store.record_id(index)
        ).digest(),
    )
    filled = np.cumsum(store.lengths_N[ordered])
    # At least one record, else as many whole records as fit.
    kept = ordered[: max(1, int(np.searchsorted(filled, num_rows * length, side="right")))]
    packed = pack(((index, store.record_id(index), store.tokens(index)) for index in kept), length)
    return [
        packed.rows(start, start + batch_rows)
        for start in range(0, len(packed.segments), batch_rows)
    ]


def train(run: RunSpec, directory: Path) -> int:
    """Train with credits; the entry `valuation.inrun:train`.

    Args:
        run: one process; `config.extra` holds `target` (token folder, absolute or relative to the run's
            folder), optionally `target_digest` and `target_rows` (rows of the sample, default the rows of
            a batch, which about doubles the cost of training).
        directory: the run's folder; progress.jsonl, residuals.jsonl, influence.parquet and, last,
            result.json are written there. A run that was stopped starts anew and gives the same numbers.

    Returns:
        EXIT_DONE.

    Raises:
        GradientError: settings that can't be meant, or a target without predicted tokens.
        DataError: tokens or excluded records are not the committed ones.
        NumericalError: loss or gradient is not finite.
    """
    extra, batch = run.config.extra, run.config.batch
    unknown = sorted(set(extra) - _EXTRA)
    if unknown or "target" not in extra:
        raise GradientError(
            f"config.extra: expected target and at most {sorted(_EXTRA)}, got {sorted(extra)}"
        )
    num_rows = int(extra.get("target_rows", batch.rows))
    if run.layout.world_size != 1 or run.steps < 1 or num_rows < 1:
        raise GradientError(
            f"run: expected one process, steps >= 1 and target_rows >= 1, got {run.layout.world_size}, "
            f"{run.steps} and {num_rows}",
        )
    plan = batch_plan(run, directory)
    target_store = TokenStore.open(directory / extra["target"], extra.get("target_digest"))
    target = target_sample(target_store, run.seed, num_rows, batch.length, batch.rows)
    model = initial_model(run, directory)
    (directory / RESULT_FILE).unlink(missing_ok=True)
    ledger = _Ledger(plan)
    with (
        ProgressWriter(directory / "progress.jsonl", 0) as progress,
        (directory / RESIDUALS_FILE).open("w", encoding="utf-8") as residuals,
    ):
        for done in credited_steps(model, plan, target, run.config.optim, run.steps):
            ledger.add(done)
            residuals.write(json.dumps(asdict(done.residual)) + "\n")
            progress.write(
                done.residual.step, done.report.loss, done.report.tokens,
                lr=done.residual.lr, grad_norm=done.report.grad_norm, target_loss=done.residual.target_loss,
                credit=done.residual.credit, drop=done.residual.drop,
            )  # fmt: skip
        residuals.flush()
        os.fsync(residuals.fileno())
    write_atomic(directory / INFLUENCE_FILE, ledger.parquet())
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    write_result(
        directory,
        {
            "run": run.run,
            "kind": run.kind,
            "status": "done",
            "steps": run.steps,
            "final_loss": done.report.loss,
            "checkpoint_root": "none",
            "model_root": state_root(parameters),
            "run_digest": run_digest(run),
            "tokens_digest": run.tokens_digest,
            "target_digest": target_store.digest,
            "target_labels": sum(part.num_labels for part in target),
            "unit": "nat",
            **ledger.sums(),
        },
    )
    return EXIT_DONE


class _Ledger:
    """Sums per record and over the run."""

    def __init__(self, plan: BatchPlan) -> None:
        self.store = plan.store
        self.planned_N = plan.order.index_N.astype(np.int64)
        self.columns = {
            name: np.zeros(plan.store.size)
            for name in ("credit", "credit_rescaled", "credit_sgd", "steps", "tokens")
        }
        self.residuals: list[Residual] = []

    def add(self, done: StepCredit) -> None:
        """Book one step."""
        index_S = done.segments.index_S
        for name, values_S in (
            ("credit", done.credit_S), ("credit_rescaled", done.rescaled_S), ("credit_sgd", done.sgd_S),
            ("tokens", done.segments.count_S),
        ):  # fmt: skip
            np.add.at(self.columns[name], index_S, values_S)
        self.columns["steps"][np.unique(index_S)] += 1
        self.residuals.append(done.residual)

    def sums(self) -> dict[str, float]:
        """The books of the whole run."""
        names = ("drop", "credit", "credit_sgd", "residual", "momentum", "decay", "curvature")
        return {
            f"sum_{name}": math.fsum(getattr(line, name) for line in self.residuals)
            for name in names
        }

    def parquet(self) -> bytes:
        """influence.parquet: every record of the plan, also those that no step reached (steps_seen 0)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        index_N = self.planned_N
        table = pa.table(
            {
                "record_id": pa.array(
                    [self.store.record_id(int(i)) for i in index_N], pa.binary(32)
                ),
                "index": pa.array(index_N, pa.uint64()),
                "credit": pa.array(self.columns["credit"][index_N]),
                "credit_rescaled": pa.array(self.columns["credit_rescaled"][index_N]),
                "credit_sgd": pa.array(self.columns["credit_sgd"][index_N]),
                "steps_seen": pa.array(self.columns["steps"][index_N].astype(np.int64)),
                "tokens_seen": pa.array(self.columns["tokens"][index_N].astype(np.int64)),
            },
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        return sink.getvalue().to_pybytes()
