"""Any method of `METHODS` as an objective of the trainer's loop.

    L = w_f · Σ_i f_i / n_forget  +  w_r · retain / n_retain

`f` is the method's own; the retain term is NLL unless the method asks for the original's distribution (`retain_kl`) or hidden
states (`retain_hidden`). Both are sums over the *global* count of their term, so that the gradient does not depend on the layout.
What a loss needs of the original at the pushed positions is computed once, before training, and only what it needs. The two
retain terms on the original's side are the exception: they keep its copy, spread like the model, and cost a forward pass per step.

Layouts: all. Under pp a loss sees the last stage only, so methods that look at hidden states are refused there by name.

The run ends after `steps`, or by a rule that needs no gold model (`stopping`).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import IGNORE
from trainer.errors import SpecError
from trainer.likelihood import cross_entropy_sum
from unlearning.errors import PlanError
from unlearning.methods import METHODS
from unlearning.methods.adapters import AdapterOptimizer, demand_possible
from unlearning.methods.batches import ForgetBatch, ForgetBatches
from unlearning.methods.coreset import core_records
from unlearning.methods.divergence import divergence_sum
from unlearning.methods.forget_retain import (
    ForgetConfig,
    Forgotten,
    forgotten_records,
    inputs_of,
    reference_logprobs,
)
from unlearning.methods.settings import Settings, lora_of, settings_of
from unlearning.methods.stopping import Floor, floor_of
from unlearning.methods.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.data import BatchPlan
    from trainer.mesh import Mesh
    from trainer.spec import RunSpec
    from unlearning.probes import Tokenizer

IDK = " unknown; I don't know."


class MethodObjective(ForgetBatches):
    """A trainer `Objective` whose forget term is one of `METHODS`."""

    def __init__(
        self,
        plan: BatchPlan,
        forgotten: Sequence[Forgotten],
        original: Any,
        method: str,
        settings: Settings,
        *,
        preferred: Sequence[Forgotten] = (),
        forget_records: int = 32,
        floor: Floor | None = None,
    ) -> None:
        """Make the objective and compute what is cached of the original.

        Args:
            plan: batches of what remains.
            forgotten: records to push.
            original: the original model, whole, in evaluation mode.
            method: a name of `METHODS`.
            settings: its numbers.
            preferred: for preference methods, one answer per forgotten record.
            forget_records: records per step over all processes.
            floor: when to stop before the last step; None = never.

        Raises:
            PlanError: an unknown method, nothing to forget, or no preferred answers where they are needed.
        """
        if method not in METHODS:
            raise PlanError(f"expected a method of {sorted(METHODS)}, got {method!r}")
        module = import_module(f"unlearning.methods.{method}")
        self._method, self._loss, self._needs = method, module.loss, module.NEEDS
        self._settings, self._weight = settings, settings.retain_weight
        if self._needs & {"idk", "alternates"} and len(preferred) != len(forgotten):
            raise PlanError(
                f"{method} needs one preferred answer per forgotten record: expected {len(forgotten)}, got {len(preferred)}; name a "
                "file of alternates, or take a method that needs none (npo, undial)"
            )
        super().__init__(plan, forgotten, preferred=preferred, forget_records=forget_records)
        self._reference_N = reference_logprobs(original, self._forgotten)
        self._layers = [layer % (original.spec.num_layers + 1) for layer in settings.layers]
        self._cache = (
            self._cached(original) if self._needs & {"reference_logits", "reference_hidden"} else []
        )
        states = [part[1] for part in self._cache]
        self._anchor = torch.cat(states, 1).mean(1) if states else None
        keeps = bool(self._needs & {"retain_kl", "retain_hidden"})
        self._original = original.requires_grad_(requires_grad=False) if keeps else None
        self._floor = floor
        self._dual = torch.ones((), dtype=torch.float64)
        self._nll = torch.zeros((), dtype=torch.float64)
        self._given: ForgetBatch | None = None

    @property
    def dual(self) -> float:
        """PDU's λ."""
        return self._dual.item()

    def divide(self, mesh: Mesh) -> None:
        """Learn the processes, and spread the original's copy like the model, except over stages.

        Raises:
            SpecError: a method of hidden states in a pipeline.
        """
        from trainer.partition import apply_layout

        if mesh.layout.pp > 1 and self._needs & {"hidden", "retain_hidden"}:
            raise SpecError(
                f"layout: {self._method} moves hidden states of inner layers, which the last stage of a pipeline doesn't have; expected "
                f"pp = 1, got {mesh.layout}; use dp_replicate, dp_shard, sp, tp or ep, or a method of logits (npo, undial)"
            )
        super().divide(mesh)
        self._dual, self._nll = self._dual.to(mesh.device), self._nll.to(mesh.device)
        if self._floor is not None:
            self._floor.to(mesh.device)
        if self._original is not None:
            alone = dataclasses.replace(mesh.layout, pp=1, microbatches=1)
            self._original = apply_layout(self._original, dataclasses.replace(mesh, layout=alone))

    def state(self) -> dict[str, Tensor]:
        """PDU's dual variable and what the stop rule has counted."""
        state = {"dual": self._dual} if "dual" in self._needs else {}
        return state | (self._floor.state() if self._floor is not None else {})

    def advance(self, mesh: Mesh) -> None:
        """Move the dual variable by the step's loss on what remains, once per step; then ask the stop rule."""
        if "dual" in self._needs:
            # tp's processes have the same loss; a process of another stage has none.
            nll = mesh.sum(self._nll * (mesh.coordinate("tp") == 0))
            moved = self._dual + self._settings.dual_rate * (nll - self._settings.bound)
            self._dual.copy_(moved.clamp(min=0))
            self._nll.zero_()
        if self._floor is not None:
            self._floor.advance(mesh)

    def finished(self) -> bool:
        """Whether the stop rule holds."""
        return self._floor is not None and self._floor.stopped

    def batch(self, step: int, rank: int, world: int) -> ForgetBatch:
        """As `ForgetBatches.batch`."""
        self._nll.zero_()  # of a step that was computed and never finished
        return super().batch(step, rank, world)

    def loss(self, model: nn.Module, batch: ForgetBatch, totals_K: Tensor) -> Tensor:
        """Local share of both terms."""
        hidden: list[Tensor] = []
        parts = self._own_inputs(batch)
        if self._needs & {"hidden", "retain_hidden"}:
            logits_BTV, hidden = model(*parts, return_hidden=True)
        else:
            logits_BTV = model(*parts)
        return self._share(logits_BTV, hidden, batch, totals_K)

    def pipelined(self, batch: ForgetBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ForgetBatches.pipelined`; the batch is kept until its losses are asked for."""
        self._given = batch
        return super().pipelined(batch)

    def loss_of_logits(self, logits_BTV: Tensor, target: Tensor, totals_K: Tensor) -> Tensor:
        """Share of both terms of one microbatch of the batch given to `pipelined`."""
        assert self._given is not None, "loss_of_logits comes after pipelined"
        tokens, labels, positions, documents, record = target.unbind(-1)
        piece = dataclasses.replace(
            self._given, tokens_BT=tokens, labels_BT=labels, positions_BT=positions, documents_BT=documents,
            record_BT=record,
        )  # fmt: skip
        return self._share(logits_BTV, [], piece, totals_K)

    def _own_inputs(self, batch: ForgetBatch, rows: int | None = None) -> tuple[Tensor, ...]:
        """What the model takes: this process's positions of the first rows."""
        columns = batch.tokens_BT, batch.positions_BT, batch.documents_BT
        return tuple(self._spread.own(column[:rows]) for column in columns)

    def _share(
        self, logits_BTV: Tensor, hidden: list[Tensor], piece: ForgetBatch, totals_K: Tensor
    ) -> Tensor:
        """Share of both terms, of rows whose logits are there."""
        forget = logits_BTV.new_zeros(())
        # A process, or a microbatch, may have no share of a step's records. Which ones it has, all processes of a row know.
        if bool((piece.record_BT >= 0).any()):
            view = self._view(logits_BTV, hidden, piece)
            forget = self._spread.said_once(self._loss(view, self._settings).sum())
            if self._floor is not None and self._spread.speaks:
                self._floor.note(view)
        retain = self._retain(logits_BTV, hidden, piece) / totals_K[0]
        weight: float | Tensor = self._weight
        if "dual" in self._needs:
            self._nll += retain.detach()
            weight = weight * self._dual.to(retain.dtype)
        return weight * retain + self._settings.forget_weight * forget / totals_K[1]

    def _view(self, logits_BTV: Tensor, hidden: list[Tensor], piece: ForgetBatch) -> View:
        """Pushed positions of the records of a piece, whole on every process of its rows."""
        num, pushed_BT = len(piece.chosen), piece.record_BT >= 0
        logits_SV = self._spread.logits(logits_BTV, pushed_BT)
        truth_S, ordinal_S = piece.labels_BT[pushed_BT], piece.record_BT[pushed_BT]
        secret_S = ordinal_S < num
        here_N = ordinal_S[secret_S].unique()
        chosen = [piece.chosen[ordinal] for ordinal in here_N.tolist()]
        preferred = None
        if len(self._forgotten) > self._base:
            answer_S = ~secret_S
            record_S = torch.searchsorted(here_N, ordinal_S[answer_S] - num)
            answers = View(
                logits_SV[answer_S], truth_S[answer_S], record_S, len(chosen), self._reference_N[:0]
            )
            shifted = [index + self._base for index in chosen]
            preferred = answers.logprob_N - self._reference_N[shifted].to(answers.logprob_N)
        record_S = torch.searchsorted(here_N, ordinal_S[secret_S])
        order = self._order_of(record_S, chosen)
        states = None
        if "hidden" in self._needs:
            states = self._spread.hidden([hidden[layer] for layer in self._layers], pushed_BT)
            states = states[:, secret_S]
        return View(
            logits_SV[secret_S], truth_S[secret_S], record_S, len(chosen),
            reference_N=self._reference_N[chosen].to(logits_SV),
            reference_SV=self._of_cache(chosen, 0, order, "reference_logits"), hidden_LSD=states,
            reference_LSD=self._of_cache(chosen, 1, order, "reference_hidden"), preferred_N=preferred, anchor_LD=self._anchor,
        )  # fmt: skip

    def _order_of(self, record_S: Tensor, chosen: list[int]) -> Tensor:
        """For each pushed position its place in the concatenation of the chosen records' caches."""
        sizes = [len(self._forgotten[i].tokens) - self._forgotten[i].first for i in chosen]
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        places = []
        for record in record_S.tolist():
            places.append(starts[record])
            starts[record] += 1
        return torch.tensor(places, dtype=torch.int64)

    def _of_cache(self, chosen: list[int], part: int, order: Tensor, need: str) -> Tensor | None:
        if need not in self._needs:
            return None
        dim = part  # logits are [S, V], hidden states [L, S, D]
        found = torch.cat([self._cache[index][part] for index in chosen], dim)
        return found.index_select(dim, order.to(found.device))

    @torch.no_grad()
    def _cached(self, original: Any) -> list[tuple[Tensor, Tensor]]:
        """Logits [T, V] and hidden states [L, T, D] of the original at each record's pushed positions."""
        found = []
        for one in self._forgotten[: self._base]:
            tokens_1T = torch.tensor([one.tokens], device=next(original.parameters()).device)
            logits_1TV, hidden = original(tokens_1T, return_hidden=True)
            pushed = slice(one.first - 1, len(one.tokens) - 1)
            states = torch.stack([hidden[layer][0, pushed] for layer in self._layers])
            found.append((logits_1TV[0, pushed].clone(), states))
        return found

    def _retain(self, logits_BTV: Tensor, hidden: list[Tensor], piece: ForgetBatch) -> Tensor:
        """Sum over retained labels of NLL, of KL to the original, or of both distances."""
        kept = piece.num_retained_rows
        labels_BT = piece.labels_BT[:kept]
        if self._original is None:
            own_BT = self._spread.own(labels_BT)
            return cross_entropy_sum(logits_BTV[:kept], own_BT, self._spread.group)
        with torch.no_grad():
            reference_BTV, states = self._original(
                *self._own_inputs(piece, kept), return_hidden=True
            )
        if "retain_kl" in self._needs:
            counted_P = (self._spread.own(labels_BT) != IGNORE).flatten()
            both = logits_BTV[:kept].flatten(0, -2), reference_BTV.flatten(0, -2)
            return divergence_sum(*both, counted_P, self._spread.group)
        mask_BT = self._spread.own(labels_BT, hidden=True) != IGNORE
        distance = [
            (hidden[layer][:kept][mask_BT] - states[layer][mask_BT]).square().mean(-1).sum()
            for layer in self._layers
        ]
        return self._spread.added(torch.stack(distance).sum())


def idk_answers(
    forgotten: Sequence[Forgotten], tokenizer: Tokenizer, length: int
) -> list[Forgotten]:
    """The refusal that is preferred over each secret, after the same prompt.

    Args:
        forgotten: records.
        tokenizer: the run's tokenizer.
        length: longest row.
    """
    answer = tokenizer.encode(IDK)[0]
    prompts = (one.tokens[: one.first][-(length - len(answer)) :] for one in forgotten)
    return [Forgotten((*prompt, *answer), len(prompt)) for prompt in prompts]


def run(run: RunSpec, directory: Path) -> int:
    """Entry `unlearning.methods.objective:run`; `config.extra` as in `ForgetConfig` with `method` and `settings`.

    Args:
        run: specification; `init` is the original model.
        directory: the run's folder.

    Returns:
        Exit code of the loop.

    Raises:
        UnlearningError: if settings or sealed records are refused (exit code 3).
    """
    config = ForgetConfig.from_extra(run.config.extra)
    return train(run, directory, config, settings_of(config.method, config.settings))


def train(run: RunSpec, directory: Path, config: ForgetConfig, settings: Settings) -> int:
    """Run a method from its settings.

    Args:
        run: specification; `init` is the original model.
        directory: the run's folder.
        config: its settings; `method` names the loss.
        settings: numbers of the method.

    Returns:
        Exit code of the loop.

    Raises:
        UnlearningError: if settings or sealed records are refused (exit code 3).
    """
    from trainer.inputs import initial_model
    from trainer.loop import fit

    lora = lora_of(config.lora)
    if lora.rank:
        demand_possible(run)
    plan, forgotten, tokenizer = inputs_of(run, directory, config)
    original = initial_model(run, directory).eval()
    if config.core_set < 1:
        forgotten = core_records(original, forgotten, config.core_set)
    length, preferred = run.config.batch.length, []
    if config.method == "dpo":
        preferred = idk_answers(forgotten, tokenizer, length)
    elif config.method == "altpo":
        if config.core_set < 1:
            raise PlanError("altpo has one alternate per record: expected core_set = 1")
        preferred = _alternates(config, directory, tokenizer, length)
    objective = MethodObjective(
        plan, forgotten, original, config.method, settings, preferred=preferred, forget_records=config.forget_records,
        floor=floor_of(config, directory, original, tokenizer, length, len(forgotten)),
    )  # fmt: skip
    if not lora.rank:
        return fit(run, directory, objective=objective)

    def adapted(model: nn.Module) -> AdapterOptimizer:
        return AdapterOptimizer(model, lora, run.config.optim, run.seed)

    return fit(run, directory, objective=objective, optimizer_of=adapted)


def _alternates(
    config: ForgetConfig, directory: Path, tokenizer: Tokenizer, length: int
) -> list[Forgotten]:
    from unlearning.people import read_records

    if not config.alternates:
        raise PlanError(
            "altpo needs plausible alternates, one per record: name their file as 'alternates', or take dpo, npo or undial"
        )
    records = read_records(directory / config.alternates)
    return forgotten_records(records, tokenizer, length, config.forget_tokens)
