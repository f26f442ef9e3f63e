"""Mixture of experts in place of a block's feed-forward: many SwiGLU networks, of which a token visits a few.

    s = sigmoid(W_r x)                                             affinity of a token to each of E experts
    S = the k experts of largest s + b                             b balances the load, and only chooses
    g_e = s_e / sum_{j in S} s_j                                   weights of the chosen ones, they add up to 1
    y = shared(x) + sum_{e in S} g_e * W2_e (silu(W1_e x) * W3_e x)

Balance without a loss term: after each update of the weights, b_e += rate * sign(mean load - load_e), where the load
of an expert is the number of tokens of the global batch that chose it. So an idle expert rises until it is chosen, and
no gradient is bent. b takes part in no gradient, but decides what later tokens see: it is a buffer that is part of the
checkpoint. Loads are whole numbers, so their sum over processes doesn't depend on the layout. Padding isn't counted.

No token is dropped and no expert has a capacity. Rows are sorted by expert, and one grouped product serves all experts.
`torch.nn.functional.grouped_mm` takes neither float64 nor widths that aren't multiples of 16 bytes; a loop over the
experts takes these. Both give an idle expert a gradient of zero, so that its slices take part in every collective.

Where the experts of several processes share the work, a layout replaces `MixtureOfExperts.dispatch`, which gets rows
sorted by expert and the number of rows of each, and returns the rows' results in the same order.

Cost per token: k + 1 small feed-forwards of 6 * dim * width FLOP each, and the router's 2 * dim * E.

Legend: B rows, T positions, S = B T tokens, D width, F inner width, E experts, K experts per token, R = S K visits.

Source: sigmoid affinities, normalised weights and shared expert: DeepSeek-V3 arXiv 2412.19437 eq. 12-16; balance:
arXiv 2408.15664 algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from trainer.spec import ModelSpec

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows_RD sorted by expert, int64 number of rows per expert) -> results_RD."""
Dispatch = Callable[[Tensor, Tensor, Compute], Tensor]
"""(rows_RD sorted by expert, rows_per_expert_E, the experts of this process) -> results_RD."""


def local_dispatch(rows_RD: Tensor, load_E: Tensor, experts: Compute) -> Tensor:
    """All experts are in this process."""
    return experts(rows_RD, load_E)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The update of the residual stream, same shape."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """E SwiGLU networks, each matrix stacked as [E, out, in]; a process may hold a slice of the stack."""

    def __init__(self, dim: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, inner))
        for weight in (self.w1, self.w3, self.w2):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, rows_RD: Tensor, load_E: Tensor) -> Tensor:
        """Each row through its expert.

        Args:
            rows_RD: tokens, sorted by expert.
            load_E: int64 number of rows of each expert that this process holds; adds up to R.

        Returns:
            Results [R, D], in the order of the rows.
        """
        inner_RF = functional.silu(grouped_product(rows_RD, self.w1, load_E))
        return grouped_product(
            inner_RF * grouped_product(rows_RD, self.w3, load_E), self.w2, load_E
        )


class MixtureOfExperts(nn.Module):
    """Router, experts and, if it has a width, a shared expert that every token visits."""

    balance: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_chosen = spec.experts_per_token
        self.rate = spec.balance_rate
        self.router = nn.Linear(spec.dim, spec.num_experts, bias=False)
        self.experts = Experts(spec.dim, spec.expert_dim, spec.num_experts)
        self.shared = (
            FeedForward(spec.dim, spec.shared_expert_dim) if spec.shared_expert_dim else None
        )
        self.dispatch: Dispatch = local_dispatch
        self.register_buffer("balance", torch.zeros(spec.num_experts))
        # Of the step under way: not part of any state, since a step begins and ends with zeros.
        self.register_buffer(
            "load", torch.zeros(spec.num_experts, dtype=torch.int64), persistent=False
        )

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> Tensor:
        """The update of the residual stream.

        Args:
            x_BTD: normalised residual stream.
            counted_BT: which positions count as load (not padding); None = all. Every position is computed.

        Returns:
            Sum of the chosen experts and the shared one, [B, T, D].
        """
        x_SD = x_BTD.flatten(0, -2)
        chosen_SK, weights_SK = self.route(x_SD)
        if torch.is_grad_enabled():  # generation and evaluation are no part of a step
            self._count(chosen_SK, counted_BT)
        visits_R = chosen_SK.flatten()
        order_R = visits_R.argsort(stable=True)
        load_E = torch.bincount(visits_R, minlength=self.balance.shape[0])
        # A copy per visit, then a permutation: unlike x[order // K], its backward pass adds in one fixed order.
        copies_RD = x_SD[:, None].expand(-1, self.num_chosen, -1).flatten(0, 1)
        results_RD = self.dispatch(copies_RD.index_select(0, order_R), load_E, self.experts)
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        visited_SKD = results_RD.index_select(0, back_R).unflatten(0, chosen_SK.shape)
        y = (visited_SKD * weights_SK[..., None].to(visited_SKD.dtype)).sum(1).view_as(x_BTD)
        return y if self.shared is None else y + self.shared(x_BTD)

    def route(self, x_SD: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights.

        Args:
            x_SD: tokens.

        Returns:
            chosen_SK int64; weights_SK, which add up to 1 per token, in float32 at least: near ties must not be
            decided by the rounding of bfloat16.
        """
        exact = torch.promote_types(self.router.weight.dtype, torch.float32)
        with torch.autocast(x_SD.device.type, enabled=False):
            scores_SE = functional.linear(x_SD.to(exact), self.router.weight.to(exact)).sigmoid()
        chosen_SK = (scores_SE.detach() + self.balance).topk(self.num_chosen, dim=-1).indices
        weights_SK = scores_SE.gather(1, chosen_SK)
        return chosen_SK, weights_SK / weights_SK.sum(-1, keepdim=True)

    def _count(self, chosen_SK: Tensor, counted_BT: Tensor | None) -> None:
        if counted_BT is not None:
            chosen_SK = chosen_SK[counted_BT.flatten()]
        self.load += torch.bincount(chosen_SK.flatten(), minlength=len(self.load))


