"""What a method did, in three numbers: how likely the forgotten secrets still are, how many are given away, what it cost the others.

The first two are to fall to where never-seen secrets lie, the third is to stay at the original's. They choose settings
(`sweep`) and end runs (`stopping`); whether somebody is really gone, only an audit says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.objective import LanguageModelling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.data import BatchPlan
    from trainer.model import Transformer
    from unlearning.methods.forget_retain import Forgotten


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one model."""

    logprob: float
    """Mean over the forgotten records of the log-probability per pushed token, nats, ≤ 0."""
    given_away: float
    """Share of them whose pushed tokens are all the likeliest, 0..1."""
    retained: float
    """Retained utility: mean negative log-likelihood per label of what remains, nats, ≥ 0."""


def outcome_of(
    model: Transformer, forgotten: Sequence[Forgotten], plan: BatchPlan, steps: int = 4
) -> Outcome:
    """Measure a model.

    Args:
        model: whole, in evaluation mode.
        forgotten: records, with what is pushed of them.
        plan: batches of what remains.
        steps: batches that utility is measured on, at least 1; the same ones for every model.

    Returns:
        The three numbers; secrets of a model that is not finite are capped as in `scoring`, its utility is not.
    """
    from unlearning.scoring import score_spans

    scores = score_spans(model, [one.tokens for one in forgotten], [one.first for one in forgotten])
    language = LanguageModelling(plan, next(model.parameters()).device.type)
    nats, labels = 0.0, 0.0
    with torch.no_grad():
        for step in range(steps):
            batch = language.batch(step, 0, 1)
            nats += language.loss(model, batch, torch.ones(1, dtype=torch.float64)).item()
            labels += language.counts(batch).item()
    return Outcome(float(-np.mean(scores.loss_N)), float(np.mean(scores.exact_N)), nats / labels)
