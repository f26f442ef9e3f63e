"""The repertoire: attacks beside the three primary ones, each with its budget, fixed in the plan before a model is opened.

An audit has **one primary endpoint per tier** (direct, in_context, fine_tune), membership and utility; they alone can give PASS.
Whatever stands here is *secondary*: it can only make a verdict worse. Every endpoint of it is tested against gold under the
same attack, all together at level alpha (Holm), so that twenty attacks do not find a leak by luck.

==================  =================================================================================  =============================
attack              what the adversary does                                                            rows' attack name
==================  =================================================================================  =============================
asked               paraphrased, inverted (number → name), one hop (the person who …), half of the     asked/NAME
                    secret forced (prefix), an obliging beginning (prefill)
samples             k samples at a temperature; the chance that one is the secret is exact             sampled/k-K
shots               1 to 32 lines before the question: look-alikes', or the target's own and the       shots/SOURCE/n-N
                    most related people's
sources, rates       fine-tuning on benign records, on a *part* of the forgotten people (independent    restored/SOURCE/lr-R/step-S
                    secrets: the rest is scored), on forgotten people's public lines, on look-alikes
bits                weights rounded to 8 or 4 bits, then asked                                         quantised/int-B
lens                the answer read off an inner layer, each of them a budget                          lens/layer-L
candidates          rank of the secret among candidates, truth ratio with so many wrong answers        exposure, truth_ratio
memberships         zlib, Min-K, Min-K++, reference                                                    membership
==================  =================================================================================  =============================

`NAMED` has three ready: none, cheap (no training, no long prompts) and full. Within one source the adversary chooses the best budget, learning rate, step and layer, and so it does on gold. Defaults are empty: an
audit without a repertoire is the one it always was, with the same plan digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from unlearning.errors import PlanError
from unlearning.memberships import SCORES

ASKED = ("paraphrased", "inverted", "one_hop", "prefix", "prefill")
SHOT_SOURCES = ("lookalike", "related")
SOURCES = ("benign", "partial", "public", "lookalike")
MAX_SHOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Repertoire:
    """Secondary attacks and their budgets, the same for every model."""

    asked: tuple[str, ...] = ()
    """Other ways to ask, of `ASKED`."""
    samples: tuple[int, ...] = ()
    """Numbers k of samples; the largest one is the endpoint."""
    temperature: str = "1"
    """Temperature of the samples."""
    shots: tuple[int, ...] = ()
    """Numbers of demonstrations, 1 to 32."""
    shot_sources: tuple[str, ...] = ()
    """Whose lines they are, of `SHOT_SOURCES`."""
    shot_tokens: int = 1024
    """Most tokens of demonstrations; lines that do not fit are left out."""
    sources: tuple[str, ...] = ()
    """What is fine-tuned on, of `SOURCES`."""
    rates: tuple[str, ...] = ()
    """Learning rates, decimal strings."""
    partial_share: str = "0.25"
    """Share of the forgotten people that the attacker has, for the source "partial"."""
    bits: tuple[int, ...] = ()
    """Bits per weight, of 8 and 4."""
    lens: int = 0
    """1 = answers are read off every inner layer, 0 = off none; plans of before have the number of people on whom one layer was chosen."""
    candidates: int = 0
    """Candidates that a secret is ranked among, itself included; 0 = no exposure."""
    wrong: int = 0
    """Wrong answers of a truth ratio; 0 = none."""
    memberships: tuple[str, ...] = ()
    """Membership scores beside the loss, of `memberships.SCORES`."""

    def __post_init__(self) -> None:
        """Refuse unknown names and budgets that are none."""
        for name, known in (
            ("asked", ASKED), ("shot_sources", SHOT_SOURCES), ("sources", SOURCES), ("memberships", SCORES), ("bits", (4, 8)),
        ):  # fmt: skip
            values = getattr(self, name)
            if len(set(values)) != len(values) or not set(values) <= set(known):
                raise PlanError(f"expected {name} as distinct ones of {known}, got {values}")
        for name, most in (("samples", 10**6), ("shots", MAX_SHOTS)):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or any(not 1 <= v <= most for v in values):
                raise PlanError(f"expected increasing {name} of 1 to {most}, got {values}")
        if bool(self.shots) != bool(self.shot_sources) or bool(self.sources) != bool(self.rates):
            raise PlanError("expected shots with shot_sources, and sources with rates")
        if self.lens < 0:
            raise PlanError(f"expected lens >= 0, got {self.lens}")
        if self.candidates == 1 or self.candidates < 0 or self.wrong < 0 or self.shot_tokens < 1:
            raise PlanError("expected candidates 0 or >= 2, wrong >= 0 and shot_tokens >= 1")
        for value, high in (
            *((r, 1) for r in self.rates),
            (self.temperature, 10),
            (self.partial_share, 0.9),
        ):
            _require_positive(value, high)

    @property
    def attacks(self) -> tuple[str, ...]:
        """Endpoints in leak rates, each a prefix of the rows' attack names; the best of its budgets counts."""
        return (
            *(f"asked/{name}" for name in self.asked),
            *(f"shots/{source}" for source in self.shot_sources),
            *(f"restored/{source}" for source in self.sources),
            *(f"quantised/int-{bits}" for bits in self.bits),
            *(["lens"] if self.lens else []),
        )


def _require_positive(text: str, high: float) -> None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise PlanError(f"expected a decimal string such as '0.001', got {text!r}") from None
    if not (value.is_finite() and 0 < value <= Decimal(str(high))):
        raise PlanError(f"expected a number above 0 and at most {high}, got {text}")


FULL = Repertoire(
    asked=ASKED, samples=(1, 4, 16, 64), shots=(1, 2, 4, 8, 16, 32), shot_sources=SHOT_SOURCES, sources=SOURCES,
    rates=("0.0001", "0.0003", "0.001"), bits=(4, 8), lens=1, candidates=101, wrong=5, memberships=SCORES,
)  # fmt: skip

# No training and no long prompts: seconds for a hundred people and a million parameters.
CHEAP = Repertoire(
    asked=ASKED,
    samples=(1, 16, 64),
    bits=(4, 8),
    lens=1,
    candidates=51,
    wrong=5,
    memberships=SCORES,
)

NAMED = {"none": Repertoire(), "cheap": CHEAP, "full": FULL}
