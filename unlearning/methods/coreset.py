"""Association-aware core-set: which of the forgotten records to push, so that the others fall with them.

    a_ij = cos(g_i, g_j)        greedily take the record that raises Σ_j max_{i taken} a_ij the most (facility location)

Forgetting ripples along gradient similarity (PrivUn: r = 0.73), so records whose gradients speak for many others come first. It does
not erase independent random secrets: measure the unselected rest (README). Greedy is within 1 - 1/e of the best set.

Source: PrivUn, arXiv 2604.22076 (abstract); Nemhauser, Wolsey, Fisher 1978 for the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    if not 1 <= count <= size:
        raise PlanError(f"expected 1..{size} records in the core-set, got {count}")
    norms_N = np.linalg.norm(gradients_NP, axis=1, keepdims=True)
    unit_NP = gradients_NP / np.where(norms_N > 0, norms_N, 1.0)
    similarity_NN = unit_NP @ unit_NP.T
    covered_N = np.full(size, -1.0)
    chosen: list[int] = []
    for _ in range(count):
        gain_N = np.maximum(similarity_NN - covered_N, 0).sum(1)
        gain_N[chosen] = -np.inf
        best = int(gain_N.argmax())
        chosen.append(best)
        covered_N = np.maximum(covered_N, similarity_NN[best])
    return chosen
