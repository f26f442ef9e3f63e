"""Any method with only low-rank adapters trained (LoRA): the loss is the method's own, what may move is less.

    W = W0 + s B A        s = alpha / rank,   A [r, I] normal of variance 1/I,   B [O, r] zero,   W0 [O, I] the original's
    ∂L/∂A = s Bᵀ G        ∂L/∂B = s G Aᵀ        G = ∂L/∂W

The chain rule is taken by the optimiser, outside the model: the loss's gradient G arrives at an ordinary W, A and B take a step of
AdamW, and W is made anew from W0, A and B. So the adapters are merged after every step, no method and no layer knows of them, and
every checkpoint is one of an ordinary model, the last one too. Beside its weights stand A, B and their moments (`optim.NAME.lora_a`):
a resumed run takes W0 from its `init` again and goes on with the same bits. Moments exist for A and B only.

On several processes each has A and B of the matrices that are here, whole: it puts G together (`full`), takes the same step as the others
to the bit, and keeps its slice of W0 + s B A. So adapters need no layout of their own, at the price of a gathered gradient, one matrix at a time.

`clip_norm` bounds the norm of G over the adapted matrices, and so does the reported gradient norm: it isn't that of A and B.

Source: Hu et al., arXiv 2106.09685, section 4.1; on all matrices of a block: Dettmers et al., arXiv 2305.14314, section 4.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.errors import SpecError
from trainer.optim import AdamW
from trainer.partition import full
from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.choices import OptimSpec
    from trainer.spec import RunSpec
    from unlearning.methods.settings import Lora


class AdapterOptimizer:
    """A `trainer.optim.Stateful` that moves chosen matrices of a model along low-rank adapters only."""

    def __init__(self, model: nn.Module, lora: Lora, spec: OptimSpec, seed: int) -> None:
        """Freeze everything else, and put an adapter of no effect on each chosen matrix.

        Args:
            model: with the original's weights, spread over processes or not.
            lora: rank >= 1, scale and targets.
            spec: of the optimiser; its decay pulls A and B towards zero, that is W towards the original.
            seed: A is drawn from (seed, name).

        Raises:
            PlanError: a target that the model doesn't have, or a rank above a matrix's smaller side.
        """
        self.matrices = _targets(model, lora)
        model.requires_grad_(requires_grad=False)
        self._scale = lora.alpha / lora.rank
        self._original: dict[str, Tensor] = {}
        adapters: dict[str, nn.Parameter] = {}
        for name, matrix in self.matrices.items():
            matrix.requires_grad_()
            self._original[name] = matrix.detach().clone()
            height, width = matrix.shape
            a_RI = _drawn(seed, name, lora.rank, width).to(matrix.device, matrix.dtype)
            b_OR = torch.zeros(height, lora.rank, device=matrix.device, dtype=matrix.dtype)
            adapters[f"{name}.lora_a"] = nn.Parameter(a_RI)
            adapters[f"{name}.lora_b"] = nn.Parameter(b_OR)
        self._adamw = AdamW(adapters, spec)
        self.parameters = self._adamw.parameters
        self.lr = spec.lr

    def state(self) -> dict[str, Tensor]:
        """A and B, their moments, and the count of steps; not copies."""
        return self._adamw.state() | {name: p.detach() for name, p in self.parameters.items()}

    def zero_grad(self) -> None:
        """Forget all gradients, of the matrices too."""
        self._adamw.zero_grad()
        for matrix in self.matrices.values():
            matrix.grad = None

    @torch.no_grad()
    def project(self) -> None:
        """Gradients of A and B from those of the matrices; a matrix without one gives none."""
        for name, matrix in self.matrices.items():
            a_RI, b_OR = self.parameters[f"{name}.lora_a"], self.parameters[f"{name}.lora_b"]
            if matrix.grad is None:
                a_RI.grad = b_OR.grad = None
                continue
            gradient_OI = full(matrix.grad)
            a_RI.grad = self._scale * (b_OR.T @ gradient_OI)
            b_OR.grad = self._scale * (gradient_OI @ a_RI.T)

    @torch.no_grad()
    def step(self) -> None:
        """Move A and B, and merge them."""
        self.project()
        self._adamw.lr = self.lr
        self._adamw.step()
        for name, matrix in self.matrices.items():
            a_RI, b_OR = self.parameters[f"{name}.lora_a"], self.parameters[f"{name}.lora_b"]
            matrix.copy_(self._original[name] + _spread(self._scale * (b_OR @ a_RI), matrix))


def demand_possible(run: RunSpec) -> None:
    """Refuse what adapters can't do, before anything is read.

    Args:
        run: specification of a run with adapters.

    Raises:
        SpecError: a matrix that is cut twice.
        PlanError: experts, whose balance moves by itself, or another optimiser than AdamW.
    """
    if run.layout.tp > 1 and run.layout.fsdp > 1:
        raise SpecError(
            f"layout: low-rank adapters (lora) want matrices that are cut once: expected tp or dp_shard * sp of 1, got {run.layout}; use "
            "dp_replicate or pp beside one of them, or train all weights (lora rank 0)"
        )
    if run.config.model.num_experts:
        raise PlanError(
            "lora: expected a model without experts, whose balance moves outside the adapters, got "
            f"num_experts = {run.config.model.num_experts}; train all weights (lora rank 0)"
        )
    if run.config.optim.name != "adamw":
        raise PlanError(f"lora: expected the optimiser adamw, got {run.config.optim.name!r}")


def _targets(model: nn.Module, lora: Lora) -> dict[str, Tensor]:
    """Name -> matrix of every layer of a block whose last name is a target."""
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and name.split(".")[-2] in lora.targets
    }
    missing = sorted(set(lora.targets) - {name.split(".")[-2] for name in found})
    if missing:
        raise PlanError(f"lora: expected targets that the model has, got {missing}")
    for name, matrix in found.items():
        if lora.rank > min(matrix.shape):
            raise PlanError(
                f"lora: expected a rank of at most {min(matrix.shape)}, the smaller side of {name}, got {lora.rank}"
            )
    return found


def _spread(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has, cut as another one is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _drawn(seed: int, name: str, rank: int, width: int) -> Tensor:
    """A, float32 on the CPU whatever the model's type and device: all start from the same numbers."""
    digest = hashlib.sha256(f"dataworth-lora-1|{seed}|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(rank, width).normal_(0.0, width**-0.5, generator=generator)
