"""Choosing a method's numbers on people whom no audit looks at.

Whoever tries ten settings on the audited people and keeps the best has fitted the audit: the verdict then speaks about the choice
and no longer about forgetting. So a sweep pushes out *validation* people, others than the audited by owner and source, and takes

    argmin over settings s with  NLL(s) <= NLL(original) + bound
                           and  held(s) <= held_bound           of   ( max(0, share(s) - floor),  apart(s),  NLL(s),  order in the grid )

    NLL(s)    retained loss, nats per label, of the model that s made, over batches of everything that stays
    held(s)   what s costs *people* who stay, as an audit's utility: one-sided 95 % upper bound, over people, of the mean of
              (loss on a person's records, nats per token) - (the same under gold)
    share(s)  share of validation people whose secret is that model's first choice, when asked, or after a short benign fine-tuning
              where that was measured, whichever is larger
    floor     the same share where nobody was ever trained on: of look-alikes under the original, or of the people under gold
    apart(s)  whole steps of `resolution` in   max over signs k of  |x_k(s) - x_k(gold)| / span_k

in lexicographic order. The loss over everything that stays is mostly other text and hardly sees what neighbours of the same form lose;
so *held* people, who stay and are trained on, have a bound of their own, which is the audit's utility margin. They are neither pushed nor
audited, nor those that the audit measures its utility on. The floor is subtracted because pushing below what a model says of strangers is no merit. Signs are what an audit
tells forgotten people by when no question brings a number out: the AUC of membership (span 0.5) and exposure (span log2 of the
numbers that are ranked). They are held against a gold model of the *validation* people, which costs one more training and says nothing
about the audited; both ways, since who stands out by unlikeliness stands out. Distances within one step of `resolution` are noise of so few people, and
the retained loss decides. Without signs apart is 0. If no setting keeps
both bounds, none is chosen and the reason says so. Grids stand in `methods.settings`, beside the defaults.

What was measured is a file of rows (setting, measure, value), aggregates only, no person's number. A finished setting is not run
again; the file is bound, by an HMAC under the sealed records' key, to the people and to what all settings have in common, so that
rows of another model are refused rather than reused. The choice is a pure function of rows and objective: anybody can repeat it.

Source: the rule is ours; a grid on held-out data is common practice (OpenUnlearning, arXiv 2506.12618, tunes per method so).
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, NamedTuple

from provenance.canonical import jcs, keyed, write_atomic
from unlearning.errors import PlanError, RowsError
from unlearning.methods.settings import GRIDS, RATES, Settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path


GIVEN_AWAY = "given_away"
RETAINED = "retained"
RESTORED = "restored"
HELD = "held"
MEMBERSHIP = "membership"
EXPOSURE = "exposure"
RECIPE = ("forget_tokens", "neighbours")
"""What of a run a setting may change besides rate and numbers: which tokens are pushed (`forget_retain`), and the share of retained tokens
that neighbours have (`neighbours`)."""
FORMAT = 1


class Person(NamedTuple):
    """Who somebody is to a corpus: two owners may both have a source of one name."""

    owner: str
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """Validation people beside the audited ones; without a `repr`, so that no log names them."""

    validation: frozenset[Person]
    """Who is pushed out by every setting."""
    audited: frozenset[Person]
    """Who is not to be looked at."""
    held: frozenset[Person] = frozenset()
    """Who stays, and is held to a bound; nobody: that bound can't be asked for."""
    measured: frozenset[Person] = frozenset()
    """Who stays and serves the audit: on whom its utility is measured."""

    def __post_init__(self) -> None:
        if not self.validation or not self.audited:
            raise PlanError(
                f"a sweep needs validation people and the audited ones that they are held apart from, got {len(self.validation)} and "
                f"{len(self.audited)}"
            )
        if both := self.validation & self.audited:
            raise PlanError(
                f"{len(both)} of {len(self.validation)} validation people are audited too: settings chosen on them would fit the audit; "
                "take people (owner and source) who are in no audited request"
            )
        for name, others in (
            ("validated on", self.validation),
            ("audited", self.audited),
            ("what the audit measures utility on", self.measured),
        ):
            if both := self.held & others:
                raise PlanError(
                    f"{len(both)} of {len(self.held)} held people are {name} too: take people who stay and serve nothing else"
                )
        if both := self.validation & self.measured:
            raise PlanError(
                f"{len(both)} of {len(self.validation)} validation people are what the audit measures utility on: take others"
            )


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a grid."""

    method: str
    """A name of `methods.METHODS`."""
    rate: str
    """The optimiser's peak rate, a decimal string above 0."""
    changes: tuple[tuple[str, str], ...] = ()
    """Field of `Settings` → decimal string, where it differs from the method's defaults."""
    recipe: tuple[tuple[str, str], ...] = ()
    """Of `RECIPE` → value, where the run differs from the recipe that all settings share."""

    def __post_init__(self) -> None:
        if unknown := sorted({name for name, _ in self.recipe} - set(RECIPE)):
            raise PlanError(f"expected a recipe's changes among {RECIPE}, got {unknown[0]!r}")
        try:
            positive = Decimal(self.rate) > 0
        except InvalidOperation:
            positive = False
        if not positive:
            raise PlanError(
                f"expected a rate above 0 as a decimal string such as '0.001', got {self.rate!r}"
            )
        self.numbers()

    def numbers(self) -> Settings:
        """The method's numbers.

        Raises:
            PlanError: an unknown method or setting, or one out of range.
        """
        return settings_of(self.method, dict(self.changes))

    @property
    def name(self) -> str:
        """How rows call it, for example `npo rate=0.001 beta=0.5`."""
        pairs = (("rate", self.rate), *self.changes, *self.recipe)
        return " ".join([self.method, *(f"{name}={value}" for name, value in pairs)])


