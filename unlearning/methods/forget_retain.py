"""What every approximate method starts from: its settings, the records to push, and the batches of what remains.

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

from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data import BatchPlan
from trainer.inputs import load_excluded, load_selection, open_store
from unlearning.errors import PlanError
from unlearning.methods.coreset import CHOICES
from unlearning.methods.settings import DEFAULTS, lora_of
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer, trained_probes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer.spec import RunSpec
    from unlearning.people import Record
    from unlearning.probes import Tokenizer

MODES = ("secret", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetConfig:
    """Settings of a method, from `run.config.extra`."""

    sealed: Mapping[str, Any]
    """`{"file", "key_file"}` of the sealed forgotten records."""
    tokenizer: str
    """Path of the tokenizer file of the run's tokens."""
    beta: float = DEFAULTS["npo"].beta
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
    core_set: float = 1.0
    """Share of the forgotten records that is pushed, chosen by `coreset`; the others are to fall with them."""
    core_choice: str = "gradient"
    """How that share is chosen: "gradient", or, as the control, "random" (of the run's seed)."""
    stop: Mapping[str, Any] = field(default_factory=dict)
    """Empty: all steps are taken. `{"every": k, "lookalikes": file}`: see `stopping`."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Empty: all weights are trained. `{"rank": r, "alpha": "16", "targets": [...]}`: adapters only (`settings.Lora`)."""

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
        for name in ("beta", "retain_weight", "core_set"):
            if name in values:
                values[name] = _decimal(name, values[name])
        config = cls(**values)
        if config.beta <= 0 or config.retain_weight < 0:
            raise PlanError("expected beta > 0 and retain_weight >= 0")
        if not 0 < config.core_set <= 1:
            raise PlanError(f"expected core_set in (0, 1], got {config.core_set}")
        if config.core_choice not in CHOICES:
            raise PlanError(f"expected core_choice in {CHOICES}, got {config.core_choice!r}")
        if not isinstance(config.forget_records, int) or config.forget_records < 1:
            raise PlanError(f"expected forget_records >= 1, got {config.forget_records!r}")
        every = config.stop.get("every", 1)
        if config.stop and (
            set(config.stop) != {"every", "lookalikes"} or not isinstance(every, int) or every < 1
        ):
            raise PlanError(
                f"expected stop as {{'every': steps >= 1, 'lookalikes': file}}, got {dict(config.stop)}"
            )
        lora_of(config.lora)
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
    sealed = sealed_ids(records)
    plan = BatchPlan(
        open_store(run, directory),
        run.seed,
        run.config.batch,
        run.config.mixture,
        load_excluded(run, directory) | sealed,
        load_selection(run, directory),
    )
    return plan, forgotten, tokenizer


def sealed_ids(records: Sequence[Record]) -> frozenset[bytes]:
    """Ids of the sealed records that are a corpus's (hex of 32 bytes); others have none in any token folder."""
    return frozenset(bytes.fromhex(r.record_id) for r in records if _is_digest(r.record_id))


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


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _decimal(name: str, text: Any) -> float:
    try:
        return float(Decimal(text)) if isinstance(text, str) else float(int(text))
    except (InvalidOperation, TypeError, ValueError):
        raise PlanError(
            f"expected {name} as a decimal string such as '0.1', got {text!r}"
        ) from None
