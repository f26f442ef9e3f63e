"""Depth of forgetting and ripples, as the engineer's part of an audit report shows them.

Both are measured once per audit, at sizes that can afford it, and kept as rows under salted ids (`unlearning.engineering`). They
explain a verdict and never change it. Most of it is not defined for the mean of several models: of an ensemble the logit lens is shown
by constituent (`OfEnsemble`), and each other measure's place says why it is empty.
"""

from dataclasses import dataclass

from pipelines.reports.errors import ReportError
from pipelines.reports.parts import NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCurve:
    """One model seen layer by layer, first to last; each entry may be unknown."""

    model: str
    score: float | None
    """Unlearning-depth score, mean over questions: 1 erased as deeply as gold, 0 intact."""
    questions: int
    """Questions whose secret some layer of the original carries: the n of the score."""
    ratio: tuple[float | None, ...]
    """Median erasure ratio: 0 the layer still carries the secret, 1 as little as gold's."""
    cka: tuple[float | None, ...]
    """CKA-erasure: 0 as far from gold as the original was, 1 gold's representation."""
    lens: tuple[float | None, ...]
    """Log-probability of the secret when the layer is read by the original's head, nats per token, mean over questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieRow:
    """How well one kind of tie foretells whom forgetting hurts."""

    tie: str
    r: float | None
    """Pearson r of tie and damage over pairs (target, other)."""
    low: float
    high: float
    """Percentile interval over targets."""
    within: float | None
    """Mean r within targets."""
    first: float | None
    """R after the first step alone, where a high r of gradients is a tautology."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieGap:
    """How much better a tie by gradient foretells the damage than another tie does, in the same resamples of targets."""

    gradient: str
    other: str
    gap: float | None
    """r of the one less r of the other; None where one has no coefficient."""
    low: float
    """Lower end of the 95 % interval of the difference."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Damage at one distance by gradient, from the nearest on."""

    rank: str
    """Such as "1 to 4"."""
    pairs: int
    damage: float
    """Mean rise of the loss of these people after one target was forgotten alone, nats per token."""
    low: float
    high: float
    """95 % interval over targets."""
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RipplePoint:
    """One pair of the scatter chart."""

    tie: float
    """Gradient cosine."""
    damage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One part of the model: how far the method moved it, and what that move alone does to people who stay."""

    module: str
    norm: float
    """Length of its update as a share of the length of its weights."""
    gold_norm: float | None
    """The largest between two gold models; None with one."""
    applied: tuple[float, ...]
    """Rise of the loss by neighbour distance when this part's change alone is applied to the original."""
    reverted: tuple[float, ...]
    """Rise of the loss by neighbour distance that goes away when this part's change alone is taken back."""
    facts: tuple[float, ...]
    """Share of the people's own facts that are no longer answered when this part's change alone is applied."""
    facts_low: tuple[float, ...]
    """Lower ends of the 95 % Wilson intervals, one person one trial; empty in reports of before."""
    facts_high: tuple[float, ...]
    outranked: tuple[float | None, ...]
    """Share of the people with a number whose own is no longer the likeliest of 32 by distance; None where nobody has one, empty in reports of before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """One layer of the unlearned model as people who stay find it, whether the method touched it or not."""

    layer: int
    norm: float
    """Largest update of the layer's parts as a share of their length; 0: untouched."""
    cka: float | None
    """Likeness of what leaves the layer to the original's, 1: as it was."""
    cka_null: float | None
    """The least between two gold models; None with one."""
    loss: float
    """Log-probability that people's own answers lost when the layer is read by the model's own head, nats per token."""
    low: float
    high: float
    loss_null: float | None
    """The largest distance between two gold models; None with one."""
    damaged: bool
    """The whole interval lies above the null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engineering:
    """Depth and ripple of one audit."""

    layers: int
    depth: tuple[DepthCurve, ...]
    targets: int
    others: int
    reached: int
    """Targets whose loss came up to gold's when pushed alone."""
    ties: tuple[TieRow, ...]
    gaps: tuple[TieGap, ...]
    """Gradients against representations and words, differences; empty in reports of before."""
    neighbours: tuple[Neighbour, ...]
    points: tuple[RipplePoint, ...]
    distances: tuple[str, ...]
    """Names of the neighbour distances of the heat map, nearest first."""
    modules: tuple[ModuleRow, ...]
    whole: tuple[float, ...]
    """Rise of the loss by distance with all parts changed."""
    whole_facts: tuple[float, ...]
    """Share of own facts lost by distance with all parts changed; empty in reports of before."""
    whole_outranked: tuple[float | None, ...]
    """The same of people whose own number is outranked."""
    numbered: tuple[int, ...]
    """People who have a number by distance; empty where none has, and in reports of before."""
    null: tuple[float, ...]
    """Largest distance between the mean losses of two gold models by neighbour distance, which is what chance gives; empty with one."""
    null_facts: tuple[float, ...]
    """The same of the share of own facts that aren't answered; empty with one."""
    null_outranked: tuple[float | None, ...]
    """The same of people whose own number is outranked; empty with one, and in reports of before."""
    kept: tuple[KeptRow, ...]
    """People who stay, layer by layer; empty where none could be asked, and in reports of before."""
    caveat: str

    def __post_init__(self) -> None:
        for curve in self.depth:
            if any(len(part) != self.layers for part in (curve.ratio, curve.cka, curve.lens)):
                raise ReportError(f"depth of {curve.model} has not {self.layers} layers")
        for row in self.modules:
            if {len(row.applied), len(row.reverted), len(row.facts)} != {len(self.distances)}:
                raise ReportError(f"module {row.module} has not {len(self.distances)} distances")
            if len(row.outranked) not in (0, len(self.distances)):
                raise ReportError(f"module {row.module} has not {len(self.distances)} distances")
        others = (
            self.null,
            self.null_facts,
            self.null_outranked,
            self.numbered,
            self.whole_facts,
            self.whole_outranked,
        )
        if not {len(one) for one in others} <= {0, len(self.distances)}:
            raise ReportError(f"the whole change or the gap between gold models has not {len(self.distances)} distances")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LensRange:
    """Logit lens of a model's constituents, each read by its own head: over constituents, layer by layer, nats per token."""

    model: str
    constituents: int
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """The constituent that knows least."""
    high: tuple[float, ...]
    """The constituent that knows most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undefined:
    """A measure that an audit has not, with the reason."""

    what: str
    why: NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEnsemble:
    """What is shown in place of depth and ripple where a model is the mean of several models' probabilities."""

    layers: int
    """Of each constituent."""
    questions: int
    lens: tuple[LensRange, ...]
    undefined: tuple[Undefined, ...]

    def __post_init__(self) -> None:
        if not self.undefined:
            raise ReportError("an ensemble's report says what is not defined for it; got nothing")
        for one in self.lens:
            if any(len(part) != self.layers for part in (one.mean, one.low, one.high)):
                raise ReportError(f"lens of {one.model} has not {self.layers} layers")
