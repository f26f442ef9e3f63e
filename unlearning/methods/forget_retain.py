"""The objective that all approximate methods share: push some records down, hold everything else.

    L = Σ_i f(Δ_i) / n_forget  +  w · Σ_t NLL_t / n_retain

The first term is a method's own function of each forgotten record, the second is ordinary language modelling on what
remains (the run's batch plan, with the forgotten excluded). Both are sums over the *global* count of their term, so that
the gradient does not depend on the number of processes. One forward pass serves both: the forgotten records are packed
into rows of the same length and put under the retained rows (a sharded model must be called whole, and only once).

**Which tokens are pushed.** By default only the *secret*: the digits, or the second half of a text without a number
(`probes`). The other tokens of a record are shared with everybody: "The phone number of … is" is what retained people's
records are made of, and first names and towns are common. Pushing all tokens makes forget and retain term fight over the
template: after 100 steps utility is damaged (README, "Measured"), and it takes 200 or more to heal. What is given up: the model
still finds the *name* familiar, which the audit's membership test looks for. `forget_tokens: "all"` with a smaller beta and
more steps removes that too, but overshoots easily: membership is judged both ways.

The forgotten text is read from its sealed file into memory; it is never written, and the records that windows commit to are
the retained ones only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data import BatchPlan, pack
from trainer.inputs import initial_model, load_excluded, load_selection, open_store
from trainer.likelihood import cross_entropy_sum
from trainer.objective import LanguageModelling, label_count
from unlearning.errors import PlanError
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer, trained_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from trainer.spec import RunSpec
    from unlearning.people import Record
    from unlearning.probes import Tokenizer

    ForgetTerm = Callable[[Tensor, Tensor, Tensor], Tensor]

MODES = ("secret", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetConfig:
    """Settings of a method, from `run.config.extra`."""

    sealed: Mapping[str, Any]
    """`{"file", "key_file"}` of the sealed forgotten records."""
    tokenizer: str
    """Path of the tokenizer file of the run's tokens."""
    beta: float = 0.5
    """NPO's inverse temperature per nat: small = close to gradient ascent (see `npo`); unused by ascent."""
    retain_weight: float = 1.0
    """Weight w of the retain term; 0 turns it off."""
    forget_records: int = 32
    """Forgotten records per step, over all processes."""
    forget_tokens: str = "secret"
    """Tokens that are pushed: "secret" or "all"."""
    method: str = "npo"
    """Which of `METHODS`, for the entry `unlearning.methods.objective:run`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes of its hyper-parameters (`settings`)."""
    alternates: str = ""
    """File of plausible alternates, one record per forgotten record (altpo)."""

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> ForgetConfig:
        """Read the settings of a run.

        Args:
            extra: `run.config.extra`; real numbers are decimal strings.

        Returns:
            The settings.

        Raises:
            PlanError: for an unknown or missing setting, or one out of range.
        """
        known = set(cls.__dataclass_fields__)
        if set(extra) - known or not {"sealed", "tokenizer"} <= set(extra):
            raise PlanError(
                f"expected 'sealed', 'tokenizer' and any of {sorted(known)}, got {sorted(extra)}"
            )
        values = dict(extra)
        for name in ("beta", "retain_weight"):
            if name in values:
                values[name] = _decimal(name, values[name])
        config = cls(**values)
        if config.beta <= 0 or config.retain_weight < 0:
            raise PlanError("expected beta > 0 and retain_weight >= 0")
        if not isinstance(config.forget_records, int) or config.forget_records < 1:
            raise PlanError(f"expected forget_records >= 1, got {config.forget_records!r}")
        if config.forget_tokens not in MODES:
            raise PlanError(f"expected forget_tokens in {MODES}, got {config.forget_tokens!r}")
        return config


@dataclass(frozen=True, slots=True, repr=False)
class Forgotten:
    """One forgotten record as the objective sees it."""

    tokens: tuple[int, ...]
    """Tokens, at most one row."""
    first: int
    """First token that is pushed; tokens before it are context."""


@dataclass(frozen=True, slots=True, repr=False)
class ForgetBatch:
    """One process's part of a step: retained rows, then rows of forgotten records."""

    tokens_BT: Tensor
    """Token ids."""
    labels_BT: Tensor
    """Next token of the same document, -100 where there is none."""
    positions_BT: Tensor
    """Position inside the document."""
    documents_BT: Tensor
    """Label of the document."""
    record_BT: Tensor
    """Ordinal in `chosen` of the record that a position predicts a pushed token of, else -1."""
    num_retained_rows: int
    """Rows of ordinary language modelling; they come first."""
    chosen: tuple[int, ...]
    """Indices into the objective's forgotten records."""


