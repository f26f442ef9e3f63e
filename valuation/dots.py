"""<gradient, direction> of every position, summed over all sites with as few passes over memory as the products allow.

    dots_P = sum over sites  ((g_PO V) * a_PI) 1_I            `valuation.capture.Site.token_dots`, one site at a time

Two facts make it cheaper than site by site. Query, key and value read one input, as do the two halves of a gated
feed-forward: ``(g_1 V_1 + g_2 V_2) * a`` needs one product with a, and the sum comes with the second matrix product.
And the sum of a row is a product with a vector of ones, which adds to the sums of the sites before it in the same
pass. The matrix products, a third of the layers' own training work, are what is left.

In float32 on a CPU large ones are oneDNN's, which PyTorch's compiler uses for the same purpose: a tenth to a fifth
faster at these shapes than what `@` calls.

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


_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether this build of PyTorch has oneDNN's product of dense matrices."""
_LARGE = 2**25
"""Multiplications from which it pays for the 0.2 ms that its call costs more."""


class _Sums:
    """Sums of elementwise products over their last axis, all sites together."""

    def __init__(self, like: Tensor) -> None:
        self.dots_P = like.new_zeros(like[..., 0].numel())
        self._ones: dict[int, Tensor] = {}

    def add(self, fresh_PX: Tensor, other_PX: Tensor) -> None:
        """Add (fresh * other) 1; `fresh` is ours to overwrite."""
        width = fresh_PX.shape[-1]
        if width not in self._ones:
            self._ones[width] = fresh_PX.new_ones(width)
        self.dots_P.addmv_(fresh_PX.mul_(other_PX), self._ones[width])


@torch.no_grad()
def token_dots(sites: Sequence[Site], direction: Mapping[str, Tensor]) -> Tensor:
    """Split <gradient, direction> over the positions of a pass.

    Args:
        sites: `Capture.sites` of one forward and backward pass.
        direction: one tensor per captured parameter, by name, of its shape.

    Returns:
        dots_BT in the scale of the loss that was backpropagated.
    """
    like = next((s.arrived for s in sites if isinstance(s, LookupSite | MatrixSite)), None)
    if like is None:  # gains alone, say: nothing to share
        return torch.stack([site.token_dots(direction[site.parameter]) for site in sites]).sum(0)
    sums = _Sums(like)
    readers: dict[tuple[int, tuple[int, ...]], list[MatrixSite]] = {}
    rest: list[Site] = []
    for site in sites:
        if type(site) is MatrixSite:
            readers.setdefault((site.input.data_ptr(), tuple(site.input.shape)), []).append(site)
        else:
            rest.append(site)
    for site in rest:
        value = direction[site.parameter]
        if type(site) is LookupSite:
            sums.add(functional.embedding(site.input.flatten(), value), site.arrived.flatten(0, -2))
        elif type(site) is GainSite and site.input.dim() == 3:
            sums.dots_P += _gain_dots(site, value)
        else:
            sums.dots_P += site.token_dots(value).flatten()
    for group in readers.values():
        _add_matrices(sums, group, direction)
    return sums.dots_P.view(like.shape[:2])


def _add_matrices(sums: _Sums, group: list[MatrixSite], direction: Mapping[str, Tensor]) -> None:
    """Add the uses of all matrices that read one input."""
    rows_PI = group[0].input.reshape(-1, group[0].input.shape[-1])
    if sum(direction[site.parameter].shape[0] for site in group) < rows_PI.shape[1]:
        for site in group:  # the result on the output's side is the narrower one
            fresh_PO = _product(rows_PI, direction[site.parameter])
            sums.add(fresh_PO, site.arrived.flatten(0, -2))
        return
    total_PI: Tensor | None = None
    for site in group:
        total_PI = _product(site.arrived.flatten(0, -2), direction[site.parameter].T, total_PI)
    assert total_PI is not None
    sums.add(total_PI, rows_PI)


def _product(rows_PK: Tensor, matrix_NK: Tensor, so_far_PN: Tensor | None = None) -> Tensor:
    """Rows times matrix^T (+ so_far, which may be overwritten): [P, N]."""
    large = len(rows_PK) * matrix_NK.numel() >= _LARGE
    if _ONEDNN and large and rows_PK.dtype is torch.float32 and rows_PK.device.type == "cpu":
        linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - an operator's name, as the compiler calls it
        if so_far_PN is None:
            return linear(rows_PK, matrix_NK, None, "none", [], "")
        return linear.binary(rows_PK, so_far_PN, matrix_NK, None, "add")
    if so_far_PN is None:
        return rows_PK @ matrix_NK.T
    return so_far_PN.addmm_(rows_PK, matrix_NK.T)


def _gain_dots(site: GainSite, direction_D: Tensor) -> Tensor:
    """sum_d g_d xhat_d V_d with xhat = x / root: the root is one number per position and goes last."""
    x_PD, eps = site.input.flatten(0, -2), site.module.eps
    assert isinstance(eps, float)
    mean_P = torch.linalg.vector_norm(x_PD, dim=-1).square_().div_(x_PD.shape[-1])
    return ((x_PD * site.arrived.flatten(0, -2)) @ direction_D) * mean_P.add_(eps).rsqrt_()
