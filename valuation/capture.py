"""What a forward and a backward pass tell about the gradient of every record, parameter by parameter.

A *site* is one use of one parameter. It keeps what went in and the loss's gradient with respect to
what came out, and from these two gives the gradient of any group of positions, without autograd:

    Linear weight [O, I]     a_PI in, g_PO out        G = sum_p g_p a_p^T
    Linear bias [O]          g_PO                     G = sum_p g_p
    Embedding [V, D]         token x_P, g_PD          G = sum_p e_{x_p} g_p^T           (one-hot a)
    RMSNorm gain [D]         x_PD in, g_PD out        G = sum_p g_p * xhat_p
    stacked experts [E,O,I]  a_RI, g_RO, expert e_R   G_e = sum_{r: e_r = e} g_r a_r^T  (r a visit of a token)

A tied matrix has two sites, embedding and head, whose gradients are added up: nothing is lost that
scoring them apart would lose. Grouped-query attention has no parameters but its Linears', and an
adapter (LoRA) is two Linears on a frozen matrix. In a mixture of experts the router and the experts
are no called modules, so their sites are made in the backward pass from the mixture's own input and
output gradient, by its formulas.

A module of another kind that has trainable parameters is refused by name: a silent zero would look
like a record without influence. To support one, freeze it or add its `Site` to `SITES`.

Legend: B rows, T positions of a row, P = B T positions, N records, I inputs, O outputs, D width,
V vocabulary, E experts, K experts per token, R visits of experts, S tokens.

Source: per-record gradients from layer inputs and output gradients: Goodfellow, arXiv 1510.01799.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.experts import Experts, MixtureOfExperts, grouped_product, local_dispatch
from trainer.model import RMSNorm
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import TracebackType

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Groups:
    """The positions of each of N records in a batch, record after record."""

    index_N: NDArray[Any]
    """Corpus index of each record, ascending."""
    count_N: NDArray[Any]
    """Number of its positions."""
    position_P: Tensor
    """Places in a flattened [B, T] array; the first count_N[0] are of record 0, and so on."""
    group_P: Tensor
    """Number of the record that each of them is of."""
    whole: bool = False
    """Whether position_P is all positions in order, so that nothing need be picked."""


@dataclass(slots=True)
class Site(ABC):
    """One use of one parameter in one forward pass."""

    parameter: str
    """Name of the parameter as `model.named_parameters` gives it; a tied one has one name."""
    module: nn.Module
    """What used it."""
    input: Tensor
    """What went in: a_BTI, token ids_BT, or x_BTD."""
    grad: Tensor | None = None
    """Gradient of the loss with respect to what came out; None until the backward pass."""

    @abstractmethod
    def token_dots(self, direction: Tensor) -> Tensor:
        """This use's share of <gradient, direction>, split over positions: dots_BT."""

    @abstractmethod
    def gradients(self, groups: Groups) -> Tensor:
        """This use's share of every record's gradient: [N, ...] of the parameter's shape."""

    @property
    def arrived(self) -> Tensor:
        """The output gradient.

        Raises:
            GradientError: no backward pass came by.
        """
        if self.grad is None:
            raise GradientError(
                f"{self.parameter}: expected a backward pass before dot products, got none; call backward() first",
            )
        return self.grad


