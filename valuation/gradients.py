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

When this is the wrong tool: for all *pairs* of records (use the ghost or the materialised
route), and for a model with parameters in modules of other kinds, which is refused.

Legend: B rows, T positions, I inputs, O outputs, S segments (pieces of records in rows),
N records, K directions.

Source: the "ghost dot product" of In-Run Data Shapley, arXiv 2406.11011, section 4.2, with its
second factor summed over the validation set first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.data import IGNORE
from trainer.model import RMSNorm
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from trainer.data import Batch


@dataclass(slots=True)
class Site:
    """One use of one parameter in one forward pass."""

    parameter: str
    """Name of the parameter as `model.named_parameters` gives it; a tied one has one name."""
    module: nn.Module
    """Linear, Embedding or RMSNorm."""
    input: Tensor
    """What went in: a_BTI, token ids_BT, or x_BTD."""
    grad: Tensor | None = None
    """Gradient of the loss with respect to what came out; None until the backward pass."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """This use's share of <gradient, direction>, split over positions.

        Args:
            direction: tensor of the parameter's shape.

        Returns:
            dots_BT.
        """
        if self.grad is None:
            raise GradientError(
                f"{self.parameter}: expected a backward pass before dot products, got none; call backward() first",
            )
        if isinstance(self.module, nn.Embedding):
            return (self.grad * functional.embedding(self.input, direction)).sum(-1)
        if isinstance(self.module, RMSNorm):
            x = self.input
            xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.module.eps)
            return (self.grad * xhat) @ direction
        # Both orders cost the same products; the one whose result is narrower needs less memory.
        if direction.shape[1] <= direction.shape[0]:
            return ((self.grad @ direction) * self.input).sum(-1)
        return ((self.input @ direction.T) * self.grad).sum(-1)


class Capture:
    """Keeps the inputs and output gradients of every parameter during a forward and backward pass.

    Use as a context manager around forward and backward; `token_dots` works inside and after it,
    also once the optimiser has changed the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare a capture.

        Args:
            model: every trainable parameter must sit in a Linear without bias, an Embedding or an RMSNorm.

        Raises:
            GradientError: a parameter in any other kind of module.
        """
        self.sites: list[Site] = []
        self._shapes = {
            name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad
        }
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._modules: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                if own != "weight" or not _is_supported(module):
                    raise GradientError(
                        f"{path}.{own}: expected the weight of a Linear, Embedding or RMSNorm, got "
                        f"{type(module).__name__}; freeze this parameter or add its formula to Site.token_dots",
                    )
                self._modules[module] = names[id(parameter)]
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        """Forget earlier passes and start listening."""
        self.sites = []
        self._handles = [m.register_forward_hook(self._on_forward) for m in self._modules]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening; what was captured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # a pass without gradients, such as an evaluation
            return
        site = Site(parameter=self._modules[module], module=module, input=inputs[0].detach())

        def keep(grad: Tensor) -> None:
            site.grad = grad.detach()

        output.register_hook(keep)
        self.sites.append(site)

    def token_dots(self, direction: Mapping[str, Tensor]) -> Tensor:
        """<gradient, direction> split over positions; the sum over a record's positions is the record's.

        Args:
            direction: one tensor per trainable parameter, by name, of its shape.

        Returns:
            dots_BT in the model's floating type, in the scale of the loss that was backpropagated.

        Raises:
            GradientError: a parameter without direction or of another shape, or no captured pass.
        """
        check_direction(self._shapes, direction)
        if not self.sites:
            raise GradientError(
                "expected a captured forward pass, got none; run the model inside `with capture:`"
            )
        with torch.no_grad():
            parts = [site.token_dots(direction[site.parameter]) for site in self.sites]
            return torch.stack(parts).sum(0)


def _is_supported(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        # max_norm rewrites rows in the forward pass; scaling by frequency is not the gradient of any loss.
        return module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear | RMSNorm)


def check_direction(shapes: Mapping[str, tuple[int, ...]], direction: Mapping[str, Tensor]) -> None:
    """Refuse a direction that is not exactly one tensor per parameter.

    Raises:
        GradientError: missing or unknown names, or a wrong shape.
    """
    if shapes.keys() != direction.keys():
        odd = sorted(shapes.keys() ^ direction.keys())
        raise GradientError(
            f"direction: expected one tensor per trainable parameter, got a mismatch at {odd[:3]}; "
            "take it from aggregate_gradient of the same model",
        )
    for name, shape in shapes.items():
        if tuple(direction[name].shape) != shape:
            raise GradientError(
                f"direction {name}: expected shape {shape}, got {tuple(direction[name].shape)}",
            )


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log-likelihood of every label.

    Args:
        model: a `trainer.model.Transformer`.
        batch: packed rows.

    Returns:
        nll_BT in nats, 0 where there is no label; differentiable.
    """
    device = str(next(model.parameters()).device)
    tokens_BT, labels_BT, positions_BT, documents_BT = batch.tensors(device)
    logits_BTV = model(tokens_BT, positions_BT, documents_BT)
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
    parameters = [p for p in model.parameters() if p.requires_grad]
    indices: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.float64]] = []
    for batch in batches:
        with capture:
            nll_BT = token_losses(model, batch)
            # grad(), not backward(): nothing accumulates in the model.
            torch.autograd.grad(nll_BT.sum(), parameters)
        segments = Segments.of(batch)
        per_token = [capture.token_dots(direction) for direction in directions]
        per_token.append(nll_BT.detach())
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
