"""In-run data value: what each record did to the buyer's loss in one real training.

Step t moves the weights from w_t to w_{t+1}, and the target loss falls by a number that is measured, not estimated:

    L(w_t) - L(w_{t+1}) = sum_r credit_r + momentum + decay + curvature

credit_r is the effect of record r's gradient in the optimiser's actual update (AdamW or Muon: preconditioner, clip
factor, bias correction), along a direction that `valuation.credit` names the *form*: first order, second order (one
Hessian-vector product per step) or, the default, the trapezoid, which is the second order without its cost. One
backward pass and `valuation.capture.Capture` give all credits.

**A record is credited for its gradient in the step that computes it and in no later one**: with b1 = 0.9 most of the
movement is momentum, which is reported, not attributed. The *residual* ``drop - sum_r credit_r`` of every step stands
in residuals.jsonl with its three parts. It is large, and it is the point: unscaled credits must not be read as shares
of the loss. The rescaled credits may: summed over records and steps they are L(w_0) - L(w_T) exactly.

Cost: per step one forward and backward pass over a fixed sample of target rows, and one product per layer and form,
a third of the layer's own work. `second` and `sgd_second` add about three gradients of the target sample each.

The training is, bit for bit, the one that `trainer.loop` would do, with accumulation and with the loss-spike guard:
a step whose update the guard leaves out earns nobody anything. Accumulation saves no memory here, since the credits
need the activations of the whole batch until the optimiser has moved.

What it does not show: the value of a record in *another* run. Credits depend on when a record was seen, and
duplicates share what one copy would have got. For pay use retraining (`valuation.proxy`).

Source: In-Run Data Shapley, arXiv 2406.11011; see `valuation.credit` for what is ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from provenance.canonical import write_atomic
from trainer.checkpoint import model_state
from trainer.data import BatchPlan, TokenStore, pack
from trainer.errors import EXIT_DONE, SpecError
from trainer.guard import EVENTS_FILE, SpikeGuard, append_event
from trainer.inputs import batch_plan, initial_model
from trainer.journal import RESULT_FILE, write_result
from trainer.manifest import manifest_of
from trainer.mesh import Mesh
from trainer.metrics import ProgressWriter
from trainer.microbatch import MicroBatches
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer, learning_rate
from trainer.root import state_root
from trainer.saver import Saver
from trainer.spec import run_digest
from trainer.step import StepReport, train_step
from valuation.capture import Capture
from valuation.credit import (
    DEFAULT_FORMS,
    Form,
    Ledger,
    Residual,
    StepCredit,
    check_forms,
    rescale,
    residual_line,
)
from valuation.displacement import Displacement, inner
from valuation.dots import token_dots
from valuation.errors import GradientError
from valuation.gradients import Aggregate, Segments, aggregate_gradient, mean_loss, token_losses
from valuation.heldout import refuse_overlap, texts
from valuation.hessian import hessian_product

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.data import Batch
    from trainer.model import Transformer
    from trainer.spec import OptimSpec, RunSpec

# Rounding of float32 sums is near 1e-5 of the credits' size; a missed use of a parameter is near 1.
COMPLETENESS_TOLERANCE = 1e-2
INFLUENCE_FILE, RESIDUALS_FILE = "influence.parquet", "residuals.jsonl"
TARGET_SHARE = 8
"""Rows of a batch per row of the default target sample: the target's gradient costs an eighth of a step."""
_EXTRA = {"target", "target_digest", "target_rows", "forms"}


