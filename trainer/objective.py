"""What a step minimises, apart from how it is spread over processes.

A loss has K terms; each is a sum over positions divided by the number of positions *in the global batch*:

    loss = sum_k  w_k * S_k / n_k          S_k, n_k over all processes

`counts` says how many positions of each term a process holds, the step adds these up over all processes, and `loss`
returns this process's share w_k * S_k(local) / n_k(global). The shares, and so their gradients, add up to the loss
of one process that holds the whole batch, whatever the layout and however unequal the shares. (Averaging local
means, as plain data parallelism does, weighs a token by how full its process's rows are.)

An objective may also say which records a step uses (`records`), which the loop then commits to in windows.jsonl; divide
its loss over positions, vocabulary and stages (`Divisible`), inner layers among them (`Inner`); and have numbers of its own that a step moves (`Evolving`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer.data import IGNORE, Batch, BatchPlan, distinct_records
from trainer.errors import SpecError
from trainer.likelihood import cross_entropy_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.mesh import Mesh
    from trainer.prefetch import Prefetcher


@runtime_checkable
class Objective(Protocol):
    """What `trainer.loop.fit` minimises. A pure function of the step: resuming depends on it."""

    def batch(self, step: int, rank: int, world: int) -> Any:
        """This process's part of the batch of a step, as `counts` and `loss` want it."""

    def counts(self, batch: Any) -> Tensor:
        """Local number of positions of each of the K terms, float64 [K]."""

    def loss(self, model: nn.Module, batch: Any, totals_K: Tensor) -> Tensor:
        """Local share of the loss: each term's local sum over its global total; a scalar with gradient."""


@runtime_checkable
class Accountable(Protocol):
    """An objective that can say which records a step uses, over all processes."""

    def records(self, step: int) -> Sequence[tuple[int, bytes]]:
        """(index, record_id) of every record in the global batch of a step, by index, each once."""


@runtime_checkable
class Divisible(Protocol):
    """An objective that runs on every layout: it cuts its own positions, and sums over a cut vocabulary."""

    def divide(self, mesh: Mesh) -> None:
        """Learn the processes; called once, before the first batch.

        Raises:
            SpecError: a layout that this loss can't be divided by, with the reason and what to use.
        """

    def pipelined(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What stages need of a batch: tokens, target, positions, documents; microbatches are cut along the first axis."""

    def loss_of_logits(self, logits_BTV: Tensor, target: Tensor, totals_K: Tensor) -> Tensor:
        """`loss` in the last stage, of one microbatch: its logits and its part of the target."""


@runtime_checkable
class Inner(Protocol):
    """A divisible objective that looks at inner layers too, whichever stage of a pipeline has them."""

    def inner_layers(self) -> Sequence[int]:
        """Layers whose residual stream has a loss: 0 after the embedding, k + 1 after block k; empty: none."""

    def loss_of_hidden(
        self, layer: int, hidden_BTD: Tensor, target: Tensor, totals_K: Tensor
    ) -> Tensor:
        """The layer's share of `loss` of one microbatch, beside that of `loss_of_logits`: its residual stream and its part of the target."""


@runtime_checkable
class Evolving(Protocol):
    """An objective with numbers that belong to the state of a run, such as a dual variable."""

    def state(self) -> dict[str, Tensor]:
        """Named tensors, not copies: saved in every checkpoint, and filled in place when a run goes on."""

    def advance(self, mesh: Mesh) -> None:
        """Move them, after each update of the weights; every process calls this."""

    def finished(self) -> bool:
        """Whether the run may end before its last step; a function of `state`."""


def divide(objective: Objective, mesh: Mesh) -> None:
    """Tell an objective its processes.

    Raises:
        SpecError: the layout divides more than rows, and the objective can't.
    """
    layout = mesh.layout
    if isinstance(objective, Divisible):
        objective.divide(mesh)
    elif layout.sp * layout.tp * layout.pp * layout.ep > 1:
        raise SpecError(
            f"layout: expected dp_replicate and dp_shard only for an objective that can't be divided, got {layout}"
        )


class LanguageModelling:
    """Next-token cross entropy in nats: K = 1, n = positions with a label."""

    def __init__(
        self,
        plan: BatchPlan,
        device: str = "cpu",
        mesh: Mesh | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """What to train on, and where.

        Args:
            plan: gives the global batch of a step.
            device: receives this process's part.
            mesh: the processes, whose layout may divide positions and vocabulary as well; None = one.
            prefetcher: of the same plan; None = batches are made when they are asked for.
        """
        self.plan, self.device, self.mesh = plan, device, mesh
        self._source = prefetcher or plan
        self._last: tuple[int, Batch] | None = None

    def divide(self, mesh: Mesh) -> None:
        """Learn the processes."""
        self.device, self.mesh = mesh.device, mesh

    def batch(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows rank*B/world .. (rank+1)*B/world of the global batch: tokens, labels, positions, documents."""
        whole = self.whole(step)
        rows = len(whole.tokens_BT)
        own = whole.rows(rows * rank // world, rows * (rank + 1) // world).tensors(self.device)
        if self.mesh is None or self.mesh.layout.sp * self.mesh.layout.tp == 1:
            return own
        from trainer.sequence import cut_positions

        return cut_positions(own, self.mesh)

    def counts(self, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Number of labels, float64 [1]."""
        return label_count(batch[1])

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor], totals_K: Tensor
    ) -> Tensor:
        """Sum of the local cross entropies over the global number of labels."""
        tokens_BT, labels_BT, positions_BT, documents_BT = batch
        return self.loss_of_logits(
            model(tokens_BT, positions_BT, documents_BT), labels_BT, totals_K
        )

    def pipelined(
        self, batch: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Labels are the target, and all is cut already."""
        return batch

    def loss_of_logits(self, logits_BTV: Tensor, labels_BT: Tensor, totals_K: Tensor) -> Tensor:
        """The same for logits that are there already; with tp, for this process's part of the vocabulary."""
        cut = self.mesh is not None and self.mesh.layout.tp > 1
        group = self.mesh.group("tp") if self.mesh is not None and cut else None
        nll = cross_entropy_sum(logits_BTV, labels_BT, group)
        return nll / totals_K[0].to(nll.dtype)

    def records(self, step: int) -> list[tuple[int, bytes]]:
        """Records of the global batch of a step."""
        return distinct_records(self.whole(step))

    def whole(self, step: int) -> Batch:
        """The global batch of a step."""
        # The loop asks twice per step, for the rows and for the records.
        if self._last is None or self._last[0] != step:
            self._last = (step, self._source.batch(step))
        return self._last[1]


def label_count(labels_BT: Tensor) -> Tensor:
    """Number of positions with a label, as float64 [1]: the unit that `Objective.counts` speaks."""
    return (labels_BT != IGNORE).sum(dtype=torch.float64)[None]
