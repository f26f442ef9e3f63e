"""A method's loss over processes that hold parts of positions, vocabulary and depth.

    sp    a process has T/s positions of its rows          tp    V/t logits of every position, T/t hidden states
    pp    logits exist in the last stage only              ep    nothing: experts are no part of the loss

Most losses are no sums over positions: NPO bends the *sum* of a record's log-probabilities, RMU compares whole vectors, UNDIAL
needs a softmax over all tokens. So the few pushed positions (six digits of 32 records, say) are put together on every process of
a row, and each computes the same loss from the same numbers:

    forward    whole = sum over processes of (own part at its place, zeros elsewhere)            bytes: S·V, S pushed positions
    backward   the own part of the gradient, unchanged: all processes have the same one, so nothing is sent

The loss itself is then said once: by the first process of sp (`said_once`), while tp's all say it, as the trainer expects of them.
The retain term is a sum over positions and stays where they are; with a cut vocabulary its log-normaliser is exchanged.

Legend: S pushed positions, V vocabulary, v the part of it that is here, L layers, D width.

Source: the trainer's conventions, `trainer.tensor`, `trainer.sequence`, `trainer.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch.nn import functional

from trainer.data import IGNORE, PADDING
from trainer.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

ROWS = (0, IGNORE, 0, PADDING, -1, -1)
"""What fills up tokens, labels, positions, documents, record numbers and places in the reference."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Where this process stands; the default is one process with everything."""

    mesh: Mesh = field(default_factory=Mesh)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that share a vocabulary, or None."""
        return self.mesh.group("tp") if self.mesh.layout.tp > 1 else None

    @property
    def pieces(self) -> int:
        """Microbatches of a pipeline, each with whole records; 1 without one."""
        return self.mesh.layout.microbatches if self.mesh.layout.pp > 1 else 1

    @property
    def speaks(self) -> bool:
        """Whether this process says what all of its sp and tp know."""
        return self.mesh.coordinate("sp") == 0 and self.mesh.coordinate("tp") == 0

    def padded(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Whole rows, filled up so that the parts of their positions are equal."""
        missing = -rows[0].shape[1] % (self.mesh.layout.sp * self.mesh.layout.tp)
        if not missing:
            return rows
        return tuple(
            functional.pad(row, (0, missing), value=fill)
            for row, fill in zip(rows, ROWS, strict=False)
        )

    def own(self, x_BT: Tensor, *, hidden: bool = False) -> Tensor:
        """This process's positions of whole rows.

        Args:
            x_BT: any tensor over whole rows.
            hidden: those whose residual stream is here, which tp cuts too.
        """
        layout = self.mesh.layout
        if layout.sp > 1:
            x_BT = x_BT.chunk(layout.sp, 1)[self.mesh.coordinate("sp")]
        if hidden and layout.tp > 1:
            x_BT = x_BT.chunk(layout.tp, 1)[self.mesh.coordinate("tp")]
        return x_BT

    def logits(self, logits_Bv: Tensor, pushed_BT: Tensor) -> Tensor:
        """Logits [S, V] at the pushed positions of whole rows, the same on every process.

        Args:
            logits_Bv: this process's part, [B, T/sp, V/tp].
            pushed_BT: which positions of whole rows.
        """
        here_BT = self.own(pushed_BT)
        found = logits_Bv[here_BT]
        if self.mesh.layout.sp * self.mesh.layout.tp == 1:
            return found
        width = found.shape[-1]
        first = self.mesh.coordinate("tp") * width
        key = self.own(_order(pushed_BT))[here_BT], slice(first, first + width)
        return self._whole(found, key, (int(pushed_BT.sum()), width * self.mesh.layout.tp))

    def hidden(self, hidden_LBD: list[Tensor], pushed_BT: Tensor) -> Tensor:
        """Hidden states [L, S, D] at the pushed positions of whole rows, the same on every process."""
        here_BT = self.own(pushed_BT, hidden=True)
        found = torch.stack([state[here_BT] for state in hidden_LBD])
        if self.mesh.layout.sp * self.mesh.layout.tp == 1:
            return found
        key = slice(None), self.own(_order(pushed_BT), hidden=True)[here_BT]
        return self._whole(found, key, (len(hidden_LBD), int(pushed_BT.sum()), found.shape[-1]))

    def _whole(self, part: Tensor, key: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        groups = [self.mesh.group(axis) for axis in ("sp", "tp")]
        return cast("Tensor", _Whole.apply(part, key, shape, groups))

    def said_once(self, loss: Tensor) -> Tensor:
        """A loss that all processes of sp have computed alike: 0 on all but the first, with its gradient on each."""
        return loss if self.mesh.coordinate("sp") == 0 else loss - loss.detach()

    def added(self, part: Tensor) -> Tensor:
        """A sum whose summands lie on the processes of tp, the same on each; every process keeps its summand's gradient."""
        return part if self.group is None else cast("Tensor", _Added.apply(part, self.group))


def _order(pushed_BT: Tensor) -> Tensor:
    """The place of each pushed position among all of them."""
    return (pushed_BT.flatten().cumsum(0) - 1).view_as(pushed_BT)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, key: tuple[Any, ...], shape: tuple[int, ...], groups: list[Any]
    ) -> Tensor:
        ctx.key = key
        # Parts don't overlap, so a sum with zeros changes no bit, in float32 even of bfloat16 numbers.
        exact = torch.promote_types(part.dtype, torch.float32)
        whole = torch.zeros(shape, dtype=exact, device=part.device)
        whole[key] = part.to(exact)
        for group in groups:
            dist.all_reduce(whole, group=group)
        return whole.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.key], None, None, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:  # noqa: ARG004 - torch's signature
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return grads[0], None