def credited_steps(
    model: nn.Module,
    plan: BatchPlan,
    target: list[Batch],
    optim: OptimSpec,
    steps: int,
    *,
    forms: Sequence[str] = DEFAULT_FORMS,
    guard: SpikeGuard | None = None,
) -> Iterator[StepCredit]:
    """Train, and say after every step what each record did to the target loss.

    Args:
        model: a `trainer.model.Transformer`; it is trained in place, exactly as `trainer.loop` trains it.
        plan: the batches.
        target: packed rows of the target sample, the same for every step.
        optim: optimiser and schedule.
        steps: number of steps.
        forms: the credits to compute, see `valuation.credit`; the first is the main one.
        guard: decides which steps update the weights; None = all.

    Yields:
        One StepCredit per step.

    Raises:
        NumericalError: loss or gradient is not finite, without a guard or beyond its limit.
        GradientError: the target predicts no token, the model has a part without formula, or an unknown form.
    """
    asked = check_forms(forms)
    optimizer, capture = build_optimizer(model, optim), Capture(model)
    objective, pieces = LanguageModelling(plan), plan.spec.accumulation
    aim = _aim(model, target)
    for step in range(steps):
        optimizer.lr = learning_rate(step, optim, steps)
        displacement = Displacement(optimizer)
        batch = plan.batch(step)
        segments, parts = Segments.of(batch), _parts(batch, pieces)
        totals_K = torch.stack([objective.counts(part) for part in parts]).sum(0)
        with capture:
            report = train_step(
                model, optimizer, objective, parts, totals_K,
                clip_norm=optim.clip_norm, accept=guard.accept if guard else None,
            )  # fmt: skip
        if not report.updated:
            yield _left_out(step, optimizer.lr, aim.loss, segments, asked, report)
            continue
        clip = _clip_factor(report.grad_norm, optim.clip_norm)
        ahead = step + 1 < steps or "trapezoid" in asked
        after = _aim(model, target) if ahead else None
        drop = aim.loss - (after.loss if after else mean_loss(model, target))
        books = _Books(model, target, displacement, aim, after, clip)
        credits_S = {}
        for form in asked:
            own_direction = books.own_direction(form)
            dots_BT = _token_dots(capture, own_direction, pieces)
            credits_S[form] = clip * segments.sums(dots_BT.cpu().numpy())
            _check_complete(credits_S[form], inner(own_direction, displacement.gradient()))
        main = asked[0]
        own = math.fsum(credits_S[main])
        yield StepCredit(
            segments=segments,
            credits_S=credits_S,
            rescaled_S=rescale(credits_S[main], drop, segments.count_S.astype(np.float64)),
            residual=books.residual(step + 1, main, own, drop),
            report=report,
        )
        if after:
            aim = after


def _aim(model: nn.Module, target: list[Batch]) -> Aggregate:
    """`aggregate_gradient` for a list of batches, without passes over the weights that a list makes needless."""
    labels = sum(batch.num_labels for batch in target)
    if len(target) != 1 or not labels:
        return aggregate_gradient(model, target)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = token_losses(model, target[0]).double().sum() / labels
    grads = torch.autograd.grad(loss, list(named.values()))
    return Aggregate(dict(zip(named, grads, strict=True)), loss.item(), labels)


class _Books:
    """The directions of one step, and what the whole step did along them."""

    def __init__(
        self, model: nn.Module, target: list[Batch], displacement: Displacement, aim: Aggregate, after: Aggregate | None, clip: float,
    ) -> None:  # fmt: skip
        self.model, self.target, self.displacement = model, target, displacement
        self.aim, self.after, self.clip = aim, after, clip
        self.lr = displacement.optimizer.lr
        self._directions: dict[Form, dict[str, Tensor]] = {}

    def direction(self, form: Form) -> dict[str, Tensor]:
        """V of a form, computed once."""
        if form not in self._directions:
            self._directions[form] = self._direction(form)
        return self._directions[form]

    def _direction(self, form: Form) -> dict[str, Tensor]:
        first = self.aim.direction
        if form == "trapezoid":
            assert self.after is not None
            later = self.after.direction
            return {name: torch.lerp(value, later[name], 0.5) for name, value in first.items()}
        if form in ("first", "sgd"):
            return first
        if form == "second":
            vector = self.displacement.moved()
        else:
            vector = {name: self.lr * g for name, g in self.displacement.gradient().items()}
        bend = hessian_product(self.model, self.displacement.before, self.target, vector)
        return {name: torch.sub(value, bend[name], alpha=0.5) for name, value in first.items()}

    def own_direction(self, form: Form) -> Mapping[str, Tensor]:
        """A V: what a record's clipped mean gradient is multiplied by."""
        direction = self.direction(form)
        if form in ("sgd", "sgd_second"):
            return {name: self.lr * value for name, value in direction.items()}
        return self.displacement.own_map(direction)

    def residual(self, step: int, form: Form, own: float, drop: float) -> Residual:
        """The books in the main form, and in first order beside it."""
        first = self.aim.direction
        # The published forms know no momentum: all that isn't theirs is measured along the first order.
        along = first if form in ("sgd", "sgd_second") else self.direction(form)
        (whole, decay), (whole_first, _) = self.displacement.along(along, first)
        return Residual(
            step=step,
            drop=drop,
            credit=own,
            residual=drop - own,
            momentum=whole - own - decay,
            decay=decay,
            curvature=drop - whole,
            curvature_first=drop - whole_first,
            target_loss=self.aim.loss,
            lr=self.lr,
            clip_factor=self.clip,
        )


