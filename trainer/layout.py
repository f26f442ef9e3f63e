"""How one step is spread over processes: five degrees whose product is the number of processes.

    world = pp * dp_replicate * dp_shard * sp * tp          (in this order: neighbours in tp are neighbouring ranks)

    dp_replicate   the model is copied, each copy takes other rows (DDP; with dp_shard > 1: HSDP)
    dp_shard       rows are divided too, and every process keeps a slice of each parameter (FSDP2, ZeRO-3)
    sp             Ulysses: a row is divided along its positions; attention exchanges positions for heads
    tp             each matrix is divided; norms and residual stream are divided along positions
    pp             blocks are divided into stages, the batch into microbatches that flow through them
    ep             experts are divided among the same processes: ep divides dp_shard * sp

A layout changes where numbers are computed, never which. `violations` says everything that makes one impossible, at
once and with the numbers; `nearest` says what is possible instead; `demand` raises both as one error, which
`trainer.spec.RunSpec` does when it is made, so that no process is started for a layout that cannot be.

Source: ZeRO arXiv 1910.02054; tensor parallelism arXiv 1909.08053 and 2205.05198; Ulysses arXiv 2309.14509; schedules
arXiv 1811.06965 (GPipe), 2104.04473 (1F1B, interleaved), 2401.10241 (zero bubble, ZBV).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.spec import BatchSpec, ModelSpec

DEGREES = ("dp_replicate", "dp_shard", "sp", "tp", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
# Stages per process: the last three schedules fill their bubbles with a second stage of the same process.
_STAGES_EACH = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one step is spread over processes; it never changes what is computed."""

    dp_replicate: int = 1
    """Copies of the model (or of its slices); each takes other rows."""
    dp_shard: int = 1
    """Slices of every parameter, gradient and moment; each process takes other rows."""
    sp: int = 1
    """Parts of a row (Ulysses); divides num_heads / tp."""
    tp: int = 1
    """Parts of every matrix; divides num_heads, ffn_dim and vocab_size."""
    pp: int = 1
    """Parts of the depth."""
    ep: int = 1
    """Parts of the set of experts, over the same processes as dp_shard * sp."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """Order of the microbatches' passes when pp > 1."""
    microbatches: int = 1
    """Parts of a process's rows that follow each other through the stages; at least as many as stages."""

    def __post_init__(self) -> None:
        low = {
            name: value
            for name in (*DEGREES, "ep", "microbatches")
            if (value := getattr(self, name)) < 1
        }
        if low:
            raise SpecError(f"layout: expected degrees of at least 1, got {low}")
        if self.schedule not in SCHEDULES:
            raise SpecError(
                f"layout.schedule: expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}"
            )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return prod(getattr(self, name) for name in DEGREES)

    @property
    def batch_degree(self) -> int:
        """Parts of the global batch's rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Slices of a dense parameter: sequence parts keep slices too, since they all hold the same weights."""
        return self.dp_shard * self.sp

    @property
    def stages(self) -> int:
        """Parts of the depth over all processes."""
        return self.pp * (_STAGES_EACH[self.schedule] if self.pp > 1 else 1)

    def __str__(self) -> str:
        """The degrees that are not 1, such as `dp_shard=2 tp=2`; `single` for one process."""
        degrees = [
            f"{name}={value}" for name in (*DEGREES, "ep") if (value := getattr(self, name)) > 1
        ]
        if self.pp > 1:
            degrees.append(f"schedule={self.schedule} microbatches={self.microbatches}")
        return " ".join(degrees) or "single"