class MatrixSite(Site):
    """The weight of a Linear: G = sum_p g_p a_p^T."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """Share of <gradient, direction>: dots_BT."""
        # Both orders cost the same products; the one whose result is narrower needs less memory.
        if direction.shape[1] <= direction.shape[0]:
            return ((self.arrived @ direction) * self.input).sum(-1)
        return ((self.input @ direction.T) * self.arrived).sum(-1)

    def gradients(self, groups: Groups) -> Tensor:
        """[N, O, I], one product per record."""
        a_PI, g_PO = self.rows(groups)
        return outer_sums(g_PO, a_PI, groups.count_N)

    def rows(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """(a_PI, g_PO) in the order of the groups."""
        return _picked(self.input, groups), _picked(self.arrived, groups)


class BiasSite(Site):
    """The bias of a Linear: G = sum_p g_p."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """Share of <gradient, direction>: dots_BT."""
        return self.arrived @ direction

    def gradients(self, groups: Groups) -> Tensor:
        """[N, O]."""
        return _sums(_picked(self.arrived, groups), groups)


class GainSite(Site):
    """The gain of an RMSNorm: G = sum_p g_p * xhat_p; over several heads [B, H, T, E], the sum over these too."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """Share of <gradient, direction>: dots_BT."""
        return self._values() @ direction

    def gradients(self, groups: Groups) -> Tensor:
        """[N, D]."""
        return _sums(_picked(self._values(), groups), groups)

    def _values(self) -> Tensor:
        x, eps = self.input, self.module.eps
        assert isinstance(eps, float)
        xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        values = self.arrived * xhat
        return values.sum(1) if values.dim() == 4 else values  # heads stand before positions


class LookupSite(Site):
    """An Embedding: G = sum_p e_{x_p} g_p^T."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """Share of <gradient, direction>: dots_BT."""
        return (self.arrived * functional.embedding(self.input, direction)).sum(-1)

    def gradients(self, groups: Groups) -> Tensor:
        """[N, V, D]."""
        assert isinstance(self.module, nn.Embedding)
        token_P, g_PD = self.rows(groups)
        num, V = len(groups.count_N), self.module.num_embeddings
        grads = g_PD.new_zeros(num * V, g_PD.shape[1])
        return grads.index_add_(0, groups.group_P * V + token_P, g_PD).view(num, V, -1)

    def rows(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """(token_P, g_PD) in the order of the groups."""
        return self.input.flatten()[groups.position_P], _picked(self.arrived, groups)


@dataclass(slots=True)
class ExpertsSite(Site):
    """One stack of matrices: visit r of expert e_r at position p_r adds g_r a_r^T to G_e; rows are sorted by expert."""

    expert_R: Tensor | None = None
    """Expert of each visit, ascending."""
    position_R: Tensor | None = None
    """Place of its token in a flattened [B, T] array."""
    batch: tuple[int, int] = (0, 0)
    """(B, T)."""

    def token_dots(self, direction: Tensor) -> Tensor:
        """Share of <gradient, direction>: dots_BT."""
        assert self.expert_R is not None
        assert self.position_R is not None
        load_E = torch.bincount(self.expert_R, minlength=len(direction))
        dots_R = (grouped_product(self.input, direction, load_E) * self.arrived).sum(-1)
        dots_P = dots_R.new_zeros(self.batch[0] * self.batch[1])
        return dots_P.index_add_(0, self.position_R, dots_R).view(self.batch)

    def gradients(self, groups: Groups) -> Tensor:
        """[N, E, O, I], one product per record and expert that it visits."""
        assert isinstance(self.module, Experts)
        assert self.expert_R is not None
        num, E, group_R = len(groups.count_N), len(self.module.w1), self.groups_of_rows(groups)
        key_R = group_R * E + self.expert_R
        order_R = key_R.argsort(stable=True)
        order_R = order_R[group_R[order_R] >= 0]  # padding is of no record
        count_X = torch.bincount(key_R[order_R], minlength=num * E).cpu().numpy()
        sums = outer_sums(self.arrived[order_R], self.input[order_R], count_X)
        return sums.view(num, E, *sums.shape[1:])

    def groups_of_rows(self, groups: Groups) -> Tensor:
        """Number of the record that each visit is of, -1 for padding: int64 [R]."""
        assert self.position_R is not None
        group_P = self.position_R.new_full((self.batch[0] * self.batch[1],), -1)
        group_P[groups.position_P] = groups.group_P
        return group_P[self.position_R]


SITES: dict[type[nn.Module], dict[str, type[Site]]] = {
    nn.Linear: {"weight": MatrixSite, "bias": BiasSite},
    nn.Embedding: {"weight": LookupSite},
    RMSNorm: {"weight": GainSite},
}
"""Formula of each parameter of each kind of module."""


def outer_sums(g_PO: Tensor, a_PI: Tensor, count_N: NDArray[Any]) -> Tensor:
    """sum_p g_p a_p^T over consecutive groups of count_N positions: [N, O, I]."""
    num, longest = len(count_N), int(count_N.max(initial=0))
    shape = (num, g_PO.shape[-1], a_PI.shape[-1])
    if num * longest == len(g_PO):  # all of one length: one call
        return torch.bmm(
            g_PO.view(num, longest, -1).transpose(1, 2), a_PI.view(num, longest, -1)
        ).view(shape)
    out = g_PO.new_empty(shape)
    start = 0
    for n, count in enumerate(count_N.tolist()):
        torch.mm(g_PO[start : start + count].T, a_PI[start : start + count], out=out[n])
        start += count
    return out


def _picked(values: Tensor, groups: Groups) -> Tensor:
    """Rows of [B, T, X] in the order of the groups."""
    rows_PX = values.reshape(-1, values.shape[-1])
    return rows_PX if groups.whole else rows_PX.index_select(0, groups.position_P)


def _sums(values_PX: Tensor, groups: Groups) -> Tensor:
    out = values_PX.new_zeros(len(groups.count_N), values_PX.shape[-1])
    return out.index_add_(0, groups.group_P, values_PX)


class Capture:
    """Keeps the inputs and output gradients of every parameter during a forward and backward pass.

    Use as a context manager around forward and backward; `token_dots` and `gradients` work inside and
    after it, also once the optimiser has changed the weights. Where only the records' gradients are
    wanted, differentiate with respect to `outputs` instead of the parameters: autograd then leaves out
    the products that make weight gradients, a third of a backward pass.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        """Prepare a capture.

        Args:
            model: every trainable parameter must have a formula (module docstring).
            names: parameters to keep; None = all trainable ones.

        Raises:
            GradientError: a parameter without formula, or a name that isn't trainable.
        """
        self.sites: list[Site] = []
        self.outputs: list[Tensor] = []
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if unknown := sorted(set(names or ()) - set(trainable)):
            raise GradientError(
                f"names: expected trainable parameters, got {unknown[0]!r}; known are {sorted(trainable)[:3]}, ..."
            )
        wanted = {id(p): name for name, p in trainable.items() if names is None or name in names}
        self.shapes = {name: tuple(trainable[name].shape) for name in wanted.values()}
        self._uses: dict[nn.Module, list[tuple[str, type[Site]]]] = {}
        self._mixtures: dict[MixtureOfExperts, dict[str, str]] = {}
        inside: set[nn.Module] = set()
        for path, module in model.named_modules():
            if isinstance(module, MixtureOfExperts):
                inside |= {module.router, module.experts}
                own = {
                    key: wanted[id(p)]
                    for key, p in module.named_parameters()
                    if id(p) in wanted and not key.startswith("shared.")
                }
                if own:
                    self._mixtures[module] = own
            if module not in inside:
                self._register(path, module, wanted)
        self._handles: list[Any] = []

    def _register(self, path: str, module: nn.Module, wanted: Mapping[int, str]) -> None:
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in wanted:
                continue
            kind = _formula(module, own)
            if kind is None:
                raise GradientError(
                    f"{path}.{own}: expected a parameter of a Linear, Embedding, RMSNorm or mixture of experts, got "
                    f"{type(module).__name__}; freeze it with requires_grad_(False), leave it out by `names`, or add "
                    "its formula, a Site, to valuation.capture.SITES",
                )
            self._uses.setdefault(module, []).append((wanted[id(parameter)], kind))

    def __enter__(self) -> Self:
        """Forget earlier passes and start listening."""
        self.sites, self.outputs = [], []
        self._handles = [m.register_forward_hook(self._on_forward) for m in self._uses]
        self._handles += [m.register_forward_hook(self._on_mixture) for m in self._mixtures]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening; what was captured stays, the graph does not."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.outputs = [], []

    def _on_forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # a pass without gradients, such as an evaluation
            return
        sites = [kind(name, module, inputs[0].detach()) for name, kind in self._uses[module]]

        def keep(grad: Tensor) -> None:
            for site in sites:
                site.grad = grad.detach()

        output.register_hook(keep)
        self.outputs.append(output)
        self.sites += sites

    def _on_mixture(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        assert isinstance(module, MixtureOfExperts)
        if module.dispatch is not local_dispatch:
            raise GradientError(
                "mixture of experts: expected all experts in this process, got a layout that spreads them; "
                "load the checkpoint into an undivided model"
            )
        names, x_BTD = self._mixtures[module], inputs[0].detach()

        def keep(grad: Tensor) -> None:  # now, since the weights may change before anyone asks
            self.sites += mixture_sites(module, x_BTD, grad.detach(), names)

        output.register_hook(keep)
        self.outputs.append(output)

    def token_dots(self, direction: Mapping[str, Tensor]) -> Tensor:
        """<gradient, direction> split over positions; the sum over a record's positions is the record's.

        Args:
            direction: one tensor per captured parameter, by name, of its shape.

        Returns:
            dots_BT in the model's floating type, in the scale of the loss that was backpropagated.

        Raises:
            GradientError: a parameter without direction or of another shape, or no captured pass.
        """
        check_direction(self.shapes, direction)
        self._demand_sites()
        with torch.no_grad():
            parts = [site.token_dots(direction[site.parameter]) for site in self.sites]
            return torch.stack(parts).sum(0)

    def sites_of(self, name: str) -> list[Site]:
        """The uses of one parameter, in the order of the pass."""
        return [site for site in self.sites if site.parameter == name]

    @torch.no_grad()
    def gradients(self, name: str, groups: Groups) -> Tensor:
        """The gradient of every record's loss with respect to one parameter.

        Args:
            name: a captured parameter.
            groups: positions of the records.

        Returns:
            grads [N, *shape]; zero where no use of the parameter took part.

        Raises:
            GradientError: no captured pass, or one without a backward pass.
        """
        self._demand_sites()
        parts = [site.gradients(groups) for site in self.sites_of(name)]
        if not parts:
            return self.sites[0].arrived.new_zeros(len(groups.count_N), *self.shapes[name])
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def _demand_sites(self) -> None:
        if not self.sites:
            raise GradientError(
                "expected a captured forward pass, got none; run the model inside `with capture:`"
            )


def _formula(module: nn.Module, own: str) -> type[Site] | None:
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
        # max_norm rewrites rows in the forward pass; scaling by frequency is not the gradient of any loss.
        return None
    for kind, formulas in SITES.items():
        if isinstance(module, kind):
            return formulas.get(own)
    return None


@torch.no_grad()
def mixture_sites(
    module: MixtureOfExperts, x_BTD: Tensor, grad_BTD: Tensor, names: Mapping[str, str]
) -> list[Site]:
    """Sites of router and experts, from the mixture's input and output gradient by its own formulas.

    Args:
        module: the mixture, with the weights of the forward pass.
        x_BTD: its input.
        grad_BTD: gradient with respect to its output.
        names: own name ("router.weight", "experts.w1", ...) -> name in the model, of those wanted.

    Returns:
        One site per name, in the trainer's notation: y = sum_k weight_k W2 (silu(W1 x) * W3 x).
    """
    x_SD, grad_SD = x_BTD.flatten(0, -2), grad_BTD.flatten(0, -2)
    chosen_SK, weights_SK = module.route(x_SD)
    visits_R = chosen_SK.flatten()
    order_R = visits_R.argsort(stable=True)
    token_R, expert_R = order_R // module.num_chosen, visits_R[order_R]
    load_E = torch.bincount(visits_R, minlength=module.balance.shape[0])
    experts: Experts = module.experts
    rows_RD = x_SD[token_R]
    gate_RF = grouped_product(rows_RD, experts.w1, load_E)
    up_RF = grouped_product(rows_RD, experts.w3, load_E)
    inner_RF = functional.silu(gate_RF) * up_RF
    out_RD = grouped_product(inner_RF, experts.w2, load_E)
    share_R1 = weights_SK.flatten()[order_R].to(x_SD.dtype)[:, None]
    g_out_RD = share_R1 * grad_SD[token_R]
    g_inner_RF = grouped_product(g_out_RD, experts.w2.transpose(1, 2).contiguous(), load_E)
    half_RF = gate_RF.sigmoid()
    g_gate_RF = g_inner_RF * up_RF * half_RF * (1 + gate_RF * (1 - half_RF))  # silu'
    g_up_RF = g_inner_RF * functional.silu(gate_RF)

    g_weight_R = (out_RD * grad_SD[token_R]).sum(-1)
    g_weights_SK = torch.empty_like(weights_SK)
    g_weights_SK.view(-1)[order_R] = g_weight_R.to(weights_SK.dtype)
    # weight = s / sum(s) over the chosen, s = sigmoid(z): first the quotient's derivative, then the sigmoid's.
    exact = weights_SK.dtype
    scores_SE = functional.linear(x_SD.to(exact), module.router.weight.to(exact)).sigmoid()
    picked_SK = scores_SE.gather(1, chosen_SK)
    mean_S1 = (g_weights_SK * weights_SK).sum(-1, keepdim=True)
    g_picked_SK = (g_weights_SK - mean_S1) / picked_SK.sum(-1, keepdim=True)
    g_logits_SE = torch.zeros_like(scores_SE).scatter_(
        1, chosen_SK, g_picked_SK * picked_SK * (1 - picked_SK)
    )

    size = (x_BTD.shape[0], x_BTD.shape[1])
    found: dict[str, Site] = {
        "router.weight": MatrixSite(
            "", module.router, x_BTD, g_logits_SE.to(x_BTD.dtype).view(*size, -1)
        )
    }
    for key, a_RI, g_RO in (
        ("w1", rows_RD, g_gate_RF), ("w3", rows_RD, g_up_RF), ("w2", inner_RF, g_out_RD),
    ):  # fmt: skip
        found[f"experts.{key}"] = ExpertsSite("", experts, a_RI, g_RO, expert_R, token_R, size)
    for key, name in names.items():
        found[key].parameter = name
    return [found[key] for key in names]


def check_direction(shapes: Mapping[str, tuple[int, ...]], direction: Mapping[str, Tensor]) -> None:
    """Refuse a direction that is not exactly one tensor per parameter.

    Raises:
        GradientError: missing or unknown names, or a wrong shape.
    """
    if shapes.keys() != direction.keys():
        odd = sorted(shapes.keys() ^ direction.keys())
        raise GradientError(
            f"direction: expected one tensor per trainable parameter, got a mismatch at {odd[:3]}; "
            "take it from aggregate_gradient of the same model",
        )
    for name, shape in shapes.items():
        if tuple(direction[name].shape) != shape:
            raise GradientError(
                f"direction {name}: expected shape {shape}, got {tuple(direction[name].shape)}",
            )
