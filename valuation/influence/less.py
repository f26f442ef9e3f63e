"""LESS: how much an Adam step on a record alone would agree with each query's gradient, over checkpoints.

    Gamma_n = m' / (sqrt(v') + eps),   m' = (b1 m + (1-b1) g_n) / (1-b1^t),   v' = (b2 v + (1-b2) g_n^2) / (1-b2^t)
    score(q, n) = sum_c lr_c cos(g_q, Gamma_n)

with g the gradient of the mean loss per token, since the map is not linear, and m, v, t the optimiser's
state at checkpoint c, t counting this step. The old moment m is in every Gamma_n: late in a training with
b1 near 1 all records look much alike, and what separates them is their share (1-b1) g_n. Cosines ignore
sizes, so scores can't be added up over records.

Differences to the paper: all parameters instead of adapters, and no projection.

Source: arXiv 2402.04333, definition 3.1 and section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from valuation.errors import GradientError
from valuation.influence.pairing import PASS, add_up, as_cosines, finish, gradient_blocks, watched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from trainer.optim import AdamW
    from valuation.capture import Capture, Groups
    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamCheckpoint:
    """A model and the state of its optimiser."""

    model: nn.Module
    """Weights."""
    lr: float
    """Weight of this checkpoint: its learning rate, or the mean of its epoch."""
    first: Mapping[str, Tensor]
    """m by parameter."""
    second: Mapping[str, Tensor]
    """v by parameter."""
    count: int
    """Steps done, >= 0."""
    betas: tuple[float, float]
    """b1, b2."""
    eps: float
    """Added to the square root."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: AdamW) -> Self:
        """The state of the trainer's AdamW, not copied."""
        spec = optimizer.spec
        return cls(
            model=model, lr=optimizer.lr, first=optimizer.first, second=optimizer.second,
            count=int(optimizer.count.item()), betas=(spec.betas[0], spec.betas[1]), eps=spec.eps,
        )  # fmt: skip

    def step_of(self, name: str, grads: Tensor) -> Tensor:
        """Gamma of N gradients [N, *shape] of one parameter."""
        b1, b2 = self.betas
        first = (b1 * self.first[name] + (1 - b1) * grads) / (1 - b1 ** (self.count + 1))
        second = (b2 * self.second[name] + (1 - b2) * grads.square()) / (1 - b2 ** (self.count + 1))
        return first / (second.sqrt() + self.eps)


def scores(
    checkpoints: Sequence[AdamCheckpoint], train: TokenSet, queries: TokenSet, *, how: Pass = PASS
) -> Scores:
    """Adam-aware influence of every record on every query.

    Args:
        checkpoints: models with their optimiser's state, in the order of training.
        train: records.
        queries: queries, each of 2 or more tokens.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores: sums of cosines, weighted by learning rates.

    Raises:
        GradientError: no checkpoint, a parameter without moments, or see `valuation.influence.pairing`.
    """
    if not checkpoints:
        raise GradientError("checkpoints: expected at least one, got none")
    total_QN = np.zeros((len(queries.records), len(train.records)))
    for checkpoint in checkpoints:
        for places, left in gradient_blocks(checkpoint.model, queries, how):
            if missing := sorted(set(left) - (set(checkpoint.first) & set(checkpoint.second))):
                raise GradientError(
                    f"checkpoints: expected both moments of every parameter, got none of {missing[0]}; "
                    "LESS is for models trained with AdamW"
                )
            total_QN[places] += checkpoint.lr * _cosines(checkpoint, train, left, how)
    models = [checkpoint.model for checkpoint in checkpoints]
    return finish(total_QN, f"less(checkpoints={len(checkpoints)})", models, train, queries)


def _cosines(
    checkpoint: AdamCheckpoint, train: TokenSet, left: Mapping[str, Tensor], how: Pass
) -> np.ndarray:
    """cos(g_q, Gamma_n); a record that predicts nothing has no step."""
    num_queries = len(next(iter(left.values())))
    dots = torch.zeros(num_queries, len(train.records), dtype=torch.float64)
    squares = torch.zeros(len(train.records), dtype=torch.float64)
    live_N = torch.from_numpy(train.labels_N > 0)
    for place_N, capture, groups in watched(checkpoint.model, train, how):
        columns = torch.from_numpy(place_N)
        dots_Qn, squares_n = step_dots(checkpoint, capture, groups, train.labels_N[place_N], left)
        dots[:, columns], squares[columns] = dots_Qn.cpu(), squares_n.cpu()
    dots, squares = add_up(how.mesh, dots * live_N), add_up(how.mesh, squares)
    return as_cosines(dots.numpy(), left, squares.numpy())


def step_dots(
    checkpoint: AdamCheckpoint, capture: Capture, groups: Groups, labels_n: NDArray[np.int64], left: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """<g_q, Gamma_n> and |Gamma_n|^2 of the records of a captured pass.

    Args:
        checkpoint: model and moments.
        capture: after its backward pass.
        groups: positions of the records.
        labels_n: predicted tokens of each, > 0.
        left: the queries' gradients.

    Returns:
        dots_Qn and squares_n, float64.
    """
    num, device = len(labels_n), groups.position_P.device
    dots = torch.zeros(len(next(iter(left.values()))), num, dtype=torch.float64, device=device)
    squares = torch.zeros(num, dtype=torch.float64, device=device)
    labels = torch.from_numpy(np.maximum(labels_n, 1))
    for name, values in left.items():
        grads = capture.gradients(name, groups)
        count_n = labels.to(grads).view(-1, *[1] * (grads.dim() - 1))
        steps_nX = checkpoint.step_of(name, grads / count_n).flatten(1)
        dots += (values.flatten(1) @ steps_nX.T).double()
        squares += steps_nX.square().sum(1, dtype=torch.float64)
    return dots, squares
