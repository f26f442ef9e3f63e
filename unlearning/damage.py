"""What forgetting one person alone does to everybody else: the other half of the ripple coefficient.

The target is pushed out by plain gradient ascent on its own records, in steps of a fixed size relative to the weights::

    theta <- theta + epsilon |theta| g / |g|,        g = grad of the target's mean loss

until its loss is that of the gold model, which never met it: the strength that was really needed, the same yardstick for everybody.
The damage of another person is the rise of its mean loss. It is measured after the first step too, where it is Taylor's theorem
(`association.CAVEAT`), so that a reader sees both.

Nothing here is a method that one would release: it is a probe of how records hang together. The model that is given stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from unlearning.grafts import square_of
from unlearning.scoring import padded, score_spans, span_logits, span_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.association import Person

    Loader = Callable[[], Transformer]

STEP = 0.002
"""epsilon: length of a step as a share of the length of all weights."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What forgetting each target alone did to each other person."""

    first_TN: NDArray[np.float64]
    """Rise of the mean loss after one step, nats per token: Taylor's regime."""
    damage_TN: NDArray[np.float64]
    """The same at the strength really used."""
    steps_T: NDArray[np.int64]
    """Steps taken."""
    rise_T: NDArray[np.float64]
    """Rise of the target's own mean loss, nats per token."""
    reached_T: NDArray[np.bool_]
    """Whether its loss came up to gold's."""


def person_losses(model: Transformer, people: Sequence[Person]) -> NDArray[np.float64]:
    """Mean loss of each person over the records, each a mean over tokens.

    Args:
        model: a model in evaluation mode.
        people: N people.

    Returns:
        losses_N, nats per token.
    """
    documents = [document for person in people for document in person.documents]
    values = score_spans(model, documents, [1] * len(documents)).loss_N
    counts = [len(person.documents) for person in people]
    return np.array([part.mean() for part in np.split(values, np.cumsum(counts)[:-1])])


def damages(
    model: Transformer | Loader,
    targets: Sequence[Person],
    others: Sequence[Person],
    goal_T: NDArray[np.float64],
    max_steps: int,
    step: float = STEP,
) -> Damage:
    """Push each target out of a copy of the model, alone, and ask what the others lost.

    Args:
        model: the original, not changed; or a function that loads it, which spares a copy.
        targets: T people.
        others: N people.
        goal_T: mean loss at which a target counts as forgotten, gold's; nats per token.
        max_steps: most steps, >= 1.
        step: size of a step relative to the weights.

    Returns:
        Damages.
    """

    def fresh() -> Transformer:
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        return cast("Transformer", made)

    pushed = fresh()
    before_N, before_T = person_losses(pushed, others), person_losses(pushed, targets)
    shape = (len(targets), len(others))
    first_TN, damage_TN = np.zeros(shape), np.zeros(shape)
    steps_T, rise_T = np.zeros(len(targets), dtype=np.int64), np.zeros(len(targets))
    for row, target in enumerate(targets):
        if row:
            del pushed  # before the next one is read
            pushed = fresh()
        pushed.requires_grad_(requires_grad=True)
        for taken in range(1, max_steps + 1):
            _ascend(pushed, target, step)
            loss = person_losses(pushed, [target])[0]
            if taken == 1:
                first_TN[row] = person_losses(pushed, others) - before_N
            steps_T[row], rise_T[row] = taken, loss - before_T[row]
            if loss >= goal_T[row]:
                break
        damage_TN[row] = person_losses(pushed, others) - before_N if steps_T[row] > 1 else first_TN[row]  # fmt: skip
    return Damage(first_TN, damage_TN, steps_T, rise_T, rise_T + before_T >= goal_T)


def _ascend(model: Transformer, target: Person, step: float) -> None:
    """One step up the target's mean loss per token, of length `step` times that of the weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    tokens_BT = padded(target.documents).to(device)
    mask_BT = span_mask(target.documents, [1] * len(target.documents)).to(device)
    logits_SV = span_logits(model, tokens_BT, mask_BT)
    loss = functional.cross_entropy(logits_SV, tokens_BT[:, 1:][mask_BT])
    grads = torch.autograd.grad(loss, parameters)
    length = _length(grads)
    if length == 0 or not np.isfinite(length):
        return
    scale = step * _length(parameters) / length
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.add_(scale * grad)


def _length(tensors: Sequence[Tensor]) -> float:
    return float(sum(square_of(t) for t in tensors)) ** 0.5
