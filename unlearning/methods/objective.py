"""Any method of `METHODS` as an objective of the trainer's loop.

    L = w_f · Σ_i f_i / n_forget  +  w_r · retain / n_retain

`f` is the method's own; the retain term is NLL unless the method asks for the original's distribution (`retain_kl`) or hidden
states (`retain_hidden`). What a loss needs of the original at the pushed positions is computed once, before training, and only
what it needs. The two retain terms on the original's side are the exception: they keep its copy and cost a forward pass per step.

The run stops after `steps`: a rule that looks at the gold model would need the retraining it wants to save.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.nn import functional

from trainer.data import IGNORE
from trainer.likelihood import cross_entropy_sum
from unlearning.errors import PlanError
from unlearning.methods import METHODS
from unlearning.methods.forget_retain import (
    ForgetBatch,
    ForgetConfig,
    ForgetRetain,
    Forgotten,
    forgotten_records,
    inputs_of,
    reference_logprobs,
)
from unlearning.methods.settings import Settings, settings_of
from unlearning.methods.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.data import BatchPlan
    from trainer.spec import RunSpec
    from unlearning.probes import Tokenizer

IDK = " unknown; I don't know."


class MethodObjective(ForgetRetain):
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
    ) -> None:
        """Make the objective and compute what is cached of the original.

        Args:
            plan: batches of what remains.
            forgotten: records to push.
            original: the original model, in evaluation mode.
            method: a name of `METHODS`.
            settings: its numbers.
            preferred: for preference methods, one answer per forgotten record.
            forget_records: records per step over all processes.

        Raises:
            PlanError: an unknown method, nothing to forget, or no preferred answers where they are needed.
        """
        if method not in METHODS:
            raise PlanError(f"expected a method of {sorted(METHODS)}, got {method!r}")
        module = import_module(f"unlearning.methods.{method}")
        self._loss, self._needs, self._settings = module.loss, module.NEEDS, settings
        if self._needs & {"idk", "alternates"} and len(preferred) != len(forgotten):
            raise PlanError(
                f"{method} needs one preferred answer per forgotten record: expected {len(forgotten)}, got {len(preferred)}; name a "
                "file of alternates, or take a method that needs none (npo, undial)"
            )
        whole = [*forgotten, *preferred]
        super().__init__(
            plan, forgotten, reference_logprobs(original, whole), lambda *_: _[0],
            retain_weight=settings.retain_weight, forget_records=forget_records,
        )  # fmt: skip
        self._forgotten, self._base = whole, len(forgotten)
        self._layers = [layer % (original.spec.num_layers + 1) for layer in settings.layers]
        self._cache = (
            self._cached(original) if self._needs & {"reference_logits", "reference_hidden"} else []
        )
        states = [part[1] for part in self._cache]
        self._anchor = torch.cat(states, 1).mean(1) if states else None
        keeps = bool(self._needs & {"retain_kl", "retain_hidden"})
        self._original = original.requires_grad_(requires_grad=False) if keeps else None
        self.dual = 1.0

    def batch(self, step: int, rank: int, world: int) -> ForgetBatch:
        """As `ForgetRetain.batch`; preferred answers follow their records."""
        batch = super().batch(step, rank, world)
        if len(self._forgotten) == self._base or not batch.chosen:
            return batch
        both = (*batch.chosen, *(index + self._base for index in batch.chosen))
        return dataclasses.replace(self._assembled(step, rank, world, both), chosen=batch.chosen)

    def chosen(self, step: int) -> list[int]:
        """Which forgotten records a step pushes."""
        return self._chosen_of(step, self._base)

    def loss(self, model: nn.Module, batch: ForgetBatch, totals_K: Tensor) -> Tensor:
        """Local share of both terms."""
        hidden: list[Tensor] = []
        parts = (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
        if self._needs & {"hidden", "retain_hidden"}:
            logits_BTV, hidden = model(*parts, return_hidden=True)
        else:
            logits_BTV = model(*parts)
        forget = logits_BTV.new_zeros(())
        if batch.chosen:  # a process may have no share of a step's records
            forget = self._loss(self._view(logits_BTV, hidden, batch), self._settings).sum()
        retain = self._retain(logits_BTV, hidden, batch)
        weight = self._weight
        if "dual" in self._needs:
            weight *= self._dual_step(retain.detach() / totals_K[0])
        return weight * retain / totals_K[0] + self._settings.forget_weight * forget / totals_K[1]

    def _view(self, logits_BTV: Tensor, hidden: list[Tensor], batch: ForgetBatch) -> View:
        num = len(batch.chosen)
        ordinal = batch.record_BT
        mask_BT = (ordinal >= 0) & (ordinal < num)
        chosen = list(batch.chosen)
        preferred = None
        if len(self._forgotten) > self._base:
            answers = View(
                *_at(logits_BTV, batch, ordinal >= num), num_records=2 * num, reference_N=self._reference_N[:0]
            )  # fmt: skip
            shifted = [index + self._base for index in chosen]
            preferred = answers.logprob_N[num:] - self._reference_N[shifted].to(answers.logprob_N)
        order = self._order_of(batch, mask_BT)
        return View(
            *_at(logits_BTV, batch, mask_BT), num_records=num,
            reference_N=self._reference_N[chosen].to(logits_BTV),
            reference_SV=self._of_cache(chosen, 0, order, "reference_logits"),
            hidden_LSD=torch.stack([hidden[layer][mask_BT] for layer in self._layers]) if "hidden" in self._needs else None,
            reference_LSD=self._of_cache(chosen, 1, order, "reference_hidden"), preferred_N=preferred, anchor_LD=self._anchor,
        )  # fmt: skip

    def _order_of(self, batch: ForgetBatch, mask_BT: Tensor) -> Tensor:
        """For each pushed position its place in the concatenation of the chosen records' caches."""
        record_S = batch.record_BT[mask_BT].cpu()
        sizes = torch.tensor(
            [len(self._forgotten[i].tokens) - self._forgotten[i].first for i in batch.chosen]
        )
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]]) if len(sizes) else sizes
        seen = torch.zeros_like(starts)
        places = []
        for record in record_S.tolist():
            places.append(int(starts[record] + seen[record]))
            seen[record] += 1
        return torch.tensor(places, dtype=torch.int64)

    def _of_cache(self, chosen: list[int], part: int, order: Tensor, need: str) -> Tensor | None:
        if need not in self._needs or not chosen:
            return None
        dim = part  # logits are [S, V], hidden states [L, S, D]
        return torch.cat([self._cache[index][part] for index in chosen], dim).index_select(
            dim, order
        )

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

    def _retain(self, logits_BTV: Tensor, hidden: list[Tensor], batch: ForgetBatch) -> Tensor:
        """Sum over retained labels of NLL, of KL to the original, or of both distances."""
        kept = batch.num_retained_rows
        labels_BT = batch.labels_BT[:kept]
        if self._original is None:
            return cross_entropy_sum(logits_BTV[:kept], labels_BT)
        with torch.no_grad():
            original = self._original.to(logits_BTV.device)
            reference_BTV, states = original(
                batch.tokens_BT[:kept],
                batch.positions_BT[:kept],
                batch.documents_BT[:kept],
                return_hidden=True,
            )
        mask_BT = labels_BT != IGNORE
        if "retain_kl" in self._needs:
            ours, theirs = (
                one[:kept][mask_BT].log_softmax(-1) for one in (logits_BTV, reference_BTV)
            )
            return functional.kl_div(ours, theirs, log_target=True, reduction="sum")
        distance = [
            (hidden[layer][:kept][mask_BT] - states[layer][mask_BT]).square().mean(-1).sum()
            for layer in self._layers
        ]
        return torch.stack(distance).sum()

    def _dual_step(self, nll: Tensor) -> float:
        """Move PDU's dual variable by this step's loss on what remains."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(nll)
        now = self.dual
        self.dual = max(0.0, now + self._settings.dual_rate * (float(nll) - self._settings.bound))
        return now


def _at(logits_BTV: Tensor, batch: ForgetBatch, mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return logits_BTV[mask_BT], batch.labels_BT[mask_BT], batch.record_BT[mask_BT]


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
    from trainer.inputs import initial_model
    from trainer.loop import fit

    config = ForgetConfig.from_extra(run.config.extra)
    settings = settings_of(config.method, config.settings)
    plan, forgotten, tokenizer = inputs_of(run, directory, config)
    length, preferred = run.config.batch.length, []
    if config.method == "dpo":
        preferred = idk_answers(forgotten, tokenizer, length)
    elif config.method == "altpo":
        preferred = _alternates(config, directory, tokenizer, length)
    objective = MethodObjective(
        plan, forgotten, initial_model(run, directory).eval(), config.method, settings,
        preferred=preferred, forget_records=config.forget_records,
    )  # fmt: skip
    return fit(run, directory, objective=objective)


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