def forgotten_records(
    records: Sequence[Record], tokenizer: Tokenizer, length: int, mode: str
) -> list[Forgotten]:
    """Cut records for the forget term.

    Args:
        records: records to forget.
        tokenizer: the run's tokenizer.
        length: tokens in a row, ≥ 2; of a longer record the part around the secret (or the beginning) is kept.
        mode: "secret" or "all".

    Returns:
        One entry per record of two or more tokens.

    Raises:
        ProbeError: if every record of a person is too short.
    """
    if mode == "secret":
        probes = trained_probes(records, tokenizer, length)
        return [
            Forgotten((*p.prompt_tokens, *p.secret_tokens), len(p.prompt_tokens)) for p in probes
        ]
    cut = ((*tokenizer.encode(r.text)[0], tokenizer.end_of_text)[:length] for r in records)
    return [Forgotten(tokens, 1) for tokens in cut if len(tokens) > 1]


class ForgetRetain:
    """A trainer `Objective` with two terms; what differs between methods is one function."""

    def __init__(
        self,
        plan: BatchPlan,
        forgotten: Sequence[Forgotten],
        reference_N: Tensor,
        term: ForgetTerm,
        *,
        retain_weight: float = 1.0,
        forget_records: int = 32,
    ) -> None:
        """Make the objective.

        Args:
            plan: batches of what remains.
            forgotten: records to push down.
            reference_N: log-probability of each record's pushed tokens under the original model, nats.
            term: `(logprob_N, reference_N, num_tokens_N) → loss_N`, one value per record of a batch.
            retain_weight: weight of the retain term.
            forget_records: records per step over all processes.

        Raises:
            PlanError: without any forgotten record.
        """
        if not forgotten:
            raise PlanError(
                "expected at least one forgotten record of two or more tokens, got none"
            )
        self._retained = LanguageModelling(plan)
        self._forgotten, self._reference_N, self._term = forgotten, reference_N, term
        self._weight, self._per_step = retain_weight, min(forget_records, len(forgotten))
        self._seed, self._length = plan.seed, plan.spec.length
        self._num_tokens_N = torch.tensor([len(f.tokens) - f.first for f in forgotten])

    def batch(self, step: int, rank: int, world: int) -> ForgetBatch:
        """This process's retained rows and its share of the step's forgotten records."""
        chosen = self.chosen(step)
        mine = tuple(chosen[len(chosen) * rank // world : len(chosen) * (rank + 1) // world])
        return self._assembled(step, rank, world, mine)

    def _assembled(self, step: int, rank: int, world: int, mine: tuple[int, ...]) -> ForgetBatch:
        """Retained rows of a process with rows of these records under them."""
        retained = self._retained.batch(step, rank, world)
        pushed, record = self._rows_of(mine)
        tokens, labels, positions, documents = (
            torch.cat(pair).to(_device()) for pair in zip(retained, pushed, strict=True)
        )
        unused = torch.full_like(retained[0], -1)
        record = torch.cat([unused, record]).to(_device())
        kept = len(retained[0])
        return ForgetBatch(tokens, labels, positions, documents, record, kept, mine)

    def _rows_of(self, mine: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Forgotten records packed into rows, and which position predicts a pushed token of which."""
        packed = pack(
            ((n, b"", self._forgotten[i].tokens) for n, i in enumerate(mine)), self._length
        )
        record = np.full(packed.tokens_BT.shape, -1, dtype=np.int64)
        for row, segments in enumerate(packed.segments):
            for segment in segments:
                # Position t predicts token t+1: the span begins one position before its first token.
                begin = segment.column + self._forgotten[mine[segment.index]].first - 1
                record[row, begin : segment.column + segment.count - 1] = segment.index
        return packed.tensors(), torch.from_numpy(record)

    def counts(self, batch: ForgetBatch) -> Tensor:
        """Local numbers of retained labels and of forgotten records, float64 [2]."""
        labels = label_count(batch.labels_BT[: batch.num_retained_rows])
        return torch.cat([labels, labels.new_tensor([len(batch.chosen)])])

    def loss(self, model: nn.Module, batch: ForgetBatch, totals_K: Tensor) -> Tensor:
        """Local share of both terms."""
        logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
        kept, chosen = batch.num_retained_rows, list(batch.chosen)
        retain = cross_entropy_sum(logits_BTV[:kept], batch.labels_BT[:kept])
        logprob_N = pushed_logprobs(logits_BTV, batch)
        reference_N = self._reference_N[chosen].to(logprob_N)
        num_tokens_N = self._num_tokens_N[chosen].to(logprob_N)
        losses_N = self._term(logprob_N, reference_N, num_tokens_N)
        return self._weight * retain / totals_K[0] + losses_N.sum() / totals_K[1]

    def records(self, step: int) -> list[tuple[int, bytes]]:
        """Retained records of a step; the forgotten ones are sealed and stand in no window."""
        return self._retained.records(step)

    def chosen(self, step: int) -> list[int]:
        """Which forgotten records a step pushes: epochs of permutations keyed by (seed, epoch).

        Args:
            step: counted from 0.

        Returns:
            Indices, a pure function of seed and step.
        """
        return self._chosen_of(step, len(self._forgotten))

    def _chosen_of(self, step: int, count: int) -> list[int]:
        found = []
        for position in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, place = divmod(position, count)
            found.append(int(self._order(epoch, count)[place]))
        return found

    def _order(self, epoch: int, count: int) -> Any:
        key = hashlib.sha256(f"dataworth-forget-1|{self._seed}|{epoch}".encode()).digest()
        return np.random.default_rng(int.from_bytes(key, "big")).permutation(count)


def pushed_logprobs(logits_BTV: Tensor, batch: ForgetBatch) -> Tensor:
    """Log-probability of each forgotten record's pushed tokens.

    Args:
        logits_BTV: logits of the whole batch.
        batch: the batch.

    Returns:
        logprob_N in nats, one sum per record in `batch.chosen`; differentiable.
    """
    mask_BT = batch.record_BT >= 0
    logprob_SV = logits_BTV[mask_BT].log_softmax(-1)
    truth_S = batch.labels_BT[mask_BT]
    logprob_S = logprob_SV.gather(1, truth_S[:, None])[:, 0]
    zeros_N = logprob_S.new_zeros(len(batch.chosen))
    return zeros_N.index_add(0, batch.record_BT[mask_BT], logprob_S)


def from_run(
    run: RunSpec, directory: Path, term: Callable[[ForgetConfig], ForgetTerm]
) -> ForgetRetain:
    """Make a method's objective from a run.

    Args:
        run: specification with the method's settings in `config.extra` and the original model as `init`.
        directory: the run's folder; relative paths start there.
        term: makes the method's function from its settings.

    Returns:
        The objective.

    Raises:
        UnlearningError: if settings or sealed records are refused.
    """
    config = ForgetConfig.from_extra(run.config.extra)
    plan, forgotten, _ = inputs_of(run, directory, config)
    reference_N = reference_logprobs(initial_model(run, directory).eval(), forgotten)
    return ForgetRetain(
        plan,
        forgotten,
        reference_N,
        term(config),
        retain_weight=config.retain_weight,
        forget_records=config.forget_records,
    )


def inputs_of(
    run: RunSpec, directory: Path, config: ForgetConfig
) -> tuple[BatchPlan, list[Forgotten], FileTokenizer]:
    """What every method starts from: batches of what remains, and the records to push.

    Args:
        run: specification.
        directory: the run's folder.
        config: its settings.

    Returns:
        The plan, the forgotten records, the tokenizer.

    Raises:
        UnlearningError: if there is no original model, or the sealed records are refused.
        DataError: if nothing would be left to retain.
    """
    if run.init == "none":
        raise PlanError("expected the original model as the run's init, got 'none'")
    records, _ = read_sealed(config.sealed, directory)
    tokenizer = FileTokenizer(directory / config.tokenizer)
    forgotten = forgotten_records(records, tokenizer, run.config.batch.length, config.forget_tokens)
    # The sealed records are left out of the retain term even if the excluded file forgets one of them.
    sealed = {bytes.fromhex(r.record_id) for r in records if _is_digest(r.record_id)}
    plan = BatchPlan(
        open_store(run, directory),
        run.seed,
        run.config.batch,
        run.config.mixture,
        load_excluded(run, directory) | sealed,
        load_selection(run, directory),
    )
    return plan, forgotten, tokenizer


def reference_logprobs(model: Any, forgotten: Sequence[Forgotten]) -> Tensor:
    """Log-probability of the pushed tokens under the original model, once, before training.

    Args:
        model: the original model.
        forgotten: records.

    Returns:
        float32 [N], nats; keeping these numbers replaces keeping a second model in memory.
    """
    from unlearning.scoring import score_spans

    scores = score_spans(model, [f.tokens for f in forgotten], [f.first for f in forgotten])
    sizes_N = np.array([len(f.tokens) - f.first for f in forgotten])
    return torch.tensor(-scores.loss_N * sizes_N, dtype=torch.float32)


def _device() -> str:
    """The GPU that `trainer.mesh` has chosen for this process by the time batches are drawn, else the CPU."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _decimal(name: str, text: Any) -> float:
    try:
        return float(Decimal(text)) if isinstance(text, str) else float(int(text))
    except (InvalidOperation, TypeError, ValueError):
        raise PlanError(
            f"expected {name} as a decimal string such as '0.1', got {text!r}"
        ) from None
