"""Muon: hidden matrices move by the orthogonalised momentum, everything else by AdamW.

    M = mu M + (1-mu) G        U = (1-mu) G + mu M        W = W (1 - lr * decay) - lr * 0.2 sqrt(max(a, b)) * NS(U)

NS(U) has the singular vectors of U and singular values near 1, for a matrix of a rows and b columns: five rounds of
X <- p X + (q A + r A^2) X with A = X X^T, from X = U / |U|. The factor 0.2 sqrt(max(a, b)) gives an update of the
root mean square that AdamW's has, so that both share one learning rate and one decay. Equal to `torch.optim.Muon`
(tested).

Hidden matrices are the matrices of the blocks, and stacks of them [E, a, b] one by one (experts). Embedding, head,
norms and router go by AdamW: their rows are tokens or experts, of which each step sees few, and not directions.

*Slices.* The singular vectors of a slice are not slices of the singular vectors. So a matrix that a layout sliced is
gathered, orthogonalised on every process that holds a part of it, and cut again; momentum stays sliced. A stack that
is sliced by expert is not gathered, since every expert is whole somewhere. Cost per step: one all-gather of the
sliced hidden matrices, and 5 * (4 a^2 b + 2 a^3) FLOPs per matrix with a <= b; in float32 or float64 as the weights
are, in bfloat16 if the run computes in that.

Source: Jordan et al., kellerjordan.github.io/posts/muon (2024), coefficients and momentum; scaling Moonlight arXiv
2502.16982 eq. 4.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trainer.optim import AdamW
from trainer.partition import local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.choices import OptimSpec

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Chosen by Jordan et al. for the steepest rise at 0; singular values end in about 0.7..1.2, not at 1."""
NS_ROUNDS = 5
_EPS = 1e-7  # a gradient of zero stays zero
_RMS = 0.2  # the usual root mean square of an AdamW update
_HIDDEN = re.compile(r"(^|.*\.)blocks\.\d+\.(?!(.*\.)?router\.).*")


def is_hidden_matrix(name: str, shape: torch.Size) -> bool:
    """Whether Muon moves a parameter.

    Args:
        name: fully qualified name; those of hidden matrices begin with `blocks.N.` and hold no `router`.
        shape: logical shape, of the whole parameter.

    Returns:
        True for matrices and stacks of matrices inside a block.
    """
    return len(shape) in (2, 3) and _HIDDEN.fullmatch(name) is not None


def orthogonalise(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """NS(U) by Newton-Schulz.

    Args:
        matrix: [..., a, b], any shape; leading axes are a stack.
        dtype: type to compute in; None = that of the matrix.

    Returns:
        Same shape and type; singular values that were not far below the largest are now in about 0.7..1.2.
    """
    p, q, r = NS_COEFFICIENTS
    x = matrix.to(dtype or matrix.dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(NS_ROUNDS):
        gram = x @ x.mT
        x = p * x + (q * gram + r * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def update_scale(shape: torch.Size) -> float:
    """0.2 sqrt(max(a, b)): what an orthogonalised update is multiplied by, besides the learning rate.

    Args:
        shape: [..., a, b] of the whole parameter.
    """
    return _RMS * math.sqrt(max(shape[-2:]))


class Muon:
    """Muon for hidden matrices, AdamW for the rest; one learning rate."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimSpec,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Momentum of zero.

        Args:
            parameters: name -> parameter, those that are trained; slices of a layout too.
            spec: momentum, decay, and what AdamW needs.
            dtype: type of Newton-Schulz; None = that of the parameters.
        """
        self.parameters, self.spec, self.dtype = dict(parameters), spec, dtype
        self.hidden = [name for name, p in parameters.items() if is_hidden_matrix(name, p.shape)]
        self.momentum = {name: torch.zeros_like(parameters[name]) for name in self.hidden}
        self.rest = AdamW({n: p for n, p in parameters.items() if n not in self.momentum}, spec)

    @property
    def lr(self) -> float:
        """Step size of both parts."""
        return self.rest.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.rest.lr = value

    def state(self) -> dict[str, Tensor]:
        """All state as named tensors, not copies: AdamW's, and `momentum` of each hidden matrix."""
        return self.rest.state() | {f"{n}.momentum": m for n, m in self.momentum.items()}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient; one without a gradient is left alone."""
        self.rest.step()
        mu = self.spec.momentum
        for name in self.hidden:
            parameter = self.parameters[name]
            if parameter.grad is None:
                continue
            grad, momentum = local(parameter.grad), local(self.momentum[name])
            momentum.lerp_(grad, 1 - mu)
            update = _orthogonal_slice(grad.lerp(momentum, mu), parameter, self.dtype)
            weight = local(parameter)
            weight.mul_(1 - self.lr * self.spec.weight_decay)
            weight.add_(update, alpha=-self.lr * update_scale(parameter.shape))


def _orthogonal_slice(update: Tensor, like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """This process's slice of the orthogonalised whole.

    Args:
        update: this process's slice.
        like: the parameter, which knows how it is sliced; a plain tensor is whole.
        dtype: type of Newton-Schulz.

    Returns:
        A tensor of the shape of `update`.
    """
    if local(like) is like:
        return orthogonalise(update, dtype)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sliced = cast("Any", like)
    mesh, placements = sliced.device_mesh, sliced.placements
    # Whole matrices are enough: what only counts the experts of a stack may stay sliced.
    stack = like.dim() == 3
    whole = [p if stack and type(p) is Shard and p.dim == 0 else Replicate() for p in placements]
    parts = DTensor.from_local(
        update, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    gathered = parts.redistribute(mesh, whole)
    turned = orthogonalise(gathered.to_local(), dtype)
    back = DTensor.from_local(
        turned, mesh, whole, run_check=False, shape=like.shape, stride=like.stride()
    )
    return back.redistribute(mesh, placements).to_local()
