"""<gradient, direction> of every position, summed over all sites with as few passes over memory as the products allow.

    dots_P = sum over sites  ((g_PO V) * a_PI).sum_I          `valuation.capture.Site.token_dots`, one site at a time

Two facts make it cheaper than site by site. Query, key and value read one input, as do the two halves of a gated
feed-forward: ``(g_1 V_1 + g_2 V_2) * a`` needs one product with a, and the sum comes with the second matrix product.
And sites of one width add up before their rows are summed. The matrix products, a third of the layers' own training
work, are what is left.

Same numbers as site by site, to the rounding of a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from valuation.capture import GainSite, LookupSite, MatrixSite, Site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class _Sums:
    """Elementwise products by width, added up before their last axis is summed."""

    def __init__(self) -> None:
        self.by_width: dict[int, Tensor] = {}

    def add(self, fresh: Tensor, other: Tensor) -> None:
        """Add fresh * other; `fresh` is ours to overwrite."""
        width = fresh.shape[-1]
        if width in self.by_width:
            self.by_width[width].addcmul_(fresh, other)
        else:
            self.by_width[width] = fresh.mul_(other)


@torch.no_grad()
def token_dots(sites: Sequence[Site], direction: Mapping[str, Tensor]) -> Tensor:
    """Split <gradient, direction> over the positions of a pass.

    Args:
        sites: `Capture.sites` of one forward and backward pass.
        direction: one tensor per captured parameter, by name, of its shape.

    Returns:
        dots_BT in the scale of the loss that was backpropagated.
    """
    sums, singles = _Sums(), []
    readers: dict[tuple[int, tuple[int, ...]], list[MatrixSite]] = {}
    for site in sites:
        if type(site) is MatrixSite:
            readers.setdefault((site.input.data_ptr(), tuple(site.input.shape)), []).append(site)
        elif type(site) is LookupSite:
            sums.add(functional.embedding(site.input, direction[site.parameter]), site.arrived)
        elif type(site) is GainSite and site.input.dim() == 3:
            singles.append(_gain_dots(site, direction[site.parameter]))
        else:
            singles.append(site.token_dots(direction[site.parameter]))
    for group in readers.values():
        shared = group[0].input
        rows_PI = shared.reshape(-1, shared.shape[-1])
        outputs = sum(direction[site.parameter].shape[0] for site in group)
        if outputs < shared.shape[-1]:  # the result on the output's side is the narrower one
            for site in group:
                sums.add(
                    (rows_PI @ direction[site.parameter].T).view_as(site.arrived), site.arrived
                )
            continue
        total_PI: Tensor | None = None
        for site in group:
            grad_PO, matrix_OI = site.arrived.flatten(0, -2), direction[site.parameter]
            if total_PI is None:
                total_PI = grad_PO @ matrix_OI
            else:
                total_PI.addmm_(grad_PO, matrix_OI)
        assert total_PI is not None
        sums.add(total_PI.view_as(shared), shared)
    parts = [*singles, *(products.sum(-1) for products in sums.by_width.values())]
    return torch.stack(parts).sum(0)


def _gain_dots(site: GainSite, direction_D: Tensor) -> Tensor:
    """sum_d g_d xhat_d V_d with xhat = x / root: the root is one number per position and goes last."""
    x_BTD, eps = site.input, site.module.eps
    assert isinstance(eps, float)
    mean_BT = torch.linalg.vector_norm(x_BTD, dim=-1).square_().div_(x_BTD.shape[-1])
    return ((x_BTD * site.arrived) @ direction_D) * mean_BT.add_(eps).rsqrt_()
