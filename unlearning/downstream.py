"""Damage in layers that a method didn't touch: what people who stay look like after every layer, changed or not.

A method that trains some layers leaves the weights of the others as they were, not what flows through them: whatever a changed layer
writes, every later one reads. So the norm of a layer's update says nothing about its damage. Each model is asked the retained people's
questions, and the residual stream after every layer, where the answers are predicted, is compared::

    cka_original   linear CKA with the original's stream after the same layer      1: as it was
    cka_gold       linear CKA with the first gold model's
    kept_logprob   log-probability of the answer, read by the model's own final norm and head (logit lens), nats per token

Each model is read by its own head: two trainings write in different bases, so that the original's head would read every gold model as
noise, and the null would say nothing. CKA doesn't depend on the basis. A changed final norm or head shows in every layer's log-probability
and in no layer's CKA.

Before the first changed layer everything is bit for bit the original's (the tests hold this), as long as head and final norm are; after it
an untouched layer may hurt as much as the changed one. The null is what gold models differ by among themselves: their weights all differ, and none was damaged.

Shape suffixes: `L` layers, `N` questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearning.depth import lens_logprobs, linear_cka, sites, states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.probes import Probe

    Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Stream:
    """What one model's stream says about people who stay, layer by layer."""

    role: str
    number: int
    """Ordinal among the models of the role."""
    cka_original_L: NDArray[np.float64]
    """NaN where the stream doesn't vary."""
    cka_gold_L: NDArray[np.float64]
    kept_LN: NDArray[np.float64]
    """Nats per token, <= 0."""


def streams(
    load: Callable[[str, int], Transformer], compared: Sequence[Key], probes: Sequence[Probe]
) -> Iterator[Stream]:
    """Compare models on the same questions.

    Args:
        load: gives the model of a role and number, in evaluation mode; one at a time is in memory.
        compared: models that are compared; original 0 and gold 0 must be there.
        probes: questions about people who stay, at least one.

    Returns:
        One entry per model, in order.
    """
    original = load("original", 0)
    batches = sites(probes, original)
    before = states(original, batches)
    del original
    reference = states(load("gold", 0), batches)
    for role, number in compared:
        model = load(role, number)
        mine = states(model, batches)
        kept_LN = lens_logprobs(model, batches, mine)
        del model  # before the next one is read
        yield Stream(role, number, _ckas(mine, before), _ckas(mine, reference), kept_LN)


def _ckas(one: Sequence[Tensor], other: Sequence[Tensor]) -> NDArray[np.float64]:
    """CKA_L of two models' streams over all predicting positions."""
    ours, theirs = (torch.cat(list(part), 1).double().cpu().numpy() for part in (one, other))
    return np.array([linear_cka(a_SD, b_SD) for a_SD, b_SD in zip(ours, theirs, strict=True)])
