"""Hessian-vector products of a target loss, by differentiating its gradient once more.

    H v = d/dw <grad L(w), v>          two backward passes, nothing of size P^2

One product costs about three gradients of the same batches. PyTorch's fused attention kernels have no second
derivative, so everything here runs under the kernel that is written in plain products (`SDPBackend.MATH`); its
first derivatives differ from theirs by rounding only.

The loss is taken at *given* parameters, not at those that the model holds: whoever asks for the curvature at the
weights before a step may ask after it.

Source: Pearlmutter (1994), Neural Computation 6, 147; reverse over reverse, as `torch.autograd` offers it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from trainer.data import Batch

_IGNORE = -100  # trainer.data.IGNORE: no label


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by a kernel that has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def token_losses_at(model: nn.Module, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Negative log-likelihood of every label, with other weights than the model holds.

    Args:
        model: a `trainer.model.Transformer`; gives the shape of the computation.
        parameters: tensor by parameter name; what isn't named is the model's own.
        batch: packed rows.

    Returns:
        nll_BT in nats, 0 where there is no label; differentiable in `parameters`.
    """
    device = str(next(iter(parameters.values())).device)
    tokens_BT, labels_BT, positions_BT, documents_BT = batch.tensors(device)
    inputs = (tokens_BT, positions_BT, documents_BT)
    logits_BTV = functional_call(model, dict(parameters), inputs)
    nll = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=_IGNORE, reduction="none"
    )
    return nll.view_as(labels_BT)


def hessian_product(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    batches: Iterable[Batch],
    vector: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The Hessian of the mean token loss of all batches, times a vector.

    Args:
        model: a `trainer.model.Transformer`; its own weights and `.grad` fields are not touched.
        parameters: where the curvature is taken, one tensor per trainable parameter.
        batches: packed rows.
        vector: one tensor per trainable parameter.

    Returns:
        H v by parameter name.

    Raises:
        GradientError: no batch predicts any token, or the names of vector and parameters differ.
    """
    if parameters.keys() != vector.keys():
        odd = sorted(parameters.keys() ^ vector.keys())
        raise GradientError(
            f"vector: expected one tensor per parameter, got a mismatch at {odd[:3]}"
        )
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    total = {name: torch.zeros_like(p) for name, p in leaves.items()}
    labels = 0
    for batch in batches:
        with twice_differentiable():
            loss = token_losses_at(model, leaves, batch).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            along = [(g * vector[name]).sum() for name, g in zip(leaves, grads, strict=True)]
            parts = torch.autograd.grad(torch.stack(along).sum(), list(leaves.values()))
        for name, part in zip(leaves, parts, strict=True):
            total[name] += part
        labels += batch.num_labels
    if labels == 0:
        raise GradientError(
            "target: expected at least one predicted token, got none; give records of 2 or more tokens"
        )
    return {name: product / labels for name, product in total.items()}
