"""How much each record of a batch pushes the weights along one direction, in one backward pass.

Let ``l_r`` be the *summed* loss of record r's predicted tokens, ``G_r`` its gradient, and V one
tensor per parameter: the gradient of the buyer's loss, or that gradient after the optimiser's
preconditioner. The wanted number is ``<G_r, V>``. No ``G_r`` is ever formed. A weight matrix W
that maps inputs ``a_t`` to outputs with gradient ``g_t`` has ``G_r = sum_{t in r} g_t a_t^T``, so

    <G_r, V> = sum_{t in r} g_t^T V a_t = sum_{t in r} ((g V) * a)_t        the vector route,

which costs as much as the layer's own backward pass and memory for its inputs and outputs. An
embedding is the same with one-hot ``a_t`` (``g_t . V[token_t]``); an RMSNorm gain is the same
with the normalised input (``sum_t g_t * xhat_t * V``). Where one matrix is both embedding and
output head, both sites meet the same V, so the cross terms that scoring them apart would lose
are there.

Records in one row stay apart because attention is block-diagonal: position t influences no loss
but its own document's, hence its gradient belongs to its own record. The numbers are those of
one backward pass per record, whatever else stands in the batch.

When this is the wrong tool: for all *pairs* of records. `record_gradients` forms every G_r (the
materialised route), `valuation.routes` has the ghost route and says which is cheapest. The formulas
of each kind of layer, and which are refused, stand in `valuation.capture`.

Legend: B rows, T positions, I inputs, O outputs, S segments (pieces of records in rows),
N records, K directions.

Source: the "ghost dot product" of In-Run Data Shapley, arXiv 2406.11011, section 4.2, with its
second factor summed over the validation set first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.data import IGNORE
from valuation.capture import Capture, Groups
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from trainer.data import Batch

    Draw = Callable[[Tensor, Batch], Tensor]


def token_losses(model: nn.Module, batch: Batch, draw: Draw | None = None) -> Tensor:
    """Negative log-likelihood of every label.

    Args:
        model: a `trainer.model.Transformer`.
        batch: packed rows.
        draw: (logits_BTV, batch) -> labels_BT to use in place of the batch's; -100 where there is none.

    Returns:
        nll_BT in nats, 0 where there is no label; differentiable.
    """
    device = str(next(model.parameters()).device)
    tokens_BT, labels_BT, positions_BT, documents_BT = batch.tensors(device)
    logits_BTV = model(tokens_BT, positions_BT, documents_BT)
    if draw is not None:
        labels_BT = draw(logits_BTV.detach(), batch)
    nll = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return nll.view_as(labels_BT)


@dataclass(frozen=True, slots=True)
class Segments:
    """Which positions of a batch belong to which record; one entry per (record, row) piece."""

    index_S: NDArray[np.int64]
    """Corpus index of the record."""
    count_S: NDArray[np.int64]
    """Positions in the segment."""
    segment_P: NDArray[np.int64]
    """Segment number of each of the P covered positions."""
    position_P: NDArray[np.int64]
    """Their places in a flattened [B, T] array."""
    num_positions: int
    """B T."""

    @classmethod
    def of(cls, batch: Batch) -> Segments:
        """Read the segments of a batch."""
        width = batch.tokens_BT.shape[1]
        pieces = [
            (row, segment) for row, segments in enumerate(batch.segments) for segment in segments
        ]
        count_S = np.array([segment.count for _, segment in pieces], dtype=np.int64)
        start_S = np.array(
            [row * width + segment.column for row, segment in pieces], dtype=np.int64
        )
        segment_P = np.repeat(np.arange(len(pieces)), count_S)
        within_P = np.arange(len(segment_P)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
        return cls(
            index_S=np.array([segment.index for _, segment in pieces], dtype=np.int64),
            count_S=count_S,
            segment_P=segment_P,
            position_P=np.repeat(start_S, count_S) + within_P,
            num_positions=batch.tokens_BT.size,
        )

    def sums(self, values_BT: NDArray[Any]) -> NDArray[np.float64]:
        """Add up a number per position over each segment, in float64 and in a fixed order.

        Args:
            values_BT: one number per position.

        Returns:
            sums_S.
        """
        picked_P = values_BT.ravel()[self.position_P].astype(np.float64)
        totals_S = np.bincount(self.segment_P, weights=picked_P, minlength=len(self.index_S))
        return totals_S.astype(np.float64)  # an empty batch counts in integers

    def groups(self, device: str | torch.device = "cpu") -> Groups:
        """The positions of each record, its pieces together."""
        index_N, record_S = np.unique(self.index_S, return_inverse=True)
        record_P = record_S[self.segment_P]
        order_P = np.argsort(record_P, kind="stable")
        ordered_P = self.position_P[order_P]
        return Groups(
            index_N=index_N,
            count_N=np.bincount(record_P, minlength=len(index_N)),
            position_P=torch.from_numpy(ordered_P).to(device),
            group_P=torch.from_numpy(record_P[order_P]).to(device),
            whole=len(ordered_P) == self.num_positions
            and np.array_equal(ordered_P, np.arange(len(ordered_P))),
        )


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The gradient of the mean loss over a set of batches, as one direction."""

    direction: dict[str, Tensor]
    """Gradient of mean nats per predicted token, by parameter name."""
    loss: float
    """Mean nats per predicted token."""
    labels: int
    """Number of predicted tokens."""


