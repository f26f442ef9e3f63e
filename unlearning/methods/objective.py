"""Any method of `METHODS` as an objective of the trainer's loop.

    L = w_f · Σ_i f_i / n_forget  +  w_r · retain / n_retain

`f` is the method's own; the retain term is NLL unless the method asks for the original's distribution (`retain_kl`) or hidden
states (`retain_hidden`). Both are sums over the *global* count of their term, so that the gradient does not depend on the layout.
What a loss needs of the original is computed once, before training, and only what it needs: at the pushed positions log-probabilities,
logits or states, at the retained ones states (`reference`). Then the original is let go: no step has a second model in memory.

Layouts: all. Under pp the last stage computes losses of logits, and the stage that has a layer those of its states (`trainer.states`).

The run ends after `steps`, or by a rule that needs no gold model (`stopping`).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import IGNORE
from trainer.likelihood import cross_entropy_sum
from unlearning.errors import PlanError
from unlearning.methods import METHODS
from unlearning.methods.adapters import AdapterOptimizer, demand_possible
from unlearning.methods.batches import ForgetBatch, ForgetBatches
from unlearning.methods.coreset import core_records
from unlearning.methods.divergence import Distribution, divergence_sum
from unlearning.methods.forget_retain import (
    ForgetConfig,
    Forgotten,
    forgotten_records,
    inputs_of,
    reference_logprobs,
)
from unlearning.methods.reference import Reference
from unlearning.methods.settings import Settings, lora_of, settings_of
from unlearning.methods.stopping import Floor, floor_of
from unlearning.methods.view import View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.data import BatchPlan
    from trainer.mesh import Mesh
    from trainer.spec import RunSpec
    from unlearning.probes import Tokenizer

IDK = " unknown; I don't know."


class MethodObjective(ForgetBatches):
    """A trainer `Objective` whose forget term is one of `METHODS`."""

    def __init__(  # noqa: PLR0913 - each keyword is one choice of a run, with a default
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
        steps: range = range(0),
        folder: Path | None = None,
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
            steps: those whose batches will be asked for, where the retain term compares with the original.
            folder: where the original's states lie while the run lasts, see `Reference`.

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
        chosen = {layer % (original.spec.num_layers + 1) for layer in settings.layers}
        self._layers = tuple(sorted(chosen))
        self._cache = (
            self._cached(original) if self._needs & {"reference_logits", "reference_hidden"} else []
        )
        states = [part[1] for part in self._cache]
        self._anchor = torch.cat(states, 1).mean(1) if states else None
        keeps = bool(self._needs & {"retain_kl", "retain_hidden"})
        self._original = original if keeps else None
        self._head_vD: Tensor | None = None
        self._steps, self._folder = steps, folder
        self._floor = floor
        self._dual = torch.ones((), dtype=torch.float64)
        self._nll = torch.zeros((), dtype=torch.float64)
        self._given: ForgetBatch | None = None

    @property
    def dual(self) -> float:
        """PDU's λ."""
        return self._dual.item()

    def divide(self, mesh: Mesh) -> None:
        """Learn the processes, and compute what this one needs of the original."""
        super().divide(mesh)
        self._dual, self._nll = self._dual.to(mesh.device), self._nll.to(mesh.device)
        if self._floor is not None:
            self._floor.to(mesh.device)
        self._ask()

    def _ask(self) -> None:
        """Ask the original about this process's retained rows, once, and let go of it."""
        if self._original is None:
            return
        original, self._original = self._original, None
        mesh = self._spread.mesh
        layers: tuple[int, ...] | None = self._layers
        if mesh.layout.pp > 1:
            from trainer.pipeline import layers_here, stages_of

            place, last = mesh.coordinate("pp"), original.spec.num_layers
            here = layers_here(mesh.layout, place, last)
            layers = tuple(layer for layer in self._layers if layer in here)
            asks = mesh.layout.stages - 1 in stages_of(mesh.layout, place)
            if not (asks if "retain_kl" in self._needs else layers):
                return
        if "retain_kl" in self._needs:
            layers = None
            parts = original.head.weight.detach().chunk(mesh.layout.tp)
            self._head_vD = parts[mesh.coordinate("tp")].clone().to(mesh.device)
        self._reference = Reference(
            self._retained.plan, self._steps, mesh.batch_place, original.to(mesh.device), layers, self._folder
        )  # fmt: skip

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
        self._ask()  # where nothing is divided
        return super().batch(step, rank, world)

    def loss(self, model: nn.Module, batch: ForgetBatch, totals_K: Tensor) -> Tensor:
        """Local share of both terms."""
        columns = batch.tokens_BT, batch.positions_BT, batch.documents_BT
        parts = [self._spread.own(column) for column in columns]
        if not self.inner_layers():
            return self._share(model(*parts), {}, batch, totals_K)
        logits_BTV, hidden = model(*parts, return_hidden=True)
        states = {layer: hidden[layer] for layer in self._layers}
        return self._share(logits_BTV, states, batch, totals_K)

    def pipelined(self, batch: ForgetBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ForgetBatches.pipelined`; the batch is kept until its losses are asked for."""
        self._given = batch
        return super().pipelined(batch)

    def inner_layers(self) -> tuple[int, ...]:
        """Layers whose states this method moves and holds, 0 after the embedding."""
        return self._layers if self._needs & {"hidden", "retain_hidden"} else ()

    def loss_of_logits(self, logits_BTV: Tensor, target: Tensor, totals_K: Tensor) -> Tensor:
        """Share of both terms of one microbatch of the batch given to `pipelined`; of hidden states, of none: see `loss_of_hidden`."""
        piece = self._piece_of(target)
        if not self.inner_layers():
            return self._share(logits_BTV, {}, piece, totals_K)
        if self._floor is not None and self._pushes(piece) and self._spread.speaks:
            self._floor.note(self._view(logits_BTV, {}, piece))
        return logits_BTV[:0].sum()  # 0, of which a backward pass can start

    def loss_of_hidden(
        self, layer: int, hidden_BTD: Tensor, target: Tensor, totals_K: Tensor
    ) -> Tensor:
        """A layer's share of both terms of one microbatch of the batch given to `pipelined`."""
        return self._share(None, {layer: hidden_BTD}, self._piece_of(target), totals_K)

    def _piece_of(self, target: Tensor) -> ForgetBatch:
        """The microbatch whose columns a stage was given."""
        assert self._given is not None, "a loss of a stage comes after pipelined"
        tokens, labels, positions, documents, record, place = target.unbind(-1)
        return dataclasses.replace(
            self._given, tokens_BT=tokens, labels_BT=labels, positions_BT=positions, documents_BT=documents,
            record_BT=record, place_BT=place,
        )  # fmt: skip

    @staticmethod
    def _pushes(piece: ForgetBatch) -> bool:
        """Whether there is a record: a process, or a microbatch, may have none of a step's. All processes of a row know which it has."""
        return bool((piece.record_BT >= 0).any())

    def _share(
        self, logits_BTV: Tensor | None, states: Mapping[int, Tensor], piece: ForgetBatch, totals_K: Tensor
    ) -> Tensor:  # fmt: skip
        """Share of both terms, of rows whose logits, or states of some layers, are there."""
        forget: Tensor | float = 0.0
        if self._pushes(piece):
            view = self._view(logits_BTV, states, piece)
            forget = self._spread.said_once(self._loss(view, self._settings).sum())
            if self._floor is not None and logits_BTV is not None and self._spread.speaks:
                self._floor.note(view)
        retain = self._retain(logits_BTV, states, piece) / totals_K[0]
        weight: float | Tensor = self._weight
        if "dual" in self._needs:
            self._nll += retain.detach()
            weight = weight * self._dual.to(retain.dtype)
        return weight * retain + self._settings.forget_weight * forget / totals_K[1]

    def _view(
        self, logits_BTV: Tensor | None, states: Mapping[int, Tensor], piece: ForgetBatch
    ) -> View:
        """Pushed positions of the records of a piece, whole on every process of its rows."""
        num, pushed_BT = len(piece.chosen), piece.record_BT >= 0
        like = next(iter(states.values())) if logits_BTV is None else logits_BTV
        logits_SV = like.new_zeros((int(pushed_BT.sum()), 0))
        if logits_BTV is not None:
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
        hidden, here = None, [self._layers.index(layer) for layer in states]
        if states:
            hidden = self._spread.hidden(list(states.values()), pushed_BT)[:, secret_S]
        return View(
            logits_SV[secret_S], truth_S[secret_S], record_S, len(chosen),
            reference_N=self._reference_N[chosen].to(logits_SV),
            reference_SV=self._of_cache(chosen, 0, order, "reference_logits"), hidden_LSD=hidden,
            reference_LSD=self._of_cache(chosen, 1, order, "reference_hidden", here), preferred_N=preferred,
            anchor_LD=None if self._anchor is None else self._anchor[here], num_layers=len(self._layers),
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

    def _of_cache(
        self, chosen: list[int], part: int, order: Tensor, need: str, layers: Sequence[int] = ()
    ) -> Tensor | None:
        if need not in self._needs:
            return None
        dim = part  # logits are [S, V], hidden states [L, S, D]
        found = torch.cat([self._cache[index][part] for index in chosen], dim)
        found = found.index_select(dim, order.to(found.device))
        return found[list(layers)] if part else found

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

    def _retain(
        self, logits_BTV: Tensor | None, states: Mapping[int, Tensor], piece: ForgetBatch
    ) -> Tensor:
        """Sum over retained labels of NLL, of KL to the original, or of distances to its states."""
        kept = piece.num_retained_rows
        labels_BT, place_BT = piece.labels_BT[:kept], piece.place_BT[:kept]
        if "retain_hidden" in self._needs:
            assert self._reference is not None
            assert self._reference.layers is not None
            mask_BT = self._spread.own(labels_BT, hidden=True) != IGNORE
            theirs_PLD = self._reference.at(self._spread.own(place_BT, hidden=True)[mask_BT])
            distances = [
                (state[:kept][mask_BT] - theirs_PLD[:, self._reference.layers.index(layer)]).square().mean(-1).sum()
                for layer, state in states.items()
            ]  # fmt: skip
            return self._spread.added(torch.stack(distances).sum())
        assert logits_BTV is not None, "only losses of hidden states are without logits"
        own_BT = self._spread.own(labels_BT)
        if "retain_kl" not in self._needs:
            return cross_entropy_sum(logits_BTV[:kept], own_BT, self._spread.group)
        assert self._reference is not None
        assert self._head_vD is not None
        theirs_PD = self._reference.at(self._spread.own(place_BT).flatten())[:, 0]
        theirs = Distribution(theirs_PD, self._head_vD)
        counted_P = (own_BT != IGNORE).flatten()
        return divergence_sum(
            logits_BTV[:kept].flatten(0, -2), theirs, counted_P, self._spread.group
        )


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
    from trainer.loop import fit

    lora = lora_of(config.lora)
    if lora.rank:
        demand_possible(run)
    objective = _objective_of(run, directory, config, settings)
    if not lora.rank:
        return fit(run, directory, objective=objective)

    def adapted(model: nn.Module) -> AdapterOptimizer:
        return AdapterOptimizer(model, lora, run.config.optim, run.seed)

    return fit(run, directory, objective=objective, optimizer_of=adapted)


def _objective_of(
    run: RunSpec, directory: Path, config: ForgetConfig, settings: Settings
) -> MethodObjective:
    """The objective of a run; nothing else keeps the original, so that it goes once the objective has asked it."""
    from trainer.inputs import initial_model

    plan, forgotten, tokenizer = inputs_of(run, directory, config)
    original = initial_model(run, directory).eval()
    if config.core_set < 1:
        forgotten = core_records(original, forgotten, config.core_set, config.core_choice, run.seed)
    length, preferred = run.config.batch.length, []
    if config.method == "dpo":
        preferred = idk_answers(forgotten, tokenizer, length)
    elif config.method == "altpo":
        if config.core_set < 1:
            raise PlanError("altpo has one alternate per record: expected core_set = 1")
        preferred = _alternates(config, directory, tokenizer, length)
    return MethodObjective(
        plan, forgotten, original, config.method, settings, preferred=preferred, forget_records=config.forget_records,
        floor=floor_of(config, directory, original, tokenizer, length, len(forgotten)),
        steps=steps_left(run, directory), folder=directory,
    )  # fmt: skip


def steps_left(run: RunSpec, directory: Path) -> range:
    """The steps that a run has still to take: those after its newest checkpoint, whose batches `MethodObjective` will be asked for.

    Args:
        run: specification.
        directory: the run's folder.
    """
    from trainer.checkpoint import complete_steps

    return range(max((step for step, _ in complete_steps(directory)), default=0), run.steps)


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
