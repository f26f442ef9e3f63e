"""What a training chooses besides its model: optimiser, schedule, batch, mixture, guard.

These are parts of `trainer.spec.RunConfig`, so of run.json and of the identity of a run. Every number has a default
that works for the models of the tests; formulas stand where they are computed (`optim`, `muon`, `data`, `guard`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainer.errors import SpecError

Precision = Literal["float32", "bfloat16", "float64"]
"""float32; bfloat16: matrix products in bfloat16 by autocast over float32 weights and moments; float64: everything."""

PRECISIONS = ("float32", "bfloat16", "float64")


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below a bound.

    Raises:
        SpecError: it is smaller.
    """
    if value < least:
        raise SpecError(f"{name}: expected at least {least}, got {value}")


def positive(name: str, value: float) -> None:
    """Refuse a value that is not above 0.

    Raises:
        SpecError: it is 0 or negative.
    """
    if not value > 0:
        raise SpecError(f"{name}: expected a positive number, got {value}")


def hex_digest(name: str, value: str) -> None:
    """Refuse what is not the hex form of a SHA-256.

    Raises:
        SpecError: other length or other characters.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise SpecError(f"{name}: expected 64 lower-case hex digits (SHA-256), got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSpec:
    """Optimiser with linear warm-up and one of two schedules."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw for every parameter; muon: hidden matrices by Muon, all others by AdamW."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine to the last step, or stable and then decay (wsd)."""
    lr: float = 3e-3
    """Peak step size."""
    min_lr_ratio: float = 0.1
    """lr at the last step / peak lr, in [0, 1]."""
    warmup_steps: int = 20
    """Steps of linear growth from lr / warmup_steps to lr."""
    decay_share: float = 0.2
    """Share of all steps in which wsd falls, in [0, 1]; cosine ignores it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment of AdamW, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    momentum: float = 0.95
    """Decay of Muon's momentum, in [0, 1)."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 = never clip."""

    def __post_init__(self) -> None:
        positive("optim.lr", self.lr)
        positive("optim.eps", self.eps)
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        at_least("optim.weight_decay", self.weight_decay, 0)
        at_least("optim.clip_norm", self.clip_norm, 0)
        for name in ("min_lr_ratio", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise SpecError(f"optim.{name}: expected 0..1, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"optim.betas: expected two numbers in [0, 1), got {self.betas}")
        if not 0 <= self.momentum < 1:
            raise SpecError(f"optim.momentum: expected a number in [0, 1), got {self.momentum}")
        for name, known in (("name", ("adamw", "muon")), ("schedule", ("cosine", "wsd"))):
            if getattr(self, name) not in known:
                raise SpecError(
                    f"optim.{name}: expected {' or '.join(known)}, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """The global batch of one step, whatever the number of processes."""

    rows: int = 16
    """Rows in a step, over all processes and micro-batches."""
    length: int = 128
    """Tokens in a row."""
    accumulation: int = 1
    """Micro-batches that a process cuts its rows into, to hold fewer activations at a time; never changes the update."""

    def __post_init__(self) -> None:
        at_least("batch.rows", self.rows, 1)
        at_least("batch.length", self.length, 1)
        at_least("batch.accumulation", self.accumulation, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSpec:
    """How often an owner's records stand in one epoch."""

    repeats: dict[str, int] = field(default_factory=dict)
    """pseudonym of an owner in the tokens (`trainer.tokens.pseudonym`), or its id -> times per epoch, >= 0 (0 leaves the owner out); else once."""

    def __post_init__(self) -> None:
        for owner, times in self.repeats.items():
            at_least(f"mixture.repeats.{owner}", times, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSpec:
    """When a step's loss is a spike, and what happens then."""

    window: int = 50
    """Accepted losses that a new one is compared with, >= 4; the guard sleeps until there are as many."""
    threshold: float = 8.0
    """A spike is a loss this many robust standard deviations above the window's median."""
    action: Literal["skip", "rollback"] = "skip"
    """skip: leave out this update; rollback: also undo all updates since the newest checkpoint."""
    limit: int = 10
    """Spikes after which the run stops as numerically unstable, >= 1."""

    def __post_init__(self) -> None:
        at_least("guard.window", self.window, 4)
        positive("guard.threshold", self.threshold)
        at_least("guard.limit", self.limit, 1)
        if self.action not in ("skip", "rollback"):
            raise SpecError(f"guard.action: expected skip or rollback, got {self.action!r}")