def aggregate_gradient(model: nn.Module, batches: Iterable[Batch]) -> Aggregate:
    """The gradient of the mean token loss over all batches together.

    Args:
        model: a `trainer.model.Transformer`; its `.grad` fields are not touched.
        batches: packed rows.

    Returns:
        The direction V, the loss, and the number of tokens behind both.

    Raises:
        GradientError: no batch predicts any token.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    nll, labels = 0.0, 0
    for batch in batches:
        # Added up in float64: losses of neighbouring steps are subtracted from each other.
        loss = token_losses(model, batch).double().sum()
        for name, grad in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            total[name] += grad
        nll += loss.item()
        labels += batch.num_labels
    if labels == 0:
        raise GradientError(
            "target: expected at least one predicted token, got none; give records of 2 or more tokens"
        )
    return Aggregate(
        direction={n: g / labels for n, g in total.items()}, loss=nll / labels, labels=labels
    )


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean nats per predicted token over all batches together; see `aggregate_gradient`."""
    nll, labels = 0.0, 0
    for batch in batches:
        nll += token_losses(model, batch).double().sum().item()
        labels += batch.num_labels
    return nll / labels


def captured_pass(
    model: nn.Module, batch: Batch, capture: Capture, draw: Draw | None = None
) -> Tensor:
    """One forward and backward pass of the summed loss, watched by a capture.

    Args:
        model: a `trainer.model.Transformer`; its `.grad` fields are not touched.
        batch: packed rows.
        capture: of this model; holds the sites afterwards.
        draw: gives other labels than the batch's, such as sampled ones; see `token_losses`.

    Returns:
        nll_BT, detached.

    Raises:
        GradientError: a loss that isn't finite, with the records that it is of, or a parameter whose use can't be seen.
    """
    with capture:
        nll_BT = token_losses(model, batch, draw)
        if not bool(nll_BT.isfinite().all()):
            segments = Segments.of(batch)
            bad = segments.index_S[~np.isfinite(segments.sums(nll_BT.detach().cpu().numpy()))]
            raise GradientError(
                f"loss: expected finite numbers, got {nll_BT.detach().sum().item()} at record indices "
                f"{sorted(set(bad.tolist()))[:5]}; check the checkpoint, or the precision it is scored in"
            )
        # With respect to the outputs of the layers: nothing accumulates in the model, no weight gradient is formed.
        if capture.outputs:
            torch.autograd.grad(nll_BT.sum(), capture.outputs, allow_unused=True)
    if unseen := sorted(set(capture.shapes) - {site.parameter for site in capture.sites}):
        raise GradientError(
            f"{unseen[0]}: expected its module to be called in the forward pass, got no call; a parameter that is used "
            "as a bare tensor has a gradient that can't be seen here: call its module, or freeze it"
        )
    return nll_BT.detach()


