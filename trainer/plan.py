"""What a layout costs before anything is started: memory, traffic and idle time per process, by formula.

Memory, float32, of the process that has most (4 bytes each; P' = its parameters):

    state         weight, gradient, two moments                                           4 P'
    gathered      FSDP: one block's weights and gradient, in a pipeline the whole stage's; copies: one flat gradient
    activations   per token and block, saved for the backward pass                        (4D + 3D + 2KE + 4F)/tp + 2D
                  per token of the last stage: logits, their softmax, their gradient      3 V/tp

    2 norms save x and x/|x| each (4D, cut along positions), the two gathered inputs of the matrices (2D) are whole;
    attention saves q, k, v, its output and a copy (3D + 2KE), SwiGLU four inner vectors (4F).

Traffic is what a process sends per step; rings and exchanges send (n-1)/n of what they carry. Idle is the share of a
pipeline's time without work. FLOP come from `trainer.presets`. All of this is arithmetic over shapes: no process is
started, no weight allocated, and torch isn't imported.

`alternatives` compares a layout with the simplest others of as many processes and says why each was not taken; they
stand in phases.json beside the layout that was.

Legend: B rows, T positions, D width, H query heads, K key heads, E head width, F inner width, V vocabulary.

Source: activations as in arXiv 2205.05198 section 4, for this model; idle time arXiv 2104.04473 section 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.layout import Layout, violations
from trainer.presets import flops_per_token

if TYPE_CHECKING:
    from trainer.spec import BatchSpec, ModelSpec

BYTES = 4
"""Of a number in float32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a layout costs the process that has most to do."""

    parameters: int
    """Parameters of which it keeps weight, gradient and moments."""
    state: int
    """Bytes of these."""
    gathered: int
    """Bytes of weights and gradients that are there for a while."""
    activations: int
    """Bytes saved for the backward pass."""
    traffic: dict[str, int]
    """Axis -> bytes sent per step; axes of degree 1 are left out."""
    idle: float
    """Share of the time that a pipeline waits, 0..1."""
    flops: int
    """Floating-point operations per step."""

    @property
    def memory(self) -> int:
        """All bytes."""
        return self.state + self.gathered + self.activations

    @property
    def sent(self) -> int:
        """Bytes sent per step over all axes."""
        return sum(self.traffic.values())

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Time of a step on processes of that speed and links of that bandwidth, nothing overlapping."""
        return self.flops / flops_per_s / (1 - self.idle) + self.sent / bytes_per_s


