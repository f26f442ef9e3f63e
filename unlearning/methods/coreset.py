"""Association-aware core-set: which of the forgotten records to push, so that the others fall with them.

    a_ij = cos(g_i, g_j)        greedily take the record that raises Σ_j max_{i taken} a_ij the most (facility location)

Forgetting ripples along gradient similarity (PrivUn: r = 0.73), so records whose gradients speak for many others come first. Greedy is
within 1 - 1/e of the best set. **It does not erase independent random secrets.** Measured (README, "A core-set by gradients against random ones"):
gradients of different people are orthogonal, and people who are left out come back as often as after a random choice. What it finds are the
lines that share a secret: by single records it leaves out fewer people than a random choice, and no fewer than one line of each person.

`random_set` is the control: a core-set that is no better than as many records drawn at random has chosen nothing.

Source: PrivUn, arXiv 2604.22076 (abstract); Nemhauser, Wolsey, Fisher 1978 for the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    from unlearning.methods.forget_retain import Forgotten

CHOICES = ("gradient", "random")
"""How a core-set is chosen."""

_STREAM = 29
BUCKETS = 2048
"""Length of a sketched gradient: inner products err by about |g||h| / sqrt(BUCKETS)."""


def core_set(gradients_NP: NDArray[np.float64], count: int) -> list[int]:
    """The records to push, in order of choice.

    Args:
        gradients_NP: one gradient per forgotten record, projected or whole.
        count: how many, 1 ≤ count ≤ N.

    Returns:
        Indices; ties go to the lower index.

    Raises:
        PlanError: for a count out of range.
    """
    size = len(gradients_NP)
    _demand_count(size, count)
    similarity_NN = _cosines(gradients_NP)
    covered_N = np.full(size, -1.0)
    chosen: list[int] = []
    for _ in range(count):
        gain_N = np.maximum(similarity_NN - covered_N, 0).sum(1)
        gain_N[chosen] = -np.inf
        best = int(gain_N.argmax())
        chosen.append(best)
        covered_N = np.maximum(covered_N, similarity_NN[best])
    return chosen


def random_set(size: int, count: int, generator: np.random.Generator) -> list[int]:
    """As many records drawn without looking at them: every set of `count` is equally likely.

    Args:
        size: forgotten records, N.
        count: how many, 1 ≤ count ≤ N.
        generator: source of the draw.

    Returns:
        Indices, increasing.

    Raises:
        PlanError: for a count out of range.
    """
    _demand_count(size, count)
    return sorted(int(index) for index in generator.choice(size, size=count, replace=False))


def coverage(gradients_NP: NDArray[np.float64], chosen: Sequence[int]) -> NDArray[np.float64]:
    """How well a set speaks for each record: the largest cosine with a chosen one. `core_set` makes the sum of these large.

    Args:
        gradients_NP: one gradient per forgotten record, projected or whole.
        chosen: indices, at least one.

    Returns:
        float64 [N] in -1..1; 1 for the chosen themselves.
    """
    covered_N: NDArray[np.float64] = _cosines(gradients_NP)[:, list(chosen)].max(1)
    return covered_N


def _cosines(gradients_NP: NDArray[np.float64]) -> NDArray[np.float64]:
    norms_N1 = np.linalg.norm(gradients_NP, axis=1, keepdims=True)
    unit_NP: NDArray[np.float64] = gradients_NP / np.where(norms_N1 > 0, norms_N1, 1.0)
    return unit_NP @ unit_NP.T


def _demand_count(size: int, count: int) -> None:
    if not 1 <= count <= size:
        raise PlanError(f"expected 1..{size} records in the core-set, got {count}")


def sketched_gradients(
    model: Any, forgotten: Sequence[Forgotten], seed: int = 0
) -> NDArray[np.float64]:
    """Gradient of each record's pushed tokens, as a count sketch: one pass per record, no matrix of projections.

        sketch[b] = Σ_{p: bucket(p) = b} sign(p) · gradient[p]          E[<sketch g, sketch h>] = <g, h>

    Args:
        model: the original model, whole.
        forgotten: N records.
        seed: of buckets and signs.

    Returns:
        float64 [N, BUCKETS].

    Source: Charikar, Chen, Farach-Colton 2002 (count sketch).
    """
    from unlearning.scoring import span_logits, span_mask

    parameters = [one for one in model.parameters() if one.requires_grad]
    size = sum(one.numel() for one in parameters)
    generator = torch.Generator().manual_seed(seed)
    bucket_P = torch.randint(BUCKETS, (size,), generator=generator)
    sign_P = torch.randint(2, (size,), generator=generator) * 2 - 1
    found = np.zeros((len(forgotten), BUCKETS))
    for place, one in enumerate(forgotten):
        tokens_1T = torch.tensor([one.tokens])
        mask_1T = span_mask([one.tokens], [one.first])
        logits_SV = span_logits(model, tokens_1T, mask_1T)
        nll = torch.nn.functional.cross_entropy(logits_SV, tokens_1T[:, 1:][mask_1T])
        grads = torch.autograd.grad(nll, parameters)
        flat_P = torch.cat([grad.flatten() for grad in grads]).double()
        found[place] = (
            torch.zeros(BUCKETS, dtype=torch.float64)
            .index_add(0, bucket_P, flat_P * sign_P)
            .numpy()
        )
    return found


def core_records(
    model: Any,
    forgotten: Sequence[Forgotten],
    share: float,
    choice: str = "gradient",
    seed: int = 0,
) -> list[Forgotten]:
    """The share of the records that is pushed: the one that speaks for the others, or, as its control, any.

    Args:
        model: the original model, whole; a random choice does not ask it.
        forgotten: N records.
        share: in (0, 1]; at least one record is taken.
        choice: one of `CHOICES`.
        seed: of a random choice.

    Raises:
        PlanError: for another choice.
    """
    if choice not in CHOICES:
        raise PlanError(f"expected a core-set chosen by {' or '.join(CHOICES)}, got {choice!r}")
    count = max(1, round(share * len(forgotten)))
    if choice == "random":
        chosen = random_set(len(forgotten), count, np.random.default_rng([_STREAM, seed]))
    else:
        chosen = core_set(sketched_gradients(model, forgotten), count)
    return [forgotten[index] for index in sorted(chosen)]