def _parts(batch: Batch, pieces: int) -> MicroBatches:
    """A step's batch as `trainer.microbatch.take_batch` would cut it for one process."""
    rows = len(batch.tokens_BT)
    return MicroBatches(
        batch.rows(rows * piece // pieces, rows * (piece + 1) // pieces).tensors()
        for piece in range(pieces)
    )


def _left_out(
    step: int, lr: float, loss: float, segments: Segments, forms: tuple[Form, ...], report: StepReport
) -> StepCredit:  # fmt: skip
    """A step that the guard refused: the weights stand, nobody earned anything."""
    nothing_S = np.zeros(len(segments.index_S))
    books = Residual(step + 1, 0, 0, 0, 0, 0, 0, 0, loss, lr, 0.0, updated=False)
    return StepCredit(segments, dict.fromkeys(forms, nothing_S), nothing_S, books, report)


def _token_dots(capture: Capture, direction: Mapping[str, Tensor], pieces: int) -> Tensor:
    """<gradient, direction> split over positions [B, T]; with accumulation each piece has its own passes."""
    width = len(capture.sites) // pieces
    passes = [capture.sites[piece * width : (piece + 1) * width] for piece in range(pieces)]
    return torch.cat([token_dots(sites, direction) for sites in passes])


def _check_complete(credit_S: np.ndarray, whole: float) -> None:
    """The credits must add up to what the whole gradient gives.

    A use of a parameter that the capture doesn't see (a head called as a function, say) would
    otherwise be a silent zero. The clipped gradient is still there, so the control is free.
    """
    size = float(np.abs(credit_S).sum()) + 1e-30
    error = abs(whole - math.fsum(credit_S)) / size
    if not error <= COMPLETENESS_TOLERANCE:
        raise GradientError(
            f"credits: expected them to add up to the whole gradient's, got a relative error of {error:.1e}; "
            "the model uses a parameter where the capture can't see it",
        )


def _clip_factor(norm: float, clip_norm: float) -> float:
    """What `trainer.step.train_step` multiplies the gradient by."""
    return clip_norm / (norm + 1e-6) if clip_norm and norm > clip_norm else 1.0


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
        _without_padding(packed.rows(start, start + batch_rows))
        for start in range(0, len(packed.segments), batch_rows)
    ]


def _without_padding(batch: Batch) -> Batch:
    """The same rows without the columns that none of them fills: no number changes, and every step pays for less."""
    width = int(np.flatnonzero(np.any(batch.documents_BT >= 0, axis=0))[-1]) + 1
    return dataclasses.replace(
        batch,
        tokens_BT=batch.tokens_BT[:, :width],
        labels_BT=batch.labels_BT[:, :width],
        positions_BT=batch.positions_BT[:, :width],
        documents_BT=batch.documents_BT[:, :width],
    )


