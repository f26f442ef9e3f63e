"""Pipeline parallelism: the blocks are divided into stages, and microbatches flow through them.

    gpipe         all forward passes, then all backward passes; memory of all microbatches at once
    1f1b          a backward pass as soon as one is possible; memory of as many microbatches as stages
    interleaved   two stages per process, r and r + pp: half the idle time, twice the traffic
    zero-bubble   interleaved, and backward passes of inputs before those of weights, which fill the idle time
    zbv           the two stages of a process are r and 2 pp - 1 - r, so the first process has embedding and head

Idle share of 1f1b with p stages and m microbatches: (p - 1) / (m + p - 1). The passes are scheduled by
torch.distributed.pipelining; this module cuts the model, says what is sent, and gives the loss to everyone.

A stage is a `Transformer` without the blocks of the others; its parameters keep their names. The loss of a microbatch
is its sum over the *global* count of labels, so microbatches are added, never averaged (`scale_grads=False`).

Source: GPipe arXiv 1811.06965; 1F1B and interleaved arXiv 2104.04473; zero bubble arXiv 2401.10241; ZBV arXiv 2405.15362.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from trainer.model import Transformer
from trainer.objective import Inner
from trainer.states import beside, layers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.layout import Layout
    from trainer.mesh import Mesh
    from trainer.objective import Divisible

_SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def stages_of(layout: Layout, place: int) -> list[int]:
    """The stages of the process at a place on the axis pp, first to last."""
    if layout.stages == layout.pp:
        return [place]
    if layout.schedule == "zbv":
        return [place, layout.stages - 1 - place]
    return [place, place + layout.pp]


def blocks_of(stage: int, stages: int, num_layers: int) -> range:
    """The layers of a stage: contiguous, and as many as in any other stage, give or take one."""
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def layers_here(layout: Layout, place: int, num_layers: int) -> list[int]:
    """The layers whose residual stream arises at a place on the axis pp: 0 after the embedding, k + 1 after block k."""
    stages = stages_of(layout, place)
    blocks = [k for stage in stages for k in blocks_of(stage, layout.stages, num_layers)]
    return layers_of(blocks, first=0 in stages)


def cut_stages(model: Transformer, mesh: Mesh) -> list[Transformer]:
    """This process's stages of a model.

    Args:
        model: whole; its blocks are shared, not copied.
        mesh: the processes.

    Returns:
        One Transformer per stage, with embed, norm and head set to None where another stage has them.
    """
    layout, pieces = mesh.layout, []
    for stage in stages_of(layout, mesh.coordinate("pp")):
        with torch.device("meta"):
            piece = Transformer(model.spec)
        names = [str(k) for k in blocks_of(stage, layout.stages, model.spec.num_layers)]
        piece.blocks = nn.ModuleDict({name: model.blocks[name] for name in names})
        piece.embed = model.embed if stage == 0 else None
        last = stage == layout.stages - 1
        piece.norm, piece.head = (model.norm, model.head) if last else (None, None)
        piece.train(model.training)
        pieces.append(piece)
    return pieces


class Pipeline(nn.Module):
    """This process's stages, and the schedule that runs them."""

    def __init__(self, pieces: list[Transformer], mesh: Mesh) -> None:
        """Take stages from `cut_stages`, their further layout applied."""
        super().__init__()
        self.pieces, self.mesh = nn.ModuleList(pieces), mesh
        self._schedule: tuple[tuple[int, ...], Any] | None = None
        self._given: Any = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that they have in the whole model."""
        for piece in self.pieces:
            yield from piece.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the names that they have in the whole model."""
        for piece in self.pieces:
            yield from piece.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Parameters and lasting buffers under the names that they have in the whole model."""
        found: dict[str, Any] = {}
        for piece in self.pieces:
            found |= piece.state_dict(*args, **kwargs)
        return found

    def forward_backward(
        self,
        objective: Divisible,
        batch: Any,
        totals_K: Tensor,
    ) -> Tensor:
        """All forward and backward passes of a step; gradients are added to the parameters.

        Args:
            objective: gives the loss of logits.
            batch: this process's part, the same in all stages.
            totals_K: counts over all processes.

        Returns:
            This process's share of the loss, without gradient: that of its rows in the last stage, and those of its inner layers that
            the objective looks at (`trainer.states`); else 0.
        """
        tokens_BT, target, positions_BT, documents_BT = objective.pipelined(batch)
        stages = stages_of(self.mesh.layout, self.mesh.coordinate("pp"))
        self._given = objective, totals_K
        losses: list[Tensor] = []  # which the schedule fills
        given: dict[str, Any] = {"positions_BT": positions_BT, "documents_BT": documents_BT}
        if self.mesh.layout.stages - 1 in stages:
            given |= {"target": target, "losses": losses}
        schedule = self._schedule_for(tokens_BT)
        layers = objective.inner_layers() if isinstance(objective, Inner) else ()
        pieces = cast("list[Transformer]", list(self.pieces))
        with beside(
            pieces, layers, target, self.mesh.layout.microbatches, self._loss_inside
        ) as shares:
            schedule.step(*((tokens_BT,) if 0 in stages else ()), **given)
        losses += shares
        share = torch.stack(losses).sum() if losses else torch.zeros((), device=tokens_BT.device)
        return share.detach()

    def _loss_of(self, logits_BTV: Tensor, target: Tensor) -> Tensor:
        objective, totals_K = self._given  # of the step under way: the schedule outlives it
        return objective.loss_of_logits(logits_BTV, target, totals_K)

    def _loss_inside(self, layer: int, hidden_BTD: Tensor, target: Tensor) -> Tensor:
        objective, totals_K = self._given
        return objective.loss_of_hidden(layer, hidden_BTD, target, totals_K)

    def _schedule_for(self, tokens_BT: Tensor) -> Any:
        """The schedule for rows of this shape; what is sent between stages has a fixed shape."""
        shape = tuple(tokens_BT.shape)
        if self._schedule is None or self._schedule[0] != shape:
            self._schedule = shape, self._build(tokens_BT)
        return self._schedule[1]

    def _build(self, tokens_BT: Tensor) -> Any:
        layout, parts = self.mesh.layout, []
        rows, length = len(tokens_BT) // layout.microbatches, tokens_BT.shape[1]
        numbers = stages_of(layout, self.mesh.coordinate("pp"))
        for number, module in zip(numbers, self.pieces, strict=True):
            piece = cast("Transformer", module)
            dtype = next(piece.parameters()).dtype

            def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.empty(rows, *shape, dtype=dtype, device="meta", requires_grad=True)

            sent = meta(length // layout.tp, piece.spec.dim)
            kind = self.mesh.device.split(":", maxsplit=1)[0]
            low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
            logits = meta(length, piece.spec.vocab_size // layout.tp, dtype=low)
            first, last = number == 0, number == layout.stages - 1
            parts.append(
                pipelining.PipelineStage(
                    piece,
                    number,
                    layout.stages,
                    torch.device(self.mesh.device),
                    input_args=tokens_BT[:rows].to("meta") if first else sent,
                    output_args=logits if last else sent,
                    group=self.mesh.group("pp"),
                )
            )
        one = len(parts) == 1
        return _SCHEDULES[layout.schedule](
            parts[0] if one else parts,
            layout.microbatches,
            loss_fn=self._loss_of,
            scale_grads=False,
        )
