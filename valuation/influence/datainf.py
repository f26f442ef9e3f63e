"""DataInf: the inverse of a mean replaced by the mean of inverses, which have a closed form.

    (F_l + lam_l I)^-1  ~  (1/N) sum_i (G_i G_i^T + lam_l I)^-1          G_i as a vector of layer l
    score(q, n) = sum_l (1/lam_l) [ <g_q, G_n> - (1/N) sum_i <g_q, G_i> <G_i, G_n> / (lam_l + |G_i|^2) ]

The swap errs by the spread of the gradients and was made for low-rank adapters, whose layers are small.
Two passes over the records, whatever their number: the first makes ``r_q = g_q - (1/N) sum_i c_qi G_i``, the
second ``<r_q, G_n>``.

Source: arXiv 2310.00902, eq. 5; lam_l = damping * mean_n |G_n|^2 / size of the layer, its section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from valuation.errors import GradientError
from valuation.influence.pairing import PASS, preconditioned, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from valuation.influence.pairing import Left, Pass
    from valuation.influence.scores import Scores, TokenSet


def scores(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    *,
    damping: float = 0.1,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """DataInf influence of every record on every query.

    Args:
        model: the trained model.
        train: records.
        queries: queries, each of 2 or more tokens.
        damping: c > 0; lam_l is c times the mean square of a number of layer l's gradients.
        per_token: losses are means over predicted tokens instead of sums.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores, in nats.

    Raises:
        GradientError: damping <= 0, or see `valuation.influence.pairing`.
    """
    solve = solver(model, train, how, damping)
    method = f"datainf(damping={damping:g})"
    return preconditioned(model, train, queries, solve, method, per_token=per_token, how=how)


def solver(
    model: nn.Module, train: TokenSet, how: Pass, damping: float = 0.1
) -> Callable[[Left], Left]:
    """The function that takes query gradients to r_q / lam; arguments as in `scores`."""
    if not damping > 0:
        raise GradientError(f"damping: expected a number above 0, such as 0.1, got {damping}")
    lam = _ridges(model, train, damping, how)
    return lambda left: _solve(model, train, left, lam, how)


def _ridges(model: nn.Module, train: TokenSet, damping: float, how: Pass) -> dict[str, float]:
    """Lam of each parameter."""
    sums: dict[str, torch.Tensor] = {}
    for _, capture, groups in watched(model, train, how):
        for name in capture.shapes:
            square = capture.gradients(name, groups).square().sum(dtype=torch.float64)
            sums[name] = sums.get(name, 0) + square
    found = {}
    named = dict(model.named_parameters())
    for name in sorted(set().union(*how.mesh.gather(set(sums)))):
        total = sums.get(name, torch.zeros((), dtype=torch.float64, device=named[name].device))
        found[name] = (
            damping * float(how.mesh.sum(total)) / len(train.records) / named[name].numel()
        )
    return found


def _solve(model: nn.Module, train: TokenSet, left: Left, lam: dict[str, float], how: Pass) -> Left:
    """r_q / lam, layer by layer."""
    moved = {name: torch.zeros_like(values) for name, values in left.items()}
    for _, capture, groups in watched(model, train, how):
        for name, values in left.items():
            grads_NX = capture.gradients(name, groups).flatten(1)
            share_N = (
                1 / (lam[name] + grads_NX.square().sum(1))
                if lam[name] > 0
                else grads_NX.new_zeros(len(grads_NX))
            )
            share_QN = (values.flatten(1) @ grads_NX.T) * share_N
            moved[name] += (share_QN @ grads_NX).view_as(values)
    out = {}
    for name, values in left.items():
        mean = how.mesh.sum(moved[name]) / len(train.records)
        out[name] = (values - mean) / lam[name] if lam[name] > 0 else torch.zeros_like(values)
    return out