def train(run: RunSpec, directory: Path) -> int:
    """Train with credits; the entry `valuation.inrun:train`.

    Args:
        run: one process; `config.extra` holds `target` (token folder, absolute or relative to the run's
            folder), optionally `target_digest`, `target_rows` (rows of the sample, default an eighth of the
            rows of a batch, at least 1) and `forms` (list, see `valuation.credit`; the first is the main one).
        directory: the run's folder; progress.jsonl, residuals.jsonl, influence.parquet, events.jsonl of a
            guard and, last, result.json are written there. A run that was stopped starts anew and gives the
            same numbers. The trained weights stand in step-N, a checkpoint of weights alone.

    Returns:
        EXIT_DONE.

    Raises:
        GradientError: settings that can't be meant, or a target without predicted tokens.
        HeldOutError: a record of the target that the run trains on.
        SpecError: a precision or a guard that has no exact credits.
        DataError: tokens or excluded records are not the committed ones.
        NumericalError: loss or gradient is not finite.
    """
    batch = run.config.batch
    num_rows, forms = _settings(run)
    plan = batch_plan(run, directory)
    extra = run.config.extra
    target_store = TokenStore.open(directory / extra["target"], extra.get("target_digest"))
    kept_N = np.unique(plan.order.index_N.astype(np.int64))
    refuse_overlap(texts(plan.store, kept_N.tolist()), {"target": texts(target_store)})
    target = target_sample(target_store, run.seed, num_rows, batch.length, batch.rows)
    model = initial_model(run, directory)
    for name in (RESULT_FILE, EVENTS_FILE):
        (directory / name).unlink(missing_ok=True)
    ledger = Ledger(plan, forms)
    guard = SpikeGuard(run.config.guard, Mesh()) if run.config.guard else None
    with (
        ProgressWriter(directory / "progress.jsonl", 0) as progress,
        (directory / RESIDUALS_FILE).open("w", encoding="utf-8") as residuals,
    ):
        for done in credited_steps(
            model, plan, target, run.config.optim, run.steps, forms=forms, guard=guard
        ):
            ledger.add(done)
            books = done.residual
            residuals.write(json.dumps(residual_line(books)) + "\n")
            residuals.flush()
            if guard and not books.updated:
                line = guard.event(books.step, done.report.loss, done.report.grad_norm, "none")
                append_event(directory, line)
            progress.write(
                books.step, done.report.loss, done.report.tokens, lr=books.lr, grad_norm=done.report.grad_norm,
                target_loss=books.target_loss, drop=books.drop, credit=books.credit, residual=books.residual,
                curvature=books.curvature,
            )  # fmt: skip
        os.fsync(residuals.fileno())
    write_atomic(directory / INFLUENCE_FILE, ledger.parquet())
    root = _save(run, model, directory)
    write_result(
        directory,
        {
            "run": run.run,
            "kind": run.kind,
            "status": "done",
            "steps": run.steps,
            "final_loss": done.report.loss,
            "checkpoint": f"step-{run.steps}",
            "checkpoint_root": root,
            "run_digest": run_digest(run),
            "tokens_digest": run.tokens_digest,
            "target_digest": target_store.digest,
            "target_labels": sum(part.num_labels for part in target),
            "unit": "nat",
            "forms": ",".join(ledger.forms),
            "skipped": sum(not line.updated for line in ledger.residuals),
            **ledger.sums(),
        },
    )
    return EXIT_DONE


def _save(run: RunSpec, model: Transformer, directory: Path) -> str:
    """Keep the trained weights, for whoever scores records at them; returns their root."""
    weights = model_state(model)
    root = state_root(weights)
    Saver(directory, Mesh(), 1).save(manifest_of(run, run.steps, root, len(weights)), weights)
    return root


def _settings(run: RunSpec) -> tuple[int, tuple[Form, ...]]:
    """Rows of the target sample and forms; whatever has no exact credits is refused."""
    config, extra = run.config, run.config.extra
    unknown = sorted(set(extra) - _EXTRA)
    if unknown or "target" not in extra:
        raise GradientError(
            f"config.extra: expected target and at most {sorted(_EXTRA)}, got {sorted(extra)}"
        )
    num_rows = int(extra.get("target_rows", max(1, config.batch.rows // TARGET_SHARE)))
    if run.layout.world_size != 1 or run.steps < 1 or num_rows < 1:
        raise GradientError(
            f"run: expected one process, steps >= 1 and target_rows >= 1, got {run.layout.world_size}, "
            f"{run.steps} and {num_rows}",
        )
    if config.precision == "bfloat16":
        raise SpecError(
            "config.precision: in-run credit needs the gradients that moved the weights, and bfloat16 rounds them "
            "after the positions were added up; expected float32 or float64"
        )
    if config.guard and config.guard.action == "rollback":
        raise SpecError(
            "config.guard.action: in-run credit keeps no checkpoint to go back to, and steps that are undone would "
            "keep their credit; expected skip"
        )
    return num_rows, check_forms(extra.get("forms", list(DEFAULT_FORMS)))