@dataclass(frozen=True, slots=True)
class Sign:
    """A number by which an audit tells forgotten people apart, and what it is where they were never trained on."""

    measure: str
    """Its name in a sweep's rows, such as `membership`."""
    gold: float
    """Its value under a gold model of the same people."""
    span: float
    """The largest distance that counts as 1, above 0: 0.5 for an AUC, log2 of the numbers ranked for exposure."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gold) and math.isfinite(self.span) and self.span > 0):
            raise PlanError(
                f"{self.measure}: expected gold's value finite and a span above 0, got {self.gold} and {self.span}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is wanted of a setting."""

    retained: float
    """The original's retained loss, nats per label."""
    bound: float
    """How much above it a setting may end, nats per label, at least 0."""
    floor: float = 0.0
    """Share given away of people never trained on, 0..1."""
    signs: tuple[Sign, ...] = ()
    """What forgotten people are told apart by, with gold's values; none: not looked at."""
    held_bound: float | None = None
    """Largest `held`, nats per token above gold, at least 0: an audit's utility margin; None: not looked at."""
    resolution: float = 0.1
    """Distances from gold, in spans, of which smaller ones are equal, above 0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.retained) and self.bound >= 0 and 0 <= self.floor <= 1):
            raise PlanError(
                f"expected a finite retained loss, bound >= 0 and floor in 0..1, got {self.retained}, {self.bound}, {self.floor}"
            )
        if self.held_bound is not None and not 0 <= self.held_bound < math.inf:
            raise PlanError(f"expected a bound of held people >= 0 nats, got {self.held_bound}")
        if not self.resolution > 0:
            raise PlanError(f"expected a resolution above 0, got {self.resolution}")

    def admits(self, measures: Mapping[str, float]) -> bool:
        """Whether a setting keeps the others; a loss that isn't finite never does.

        Raises:
            RowsError: held people have a bound and weren't measured.
        """
        if self.held_bound is not None:
            if HELD not in measures:
                raise RowsError(
                    f"expected {HELD!r} of every setting, got {sorted(measures)}: measure held people, or ask for no bound of theirs"
                )
            if not measures[HELD] <= self.held_bound:
                return False
        return math.isfinite(measures[RETAINED]) and (
            measures[RETAINED] <= self.retained + self.bound
        )

    def apart(self, measures: Mapping[str, float]) -> float:
        """Largest distance of a sign from gold's, in spans; infinite where one isn't a number.

        Raises:
            RowsError: a sign that wasn't measured.
        """
        if missing := [one.measure for one in self.signs if one.measure not in measures]:
            raise RowsError(
                f"expected {missing[0]!r} of every setting, got {sorted(measures)}: measure it, or leave the sign out"
            )
        distances = [abs(measures[one.measure] - one.gold) / one.span for one in self.signs]
        return max((x if math.isfinite(x) else math.inf for x in distances), default=0.0)

    def cost(self, measures: Mapping[str, float]) -> tuple[float, float, float]:
        """Share above the floor, then steps of distance from gold, then retained loss; less is better."""
        steps = self.apart(measures) / self.resolution
        share = max(measures[GIVEN_AWAY], measures.get(RESTORED, 0.0))
        above = max(0.0, share - self.floor)
        return above, math.floor(steps) if math.isfinite(steps) else steps, measures[RETAINED]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a sweep found."""

    setting: Setting | None
    """The chosen one; None if no setting is admissible."""
    reason: str
    """In a sentence."""


def grid_of(method: str, rates: Sequence[str] = RATES) -> list[Setting]:
    """Every combination of a method's grid with the rates; first field slowest, rates fastest.

    Args:
        method: a name of `methods.METHODS`; one without a grid keeps its defaults.
        rates: the optimiser's, decimal strings.

    Raises:
        PlanError: an unknown method, or a number out of range.
    """
    fields = GRIDS.get(method, {})
    combined = itertools.product(*fields.values(), rates)
    return [
        Setting(method, rate, tuple(zip(fields, values, strict=True))) for *values, rate in combined
    ]


