"""A1 to A16: what a study of audits must show, each as a sentence with its numbers.

They come from two measured seeds of another implementation (project notes) and are kept as loose as there. One that does not hold
is reported, not tuned away. A1 to A6 are controls and run at any size; the others need the methods. A15 and A16 read INVALID here
(a control misbehaved) where the notes say INCONCLUSIVE. A11 and A12 are `ripple` and `depth`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unlearning.endpoints import Status
from unlearning.pilot import depth, ripple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from unlearning.endpoints import Endpoint
    from unlearning.pilot.audits import Audits
    from unlearning.verdict import Verdict

MANY = (
    64  # people from which the notes' numbers hold; below, AUC and epsilon are too coarse for them
)
HOT = "0.01"  # rate at which tier 3 wipes the original here; at the notes' 0.001 this model keeps its memory


@dataclass(frozen=True, slots=True)
class Assertion:
    """One claim and whether it held."""

    name: str
    """A1 to A16."""
    holds: bool
    detail: str
    """Claim and numbers."""


def controls(audits: Audits) -> Iterator[Assertion]:
    """A1 to A6, at any size.

    Args:
        audits: audits of a study.

    Yields:
        The assertions in order.
    """
    many = audits.study.profile.counts["forgotten"] >= MANY
    original = audits.audit("original")
    ends = _ends(original)
    direct = audits.rate("original", "direct/trained")
    unknown = audits.rate("original", "control/lookalike", population="lookalike")
    yield Assertion(
        "A1", direct >= 0.95 and unknown == 0,
        f"the original gives away {direct:.3f} (>= 0.95) of the forgotten and {unknown:.3f} (0) of people it never saw",
    )  # fmt: skip
    worst = {tier: max(ends[tier].gold) for tier in ("direct", "in_context", "fine_tune")}
    yield Assertion(
        "A2", worst["direct"] == worst["in_context"] == 0 and worst["fine_tune"] <= 2 / 64,
        f"gold gives away {worst} (0, 0, <= {2 / 64:.3f})",
    )  # fmt: skip
    auc = ends["membership"]
    low, high = (0.40, 0.60) if many else (0.20, 0.80)
    yield Assertion(
        "A3", auc.original >= 0.99 and all(low <= g <= high for g in auc.gold),
        f"AUC of the original {auc.original:.3f} (>= 0.99), of gold {_list(auc.gold)} ({low} to {high})",
    )  # fmt: skip
    least, most = (3.0, 0.5) if many else (1.5, 0.5)
    bounds = [audits.epsilon(name) for name in ("original", *audits.golds)]
    yield Assertion(
        "A4", bounds[0] >= least and max(bounds[1:]) <= most,
        f"epsilon of the original {bounds[0]:.2f} (>= {least}), of gold {_list(bounds[1:])} (<= {most})",
    )  # fmt: skip
    (control,) = [c for c in original.controls if "too hot" in c.name]
    yield Assertion("A5", control.holds, control.detail)
    # A PASS needs three distinct gold models: the audited one stands among them. Its distance from itself is none, which the envelope over
    # gold models can't use to its favour; each against the remaining ones is a control of every audit.
    # Of few people a gold model's AUC may by luck lie too far from the others' to be decided; no processor trains all of them so.
    asked = audits.golds[:1] if many else audits.golds
    identity = [audits.audit(gold, audits.golds).status for gold in asked]
    passed = Status.PASS in identity and Status.FAIL not in identity
    yield Assertion(
        "A6", passed and original.status is Status.FAIL,
        f"gold audited as unlearned: {', '.join(identity)} (PASS{'' if many else ' of one, FAIL of none'}); the original: {original.status} (FAIL)",
    )  # fmt: skip


def claims(audits: Audits) -> Iterator[Assertion]:
    """A7 to A16, with the methods of the pilot.

    Args:
        audits: audits of a study that has the methods ascent, kl, npo and finetune.

    Yields:
        The assertions in order.
    """
    for method in ("ascent", "kl"):
        verdict = audits.audit(method)
        ends = _ends(verdict)
        tiers = [ends[tier].unlearned for tier in ("direct", "in_context", "fine_tune")]
        yield Assertion(
            "A7", tiers[:2] == [0.0, 0.0] and tiers[2] >= 0.4 and _failed(verdict, "fine_tune"),
            f"{method}: tiers {_list(tiers)} (0, 0, >= 0.4), {verdict.status} (FAIL by fine_tune)",
        )  # fmt: skip
    verdict, quality = audits.audit("kl"), audits.forget_quality("kl", audits.golds[0])
    yield Assertion(
        "A8", quality.p_value > 0.05 and verdict.status is Status.FAIL,
        f"kl: forget quality D = {quality.d:.2f}, p = {quality.p_value:.2g} (> 0.05), {verdict.status} (FAIL)",
    )  # fmt: skip
    verdict = audits.audit("npo")
    ends, kept = _ends(verdict), audits.rate("npo", "control/retained", population="retained")
    tiers = [ends[tier].unlearned for tier in ("direct", "in_context")]
    yield Assertion(
        "A9", tiers == [0.0, 0.0] and kept >= 0.85 and ends["membership"].unlearned >= 0.85 and _failed(verdict, "membership"),
        f"npo: tiers {_list(tiers)} (0, 0), retained {kept:.3f} (>= 0.85), AUC {ends['membership'].unlearned:.3f} (>= 0.85), "
        f"{verdict.status} (FAIL by membership)",
    )  # fmt: skip
    rate = audits.rate("finetune", "direct/trained")
    yield Assertion("A10", 0.05 <= rate <= 0.6, f"finetune: tier 1 {rate:.3f} (0.05 to 0.6)")
    yield Assertion("A11", *ripple.holds(audits))
    yield Assertion("A12", *depth.holds(audits))
    yield _repeats(audits)
    verdict = audits.audit("random")
    rate = audits.rate("random", "direct/trained")
    yield Assertion(
        "A14", rate == 0 and verdict.status is Status.FAIL and _failed(verdict, "utility"),
        f"random weights: tier 1 {rate:.3f} (0), {verdict.status} (FAIL by utility)",
    )  # fmt: skip
    golds = audits.golds[:2]
    hot = {lr: audits.audit("kl", golds, lr) for lr in ("0.001", HOT)}
    yield Assertion(
        "A15", hot[HOT].status is Status.INVALID and "too hot" in hot[HOT].reasons[0],
        f"tier 3 at rate {HOT}: {hot[HOT].status} (INVALID, too hot); at 0.001: {hot['0.001'].status}",
    )  # fmt: skip
    alone = audits.audit("npo", [])
    yield Assertion(
        "A16", alone.status is Status.INVALID and "gold exists" in alone.reasons[0],
        f"without gold: {alone.status} (INVALID)",
    )  # fmt: skip


def _ends(verdict: Verdict) -> dict[str, Endpoint]:
    return {end.name: end for end in verdict.endpoints if not end.subgroup}


def _failed(verdict: Verdict, name: str) -> bool:
    return verdict.status is Status.FAIL and _ends(verdict)[name].status is Status.FAIL


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _repeats(audits: Audits) -> Assertion:
    """A13: forty steps twice from the same seed."""
    from trainer.checkpoint import verify

    roots = []
    for number in range(2):
        folder = f"repeat-{number}"
        path = audits.study.trained(folder, audits.study.run_spec("repeat", steps=40))
        roots.append(verify(path).root)
        shutil.rmtree(audits.study.folder / folder)
    return Assertion(
        "A13", roots[0] == roots[1], f"forty steps twice: {roots[0][:8]}, {roots[1][:8]}"
    )