@dataclass(frozen=True, slots=True)
class RecordGradients:
    """A pass over a batch, whose records' gradients are formed when they are asked for: until then it holds activations alone."""

    capture: Capture
    """What the pass left."""
    groups: Groups
    """The records, with their corpus indices."""

    def of(self, name: str) -> Tensor:
        """The gradient of every record's summed loss with respect to one parameter: [N, *shape]."""
        return self.capture.gradients(name, self.groups)

    def all(self) -> dict[str, Tensor]:
        """The same by parameter, N times the parameters."""
        return {name: self.of(name) for name in self.capture.shapes}


def record_gradients(
    model: nn.Module, batch: Batch, names: Collection[str] | None = None
) -> RecordGradients:
    """The gradient of every record's summed loss, formed: the materialised route.

    Args:
        model: a `trainer.model.Transformer`; its `.grad` fields are not touched.
        batch: packed rows. A record whose pieces stand in several batches comes once per batch, in shares to be
            added up; `valuation.influence.TokenSet.batches` keeps every record in one.
        names: parameters to give; None = all trainable ones.

    Returns:
        What forms them, all together or one parameter at a time.

    Raises:
        GradientError: a parameter without formula, or a loss that isn't finite.
    """
    capture = Capture(model, names)
    nll_BT = captured_pass(model, batch, capture)
    return RecordGradients(capture, Segments.of(batch).groups(nll_BT.device))


@dataclass(frozen=True, slots=True)
class RecordDots:
    """Per-record dot products; records in ascending index order."""

    index_N: NDArray[np.int64]
    """Corpus index."""
    dots_NK: NDArray[np.float64]
    """<gradient of the record's summed loss, direction k>."""
    nll_N: NDArray[np.float64]
    """The record's summed loss in nats."""
    labels_N: NDArray[np.int64]
    """Number of the record's predicted tokens."""


def record_dots(
    model: nn.Module,
    batches: Iterable[Batch],
    directions: Sequence[Mapping[str, Tensor]],
) -> RecordDots:
    """Dot products of every record's summed-loss gradient with each direction, one backward pass per batch.

    Args:
        model: a `trainer.model.Transformer`; its `.grad` fields are not touched.
        batches: packed rows; a record may stand in several rows, its pieces are added up.
        directions: K mappings of parameter name to tensor.

    Returns:
        One row per record that stands in any batch. To rank by benefit with V the gradient of a
        target loss: a positive dot product means a gradient step on the record lowers that loss.

    Raises:
        GradientError: a direction that does not fit the model, or an unsupported module.
    """
    capture = Capture(model)
    indices: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.float64]] = []
    for batch in batches:
        nll_BT, segments = captured_pass(model, batch, capture), Segments.of(batch)
        per_token = [capture.token_dots(direction) for direction in directions]
        per_token.append(nll_BT)
        sums = [segments.sums(values_BT.cpu().numpy()) for values_BT in per_token]
        indices.append(segments.index_S)
        columns.append(np.stack([*sums, segments.sums(batch.labels_BT != IGNORE)], axis=1))
    width = len(directions) + 2
    index_S = np.concatenate(indices) if indices else np.empty(0, np.int64)
    values_SC = np.concatenate(columns) if columns else np.empty((0, width))
    index_N, where_S = np.unique(index_S, return_inverse=True)
    sums_NC = np.zeros((len(index_N), width))
    np.add.at(sums_NC, where_S, values_SC)
    return RecordDots(
        index_N=index_N,
        dots_NK=sums_NC[:, :-2],
        nll_N=sums_NC[:, -2],
        labels_N=sums_NC[:, -1].round().astype(np.int64),
    )
