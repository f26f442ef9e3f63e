"""A loss of inner layers in a pipeline: said where the layer is, without a word more between stages.

    loss = loss of the last stage's logits  +  sum over layers l of a_l(x_l)          x_l the residual stream after l blocks

    forward     x_l goes on as it is; a_l(x_l) is computed beside it
    backward    what comes back from later stages  +  d a_l / d x_l

So later stages get no gradient from a_l, this one and earlier ones do, and every schedule works as it is: to it, x_l is a value with a
gradient, like any other. A schedule takes the microbatches of a stage in their order, and a layer is computed once for each,
so that the k-th value of a layer in a step belongs to the k-th microbatch.

Source: the identity with a second gradient is that of auxiliary losses in mixtures of experts (Megatron-LM's MoEAuxLossAutoScaler).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainer.model import Transformer

    LossOf = Callable[[int, Tensor, Tensor], Tensor]


def layers_of(blocks: Iterable[int], *, first: bool) -> list[int]:
    """The residual streams that arise in some blocks: k + 1 after block k, and 0 after the embedding.

    Args:
        blocks: numbers of layers, of a stage or of all stages of a process.
        first: whether the embedding is there too.
    """
    return [0] * first + [block + 1 for block in blocks]


@contextmanager
def beside(
    pieces: Iterable[Transformer], layers: Iterable[int], target: Tensor, microbatches: int, loss_of: LossOf
) -> Iterator[list[Tensor]]:  # fmt: skip
    """Let the stages of a process compute losses of their own layers, during one step.

    Args:
        pieces: the stages.
        layers: whose residual streams have a loss; those of other stages are left to them.
        target: of the whole batch; microbatches are cut along the first axis.
        microbatches: their number.
        loss_of: (layer, hidden_BTD, part of the target) -> share of the loss.

    Yields:
        The shares so far, without gradient.
    """
    shares: list[Tensor] = []
    handles = []
    try:
        for piece in pieces:
            for layer in layers:
                source = _source(piece, layer)
                if source is not None:
                    watch = _Watch(layer, target.chunk(microbatches), loss_of, shares)
                    handles.append(source.register_forward_hook(watch))
        yield shares
    finally:
        for handle in handles:
            handle.remove()


def _source(piece: Transformer, layer: int) -> nn.Module | None:
    """What makes a layer's residual stream, if this stage has it."""
    if layer == 0:
        return piece.embed
    return next((block for name, block in piece.blocks.items() if name == str(layer - 1)), None)


class _Watch:
    """What happens to a layer's value of each microbatch."""

    def __init__(
        self, layer: int, targets: tuple[Tensor, ...], loss_of: LossOf, shares: list[Tensor]
    ) -> None:
        self.layer, self.loss_of, self.shares = layer, loss_of, shares
        self.targets = iter(targets)

    def __call__(self, module: nn.Module, given: Any, hidden_BTD: Tensor) -> Tensor:
        del module, given
        loss = self.loss_of(self.layer, hidden_BTD, next(self.targets))
        self.shares.append(loss.detach())
        return cast("Tensor", _Beside.apply(hidden_BTD, loss))


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.clone()  # a schedule detaches what a stage returns in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.one
