"""Projected gradients of records as arrays, and the ridge algebra of the methods that use them.

With features Phi [N, k] of the records and ridge lam > 0,

    tau(q, n) = phi_q^T (Phi^T Phi + lam I)^-1 phi_n = [phi_q Phi^T (Phi Phi^T + lam I)^-1]_n

and the smaller of the two inverses is formed, in float64. For a linear model with features x and residuals
r this is exact: leaving record n out changes the prediction at q by ``-tau(q, n) r_n / (1 - tau(n, n))``, tau(n, n)
being its leverage.

Source: push-through identity; Cook and Weisberg 1982, eq. 2.2.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from valuation.errors import GradientError
from valuation.influence.pairing import add_up, watched

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import TokenSet
    from valuation.projection import OneSided, TwoSided


def features(
    model: nn.Module, tokens: TokenSet, projection: OneSided | TwoSided, how: Pass
) -> dict[str, NDArray[np.float64]]:
    """Projected gradients of every record, in one pass.

    Args:
        model: the model.
        tokens: records.
        projection: one-sided gives one block, "all"; two-sided one per parameter.
        how: rows, parameters, processes.

    Returns:
        Block -> [N, k]; zero for a record that predicts nothing.
    """
    found: dict[str, Tensor] = {}
    for place_N, capture, groups in watched(model, tokens, how):
        for name, values in projection.features(capture, groups).items():
            if name not in found:
                found[name] = torch.zeros(len(tokens.records), values.shape[1], dtype=torch.float64)
            found[name][torch.from_numpy(place_N)] = values.double().cpu()
    widths = how.mesh.gather([(name, values.shape[1]) for name, values in found.items()])
    known = sorted(set().union(*widths))
    for name, width in known:
        found.setdefault(name, torch.zeros(len(tokens.records), width, dtype=torch.float64))
        found[name] = add_up(how.mesh, found[name])
    return {name: found[name].numpy() for name, _ in known}


def ridge_products(
    phi_Qk: NDArray[np.float64], phi_Nk: NDArray[np.float64], ridge: float
) -> NDArray[np.float64]:
    """tau(q, n) of the module docstring.

    Args:
        phi_Qk: features of the queries.
        phi_Nk: features of the records.
        ridge: lam, as a share of the mean diagonal of Phi^T Phi; 0 only where k <= N and Phi has full rank.

    Returns:
        tau_QN.

    Raises:
        GradientError: no ridge with k > N, a negative one, or a matrix that is singular without it.
    """
    num, size = phi_Nk.shape
    ridge_check(ridge, num, size)
    lam = ridge * float(np.square(phi_Nk).sum()) / size
    if size <= num:
        if ridge == 0 and np.linalg.matrix_rank(phi_Nk) < size:
            raise GradientError("ridge: the features are linearly dependent; give a ridge above 0")
        inner = phi_Nk.T @ phi_Nk + lam * np.eye(size)
        return phi_Qk @ np.linalg.solve(inner, phi_Nk.T)
    inner = phi_Nk @ phi_Nk.T + lam * np.eye(num)
    return np.linalg.solve(inner, phi_Nk @ phi_Qk.T).T


def ridge_check(ridge: float, num: int, size: int) -> None:
    """Refuse a ridge with which there is no inverse.

    Args:
        ridge: see `ridge_products`.
        num: records.
        size: features of each.

    Raises:
        GradientError: no ridge with k > N, or a negative one.
    """
    if ridge < 0 or (ridge == 0 and size > num):
        raise GradientError(
            f"ridge: expected a number above 0 with {size} features of {num} records, got {ridge}; "
            "the inverse doesn't exist, and what rounding makes of it ranks at random: take 0.1, or a smaller projection"
        )
