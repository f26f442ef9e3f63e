"""Three exact ways to the inner products of gradients, and the rule that takes the cheapest.

For L left and R right records of T positions each, and one matrix with O outputs and I inputs:

    ghost         <G_l, G_r> = sum_{t,s} (a_lt . a_rs) (g_lt . g_rs)        L R T^2 (I + O)
    materialise   G_l, G_r formed, then one product of [L, O I] and [O I, R]   (L + R) T I O + L R I O
    vector        <V, G_r> = sum_t g_rt^T V a_rt, one V at a time              L R T I O   (V is there already)

in multiplications. An embedding's V is looked up, not multiplied, so that its vector route costs
L R T O, but it is bound by memory: the factor `GATHER` says how many multiplications a gathered
number costs. Ghost never holds an O x I matrix per record, which is all it is good for: texts much
shorter than the layers are wide. A peer's rule, ghost if 2 T^2 <= O I, takes it where it is ten
times slower; the products say so before anything is measured.

Ghost over a tied matrix has cross terms, embedding of one record with head of another:
``<E_l, H_r> = sum_{t,s} (g^E_lt . a_rs) g^H_rs[x_lt]``; with them it is exact.

Source: GhostSuite's and dattri-llm's rules, notes in README; counts are arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from valuation.capture import Capture, Groups, LookupSite, MatrixSite, Site
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Mapping

Route = Literal["ghost", "materialise", "vector"]
GATHER = 16
"""Multiplications in the time of one gathered and multiplied number, one CPU thread, float32."""


def route_costs(
    *, left: int, right: int, tokens: int, inputs: int, outputs: int, lookup: bool = False
) -> dict[Route, int]:
    """Multiplications of each route.

    Args:
        left: records (or directions) on the left.
        right: records on the right.
        tokens: positions of a record.
        inputs: I, or the vocabulary of an embedding.
        outputs: O, or the width of an embedding.
        lookup: whether the inputs are one-hot.

    Returns:
        Route -> multiplications; `vector` presumes that the left side is formed already.
    """
    size = inputs * outputs
    if lookup:
        return {
            "ghost": left * right * tokens**2 * outputs,
            "materialise": right * size + left * right * size,
            "vector": GATHER * left * right * tokens * outputs,
        }
    return {
        "ghost": left * right * tokens**2 * (inputs + outputs),
        "materialise": (left + right) * tokens * size + left * right * size,
        "vector": left * right * tokens * size,
    }


def choose_route(
    *,
    left: int,
    right: int,
    tokens: int,
    inputs: int,
    outputs: int,
    lookup: bool = False,
    formed: bool = False,
) -> Route:
    """The cheapest route by `route_costs`.

    Args:
        left: records (or directions) on the left.
        right: records on the right.
        tokens: positions of a record.
        inputs: I, or the vocabulary of an embedding.
        outputs: O, or the width of an embedding.
        lookup: whether the inputs are one-hot.
        formed: whether the left side is matrices already (an aggregated or preconditioned gradient): ghost is out then,
            and forming the left side costs nothing.

    Returns:
        The route; on a tie the one that needs less memory.
    """
    costs = route_costs(
        left=left, right=right, tokens=tokens, inputs=inputs, outputs=outputs, lookup=lookup
    )
    if formed:
        del costs["ghost"]
        if not lookup:
            costs["materialise"] -= left * tokens * inputs * outputs
    else:
        del costs["vector"]
    order: tuple[Route, ...] = ("vector", "ghost", "materialise")
    return min((route for route in order if route in costs), key=lambda route: costs[route])


def formed_dots(capture: Capture, groups: Groups, left: Mapping[str, Tensor]) -> Tensor:
    """<left_q, G_n> for every formed left side and every record of a captured pass.

    Args:
        capture: after its backward pass.
        groups: positions of the records.
        left: parameter -> [Q, *shape].

    Returns:
        dots_QN, float64: products in the model's type, sums over parameters in float64.
    """
    num, device = len(groups.count_N), groups.position_P.device
    dots_QN = torch.zeros(len(next(iter(left.values()))), num, dtype=torch.float64, device=device)
    longest = int(groups.count_N.max(initial=0))
    for name, left_QX in left.items():
        sites, shape = capture.sites_of(name), capture.shapes[name]
        alone = sites[0] if len(sites) == 1 else None
        if isinstance(alone, MatrixSite | LookupSite):
            lookup = isinstance(alone, LookupSite)
            inputs, outputs = shape if lookup else (shape[1], shape[0])
            route = choose_route(
                left=len(left_QX), right=num, tokens=longest, inputs=inputs, outputs=outputs,
                lookup=lookup, formed=True,
            )  # fmt: skip
            if route == "vector":
                for q, direction in enumerate(left_QX):
                    values_P = alone.token_dots(direction).reshape(-1)[groups.position_P]
                    dots_QN[q].index_add_(0, groups.group_P, values_P.double())
                continue
        grads_NX = capture.gradients(name, groups)
        dots_QN += left_QX.flatten(1) @ grads_NX.flatten(1).T
    return dots_QN


def ghost_dots(left: Site, left_groups: Groups, right: Site, right_groups: Groups) -> Tensor:
    """<G_l, G_r> of two uses of one matrix, without forming either.

    Args:
        left: a Linear's or Embedding's use of the matrix.
        left_groups: positions of the records on the left.
        right: another use of the same matrix, or the same kind of use in another batch.
        right_groups: positions of the records on the right.

    Returns:
        dots_LR, float64.

    Raises:
        GradientError: a use of another kind, which has no ghost form here.
    """
    if isinstance(left, MatrixSite) and isinstance(right, LookupSite):
        return ghost_dots(right, right_groups, left, left_groups).T
    if not isinstance(left, MatrixSite | LookupSite) or not isinstance(
        right, MatrixSite | LookupSite
    ):
        raise GradientError(
            f"ghost: expected uses of a Linear or Embedding, got {type(left).__name__} and {type(right).__name__}; "
            "materialise them"
        )
    (x, g_P), (y, h_S) = left.rows(left_groups), right.rows(right_groups)
    if isinstance(left, MatrixSite):
        products_PS = (x @ y.T).mul_(g_P @ h_S.T)
    elif isinstance(right, LookupSite):
        products_PS = (g_P @ h_S.T).mul_(x[:, None] == y[None, :])
    else:  # embedding and head of one matrix [V, D]
        products_PS = (g_P @ y.T).mul_(h_S.T[x])
    shape = (len(left_groups.count_N), products_PS.shape[1])
    rows_LS = products_PS.new_zeros(shape, dtype=torch.float64)
    rows_LS.index_add_(0, left_groups.group_P, products_PS.double())
    dots_LR = rows_LS.new_zeros(len(left_groups.count_N), len(right_groups.count_N))
    return dots_LR.index_add_(1, right_groups.group_P, rows_LS)