def estimate(layout: Layout, model: ModelSpec, batch: BatchSpec) -> Cost:
    """What a layout costs.

    Args:
        layout: possible for the model and the batch.
        model: shape of the model.
        batch: the global batch.

    Returns:
        Bytes, FLOP and idle share of the process that has most.
    """
    block, matrix = _Part.block(model, layout), model.vocab_size * model.dim
    layers = math.ceil(model.num_layers / layout.stages) * (layout.stages // layout.pp)
    both = layout.pp == 1 or layout.schedule == "zbv"  # embedding and head on one process
    ends = _Part((1 + (both and not model.tied)) * matrix, model.dim)
    whole = layers * block.here(layout.tp) + ends.here(layout.tp)
    kept = math.ceil(whole / layout.fsdp)
    once = whole if layout.pp > 1 else block.here(layout.tp)
    gathered = 2 * once if layout.fsdp > 1 else (kept if layout.dp_replicate * layout.tp > 1 else 0)
    tokens = math.ceil(batch.rows / layout.batch_degree) * math.ceil(batch.length / layout.sp)
    flight = min(layout.microbatches, layout.stages)
    flight = layout.microbatches if layout.schedule == "gpipe" else flight
    saved = layers * _saved(model, layout.tp) * flight + 3 * model.vocab_size // layout.tp
    return Cost(
        kept,
        4 * BYTES * kept,
        BYTES * gathered,
        BYTES * saved * tokens // layout.microbatches,
        _traffic(layout, model, tokens, layers=layers, whole=whole, uncut=layers * block.whole),
        (layout.pp - 1) / (layout.microbatches + layout.pp - 1) if layout.pp > 1 else 0.0,
        flops_per_token(model, batch.length) * batch.rows * batch.length // layout.world_size,
    )


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that was not taken."""

    layout: Layout
    cost: Cost | None
    """None if it is not possible."""
    reason: str
    """What makes it impossible, or what it would cost instead."""

    def __str__(self) -> str:
        """Layout and reason."""
        return f"{self.layout}: {self.reason}"


def alternatives(layout: Layout, model: ModelSpec, batch: BatchSpec) -> list[Rejected]:
    """The simplest other layouts: those that divide along one axis only, by as many processes, and one process.

    Args:
        layout: the one that was taken.
        model: shape of the model.
        batch: the global batch.

    Returns:
        Each with the reason why it was not taken; for one process, what two would do.
    """
    world, chosen = max(layout.world_size, 2), estimate(layout, model, batch)
    others = [
        Layout(),
        Layout(dp_replicate=world),
        Layout(dp_shard=world),
        Layout(sp=world),
        Layout(tp=world),
        Layout(pp=world, microbatches=world),
    ]
    if model.num_experts:
        others.append(Layout(dp_shard=world, ep=world))
    found = []
    for other in others:
        if other == layout:
            continue
        broken = violations(other, model, batch)
        if broken:
            found.append(Rejected(other, None, f"not possible: {'; '.join(broken)}"))
            continue
        cost = estimate(other, model, batch)
        reason = (
            f"{cost.memory / chosen.memory:.2f} x the memory, {cost.flops / chosen.flops:.2f} x the work per process, "
            f"{cost.sent} bytes sent per step instead of {chosen.sent}, idle {cost.idle:.0%}; asked for: {layout}"
        )
        found.append(Rejected(other, cost, reason))
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Parameters of a part of the model, by what tensor parallelism does to them."""

    cut: int
    whole: int
    experts: int = 0

    def here(self, tp: int) -> int:
        """Parameters before slicing by FSDP; experts count whole, since ep * efsdp = dp_shard * sp."""
        return self.cut // tp + self.whole + self.experts

    @classmethod
    def block(cls, model: ModelSpec, layout: Layout) -> _Part:
        """One block."""
        width = model.dim // model.num_heads
        keys = 2 * model.dim * model.num_kv_heads * width
        cut, whole = 2 * model.dim**2, 2 * model.dim + (2 * width if model.qk_norm else 0)
        if model.num_kv_heads % layout.tp:
            whole += keys
        else:
            cut += keys
        if not model.num_experts:
            return cls(cut + 3 * model.dim * model.ffn_dim, whole)
        whole += model.dim * (model.num_experts + 3 * model.shared_expert_dim)
        return cls(cut, whole, 3 * model.dim * model.expert_dim * model.num_experts)


def _saved(model: ModelSpec, tp: int) -> int:
    """Numbers that a block saves per token."""
    keys = 2 * model.num_kv_heads * (model.dim // model.num_heads)
    inner = model.ffn_dim
    more = 0
    if model.num_experts:
        # Chosen copies in and out, and the same again sorted; the shared expert.
        inner = model.experts_per_token * model.expert_dim + model.shared_expert_dim
        more = 4 * model.experts_per_token * model.dim
    return (7 * model.dim + keys + 4 * inner + more) // tp + 2 * model.dim


def _traffic(
    layout: Layout, model: ModelSpec, tokens: int, *, layers: int, whole: int, uncut: int
) -> dict[str, int]:
    """Bytes that a process sends per step, by axis."""

    def ring(size: int) -> float:
        return (size - 1) / size

    width = model.dim // model.num_heads
    keys = max(model.num_kv_heads, layout.tp)
    keys = math.lcm(keys // layout.tp, layout.sp) * layout.tp * width
    gathers = 2 if layout.pp > 1 else 3
    pairs = 1 if model.num_experts else 2  # of gather and scatter in a block
    sent = {
        "dp_replicate": 2 * ring(layout.dp_replicate) * whole / layout.fsdp,
        "dp_shard x sp": gathers * ring(layout.fsdp) * whole,
        "sp": 2 * ring(layout.sp) * layers * tokens * 2 * (model.dim + keys) / layout.tp,
        "tp": ring(layout.tp) * (4 * (pairs * layers + 1) * tokens * model.dim + 2 * uncut),
        "pp": (layout.pp > 1) * 2 * (layout.stages / layout.pp) * tokens * model.dim / layout.tp,
        "ep": 4
        * ring(layout.ep)
        * layers
        * tokens
        * model.experts_per_token
        * model.dim
        / layout.tp,
    }
    return {axis: int(BYTES * count) for axis, count in sent.items() if count}