def choose(
    settings: Sequence[Setting], rows: Mapping[str, Mapping[str, float]], objective: Objective
) -> Choice:
    """The rule, on rows.

    Args:
        settings: the grid, in the order that decides ties.
        rows: setting's name → measure → value, as `read_rows` gives them.
        objective: what is wanted.

    Raises:
        RowsError: a setting without rows.
    """
    if missing := [one.name for one in settings if one.name not in rows]:
        raise RowsError(
            f"expected rows of {len(settings)} settings, got none of {missing[0]!r}: run the sweep to its end"
        )
    kept = [one for one in settings if objective.admits(rows[one.name])]
    limit = objective.retained + objective.bound
    if not kept:
        reason = f"none of {len(settings)} settings is admissible: least retained loss {_least(settings, rows, RETAINED):.4f}, limit {limit:.4f} nats per label"
        if objective.held_bound is not None:
            reason += f"; least cost to held people {_least(settings, rows, HELD):.4f}, limit {objective.held_bound:.4f} nats per token"
        return Choice(None, reason)
    best = min(
        kept, key=lambda one: objective.cost(rows[one.name])
    )  # `min` keeps the first of equals
    above, _, retained = objective.cost(rows[best.name])
    apart = (
        f"{objective.apart(rows[best.name]):.3f} of a span from gold, " if objective.signs else ""
    )
    held = ""
    if objective.held_bound is not None:
        held = f"cost to held people {rows[best.name][HELD]:.4f} of at most {objective.held_bound:.4f}, "
    return Choice(
        best, f"{best.name}: {above:.4f} given away above the floor, {apart}{held}retained loss {retained:.4f} of at most {limit:.4f}; "
        f"{len(kept)} of {len(settings)} settings admissible"
    )  # fmt: skip


def _least(
    settings: Sequence[Setting], rows: Mapping[str, Mapping[str, float]], measure: str
) -> float:
    values = (rows[one.name][measure] for one in settings)
    return min(filter(math.isfinite, values), default=math.inf)


def sweep(
    file: Path,
    settings: Sequence[Setting],
    runner: Callable[[Setting], Mapping[str, float]],
    split: Split,
    objective: Objective,
    *,
    key: bytes,
    common: str,
) -> Choice:
    """Measure every setting that the file doesn't hold yet, and choose.

    Args:
        file: rows, JSON lines; written whole after each setting.
        settings: the grid, different from each other in value.
        runner: makes a model of the validation people's original by a setting, and says at least `given_away` and `retained` of it;
            any other measure is kept too.
        split: the people.
        objective: what is wanted; it may change without a new run.
        key: of the sealed validation records, 32 bytes.
        common: digest of what all settings share (original, recipe, seed).

    Returns:
        The choice.

    Raises:
        PlanError: no setting, one twice, or a runner that says too little.
        RowsError: the file belongs to another sweep, or is none.
    """
    if not settings:
        raise PlanError("expected at least one setting, got an empty grid")
    if len({(one.method, Decimal(one.rate), one.numbers(), one.recipe) for one in settings}) != len(
        settings
    ):
        raise PlanError("expected settings that differ, got one twice")
    groups = split.validation, split.audited, split.held, split.measured
    people = [sorted(map(list, group)) for group in groups]
    bound_to = keyed(key, jcs([FORMAT, common, people])).hex()
    rows = read_rows(file, bound_to) if file.exists() else {}
    for setting in settings:
        if setting.name not in rows:
            rows[setting.name] = _checked(runner(setting))
            write_atomic(file, _lines(bound_to, rows))
    return choose(settings, rows, objective)


def read_rows(file: Path, bound_to: str = "") -> dict[str, dict[str, float]]:
    """Rows of a sweep: setting → measure → value.

    Args:
        file: JSON lines.
        bound_to: the sweep's HMAC, hex; empty: any.

    Raises:
        RowsError: another sweep's file, or none of a sweep.
    """
    try:
        head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
        if head["format"] != FORMAT or (bound_to and head["sweep"] != bound_to):
            raise RowsError(
                f"{file.name} holds rows of another sweep (other people, model, recipe or format): keep it elsewhere and start anew"
            )
        rows: dict[str, dict[str, float]] = {}
        for line in lines:
            rows.setdefault(line["setting"], {})[line["measure"]] = float(line["value"])
        return {name: _checked(measures) for name, measures in rows.items()}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RowsError):
            raise
        raise RowsError(
            f"{file.name} holds no sweep's rows: expected JSON lines of setting, measure and value"
        ) from error


def _lines(bound_to: str, rows: Mapping[str, Mapping[str, float]]) -> bytes:
    # Decimal strings: `repr` of a float reads back as the same float, and the file stays without floats.
    lines: Iterable[dict[str, int | str]] = (
        {"setting": name, "measure": measure, "value": repr(value)}
        for name, measures in rows.items()
        for measure, value in measures.items()
    )
    head: dict[str, int | str] = {"format": FORMAT, "sweep": bound_to}
    return "".join(json.dumps(line) + "\n" for line in (head, *lines)).encode()


def _checked(measures: Mapping[str, float]) -> dict[str, float]:
    found = {name: float(measures[name]) for name in sorted(measures)}
    if not {GIVEN_AWAY, RETAINED} <= set(found) or not 0 <= found[GIVEN_AWAY] <= 1:
        raise PlanError(
            f"expected {GIVEN_AWAY!r} in 0..1 and {RETAINED!r} of every setting, got {found}"
        )
    return found