def parse_layout(text: str) -> Layout:
    """The layout that a person writes, as `str(Layout)` says it.

    Args:
        text: degrees such as `dp_shard=2 tp=2`, or `pp=2 schedule=zbv microbatches=8`; a number alone means copies;
            `single` or an empty text one process.

    Returns:
        The layout. Without `microbatches`, a pipeline has as many as stages.

    Raises:
        SpecError: an unknown word, or a degree that is no positive number.
    """
    words = text.replace(",", " ").split()
    if words in ([], ["single"]):
        return Layout()
    if len(words) == 1 and words[0].isdecimal():
        words = [f"dp_replicate={words[0]}"]
    known, given = [field.name for field in dataclasses.fields(Layout)], {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise SpecError(f"layout: expected {', '.join(known)}, got {word!r} in {text!r}")
        if name != "schedule" and not value.isdecimal():
            raise SpecError(f"layout.{name}: expected a positive number, got {value!r}")
        given[name] = value if name == "schedule" else int(value)
    layout = Layout(**cast("dict[str, Any]", given))
    if layout.pp > 1 and "microbatches" not in given:
        layout = dataclasses.replace(layout, microbatches=layout.stages)
    return layout


def violations(
    layout: Layout, model: ModelSpec, batch: BatchSpec, world: int | None = None
) -> list[str]:
    """Everything that makes a layout impossible.

    Args:
        layout: the degrees.
        model: shape of the model.
        batch: the global batch.
        world: processes that there are, or None if that is not known yet.

    Returns:
        One line per violation, with the numbers; empty if the layout is possible.
    """
    return [
        *_world(layout, world),
        *_tensors(layout, model),
        *_experts(layout, model),
        *_rows(layout, batch),
        *_stages(layout, model),
    ]


def _world(layout: Layout, world: int | None) -> Iterator[str]:
    if world is not None and world != layout.world_size:
        product = " * ".join(f"{name} {getattr(layout, name)}" for name in DEGREES)
        yield f"{product} = {layout.world_size} processes, there are {world}"


def _tensors(layout: Layout, model: ModelSpec) -> Iterator[str]:
    tp, sp = layout.tp, layout.sp
    if model.num_heads % (tp * sp):
        yield f"num_heads {model.num_heads} is not a multiple of tp * sp = {tp} * {sp}"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield f"num_kv_heads {model.num_kv_heads} and tp {tp}: neither divides the other"
    for name in ("vocab_size",) if model.num_experts else ("ffn_dim", "vocab_size"):
        if getattr(model, name) % tp:
            yield f"{name} {getattr(model, name)} is not a multiple of tp {tp}"


def _experts(layout: Layout, model: ModelSpec) -> Iterator[str]:
    experts = model.num_experts
    if layout.ep == 1:
        return
    if not experts:
        yield f"ep {layout.ep}, but the model has no experts"
    elif experts % layout.ep:
        yield f"num_experts {experts} is not a multiple of ep {layout.ep}"
    if layout.fsdp % layout.ep:
        yield f"dp_shard * sp = {layout.dp_shard} * {layout.sp} is not a multiple of ep {layout.ep}"
        return
    slices = layout.fsdp // layout.ep
    for name in ("expert_dim", "dim") if experts else ():
        if getattr(model, name) % slices:
            yield f"{name} {getattr(model, name)} is not a multiple of dp_shard * sp / ep = {slices}"


def _rows(layout: Layout, batch: BatchSpec) -> Iterator[str]:
    degree, names = layout.batch_degree, "dp_replicate * dp_shard"
    numbers = f"{layout.dp_replicate} * {layout.dp_shard}"
    if batch.accumulation > 1:
        degree, names = degree * batch.accumulation, f"{names} * accumulation"
        numbers = f"{numbers} * {batch.accumulation}"
    if batch.rows < degree:
        yield f"batch.rows {batch.rows} is less than one row for each of {names} = {degree}"
    if layout.pp > 1 and batch.rows % (degree * layout.microbatches):
        yield (
            f"batch.rows {batch.rows} is not a multiple of {names} * microbatches = "
            f"{numbers} * {layout.microbatches}"
        )


def _stages(layout: Layout, model: ModelSpec) -> Iterator[str]:
    if layout.pp == 1:
        if layout.microbatches > 1:
            yield f"microbatches {layout.microbatches} without stages (pp 1)"
        return
    if model.num_layers < layout.stages:
        yield f"num_layers {model.num_layers} is less than the {layout.stages} stages of pp {layout.pp}, {layout.schedule}"
    if layout.microbatches < layout.stages:
        yield f"microbatches {layout.microbatches} is less than the {layout.stages} stages of pp {layout.pp}, {layout.schedule}"
    if layout.schedule in ("interleaved", "zero-bubble") and layout.microbatches % layout.pp:
        yield f"microbatches {layout.microbatches} is not a multiple of pp {layout.pp}, which {layout.schedule} wants"
    if model.tied:
        yield f"a tied head with pp {layout.pp}: embedding and head are on different processes (set model.tied to false)"


def possible(
    layout: Layout, model: ModelSpec, batch: BatchSpec, world: int | None = None
) -> Iterator[Layout]:
    """Every possible layout of a number of processes, in no particular order.

    Args:
        layout: gives schedule and, where that is possible, microbatches; its processes are meant if `world` is None.
        model: shape of the model.
        batch: the global batch.
        world: number of processes.

    Yields:
        Layouts without violations.
    """
    size = layout.world_size if world is None else world
    for degrees in _factors(size, len(DEGREES)):
        one: dict[str, Any] = dict(zip(DEGREES, degrees, strict=True))
        shared = one["dp_shard"] * one["sp"]
        share = batch.rows // (one["dp_replicate"] * one["dp_shard"] * batch.accumulation)
        parts = [m for m in range(1, share + 1) if share % m == 0] if one["pp"] > 1 else [1]
        experts = model.num_experts
        for ep in (e for e in range(1, (shared if experts else 1) + 1) if shared % e == 0):
            options = sorted(parts, key=lambda m: abs(m - layout.microbatches))
            for part in options:
                found = dataclasses.replace(layout, **one, ep=ep, microbatches=part)
                if not violations(found, model, batch, size):
                    yield found
                    break


def nearest(
    layout: Layout, model: ModelSpec, batch: BatchSpec, world: int | None = None, count: int = 3
) -> list[Layout]:
    """The possible layouts that differ least from an impossible one.

    Args:
        layout: the impossible one.
        model: shape of the model.
        batch: the global batch.
        world: processes that there are; None means those of the layout.
        count: most layouts to return.

    Returns:
        Up to `count` layouts of as many processes, nearest first (sum of |log2| of the ratios of degrees); if there
        is none, of the largest smaller number of processes that has one.
    """
    for size in range(world or layout.world_size, 0, -1):
        found = list(possible(layout, model, batch, size))
        if found:
            return sorted(found, key=lambda other: (_distance(layout, other), str(other)))[:count]
    return []


def demand(layout: Layout, model: ModelSpec, batch: BatchSpec, world: int | None = None) -> None:
    """Refuse an impossible layout.

    Args:
        layout: the degrees.
        model: shape of the model.
        batch: the global batch.
        world: processes that there are, or None if that is not known yet.

    Raises:
        SpecError: with all violations and the nearest possible layouts.
    """
    found = violations(layout, model, batch, world)
    if found:
        options = [str(other) for other in nearest(layout, model, batch, world)]
        raise SpecError(
            f"layout: {layout} is not possible: {'; '.join(found)}. Nearest possible: {' | '.join(options) or 'none'}"
        )


def _distance(a: Layout, b: Layout) -> float:
    names = (*DEGREES, "ep", "microbatches")
    return sum(abs(log2(getattr(a, name) / getattr(b, name))) for name in names)


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `parts` positive integers with that product."""
    if parts == 1:
        yield (number,)
        return
    for first in (f for f in range(1, number + 1) if number % f == 0):
        for rest in _factors(number // first, parts - 1):
            yield (first, *rest)