def grouped_product(rows_RD: Tensor, weight_EFD: Tensor, load_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert.

    Args:
        rows_RD: rows, sorted by expert.
        weight_EFD: matrices, or this process's slice of them.
        load_E: int64 number of rows of each matrix.

    Returns:
        results_RF.
    """
    weight_EFD = _here(weight_EFD)
    if torch.is_autocast_enabled(rows_RD.device.type):  # grouped_mm isn't on autocast's list
        dtype = torch.get_autocast_dtype(rows_RD.device.type)
        rows_RD, weight_EFD = rows_RD.to(dtype), weight_EFD.to(dtype)
    if _fits(rows_RD, weight_EFD):
        ends_E = load_E.cumsum(0).to(torch.int32)
        return functional.grouped_mm(rows_RD, weight_EFD.transpose(1, 2), offs=ends_E)
    parts = rows_RD.split(load_E.tolist())
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight_EFD, strict=True)])


def reset_loads(model: nn.Module) -> None:
    """Forget the loads counted so far; a step calls this first."""
    for module in _mixtures(model):
        module.load.zero_()


@torch.no_grad()
def balance_loads(model: nn.Module, add_up: Callable[[Tensor], Tensor]) -> None:
    """Move every expert's bias against its load, after an update of the weights, and forget the loads.

    Args:
        model: the model, or a pipeline stage of it.
        add_up: adds a tensor up, in place, over the processes that hold other tokens for the same blocks.

    Source: arXiv 2408.15664 algorithm 1.
    """
    mixtures = _mixtures(model)
    if not mixtures:
        return
    load_LE = add_up(torch.stack([module.load for module in mixtures]))
    for module, load_E in zip(mixtures, load_LE, strict=True):
        # sign(mean - load) in whole numbers, E times both sides.
        direction_E = torch.sign(load_E.sum() - load_E * len(load_E))
        module.balance.add_(direction_E.to(module.balance.dtype), alpha=module.rate)
        module.load.zero_()


def _mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def _here(weight: Tensor) -> Tensor:
    """This process's slice of a distributed weight, with its gradient; another as it is."""
    to_local = cast("Callable[[], Tensor] | None", getattr(weight, "to_local", None))
    return weight if to_local is None else to_local()


def _fits(rows_RD: Tensor, weight_EFD: Tensor) -> bool:
    """Whether grouped_mm takes these: its kernels want rows of whole 16 bytes, and off the CPU bfloat16 only."""
    known = (
        rows_RD.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if rows_RD.device.type == "cpu"
        else rows_RD.dtype == torch.bfloat16
    )
    widths = weight_EFD.shape[1:]
    return known and all(width * rows_RD.element_size() % 16 == 0 for width in widths)
