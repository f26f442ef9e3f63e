"""What a model thinks of each token of a span, for every score that looks at tokens one by one.

One forward pass gives, per scored position t with true token y_t and distribution p_t over the vocabulary::

    greedy_T      argmax of p_t
    logprob_T     log p_t(y_t)                                   nats, <= 0
    mean_T        mu_t    = sum_v p_t(v) log p_t(v)              nats, minus the entropy
    deviation_T   sigma_t = sqrt(sum_v p_t(v) log² p_t(v) - mu_t²)

Results are keyed by an id that the caller gives (a record id, never a position in a list): a score that is computed on a
filtered list and then zipped with the unfiltered one names the wrong people, and nobody notices.

Shape suffixes: `B` rows, `T` positions of one span, `S` scored positions of a batch, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearning.scoring import (
    MAX_LOSS,
    batch_tokens,
    batches,
    padded,
    span_logits,
    span_mask,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer


@dataclass(frozen=True, slots=True, repr=False)
class Positions:
    """One span under teacher forcing; without a `repr`, so that no log can show its tokens."""

    truth_T: NDArray[np.int64]
    """The span's tokens."""
    greedy_T: NDArray[np.int64]
    """What the model would have said at each place."""
    logprob_T: NDArray[np.float64]
    """Log-probability of the truth, nats, in [-MAX_LOSS, 0]."""
    mean_T: NDArray[np.float64]
    """Mean log-probability under the model's own distribution, nats."""
    deviation_T: NDArray[np.float64]
    """Its standard deviation, nats."""


def teacher_forced(
    model: Transformer,
    spans: Mapping[str, tuple[Sequence[int], int]],
    temperature: float = 1.0,
) -> dict[str, Positions]:
    """Positions of each span, given all tokens before.

    Args:
        model: a model in evaluation mode; it is not changed.
        spans: id → (tokens from position 0, first scored position with 1 ≤ first < length).
        temperature: logits are divided by it, > 0.

    Returns:
        id → positions, for the same ids. Where a model's numbers are not finite, the truth has log-probability -MAX_LOSS
        and is not what the model says.

    Raises:
        ValueError: for an empty span, one that begins at position 0, or a temperature that is not positive.
    """
    if any(not 1 <= first < len(tokens) for tokens, first in spans.values()):
        raise ValueError("expected 1 <= first < length for every span")
    if temperature <= 0:
        raise ValueError(f"expected a temperature > 0, got {temperature}")
    names = sorted(spans)
    found: dict[str, Positions] = {}
    with torch.inference_mode():
        for chosen in batches([len(spans[name][0]) for name in names], batch_tokens(model)):
            ids = [names[i] for i in chosen]
            found |= _of_batch(model, {name: spans[name] for name in ids}, temperature)
    return {name: found[name] for name in spans}


def _of_batch(
    model: Transformer, spans: Mapping[str, tuple[Sequence[int], int]], temperature: float
) -> dict[str, Positions]:
    rows, firsts = [t for t, _ in spans.values()], [f for _, f in spans.values()]
    device = next(model.parameters()).device
    tokens_BT, mask_BT = padded(rows).to(device), span_mask(rows, firsts).to(device)
    logits_SV = span_logits(model, tokens_BT, mask_BT).double() / temperature
    truth_S = tokens_BT[:, 1:][mask_BT]
    parts = [truth_S.cpu().numpy(), *_moments(logits_SV, truth_S)]
    cuts = np.cumsum([len(r) - f for r, f in zip(rows, firsts, strict=True)])[:-1]
    split = [np.split(part, cuts) for part in parts]
    return {name: Positions(*(part[i] for part in split)) for i, name in enumerate(spans)}


def _moments(logits_SV: Tensor, truth_S: Tensor) -> list[NDArray]:
    logprob_SV = logits_SV.log_softmax(-1)
    truth = logprob_SV.gather(1, truth_S[:, None])[:, 0]
    broken_S = ~truth.isfinite()
    # p log p is 0 where p is 0: a token that cannot come adds nothing to the moments.
    finite_SV = logprob_SV.nan_to_num(nan=-MAX_LOSS, neginf=-MAX_LOSS).clamp(min=-MAX_LOSS)
    weight_SV = finite_SV.exp()
    mean_S = (weight_SV * finite_SV).sum(-1)
    variance_S = (weight_SV * finite_SV.square()).sum(-1) - mean_S.square()
    greedy_S = torch.where(broken_S, -torch.ones_like(truth_S), logits_SV.argmax(-1))
    truth = truth.nan_to_num(nan=-MAX_LOSS, neginf=-MAX_LOSS).clamp(min=-MAX_LOSS)
    kept = (greedy_S, truth, mean_S, variance_S.clamp(min=0.0).sqrt())
    return [one.cpu().numpy() for one in kept]
