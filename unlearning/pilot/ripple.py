"""A11: whom forgetting one person hurts, on the study's original model (`unlearning.association`, `unlearning.damage`).

Sixteen forgotten people are pushed out alone, each until the first gold model's loss; the others are the rest of the forgotten and as
many retained people as make 192. Each tie is correlated with the damage at that strength; after the first step the same stands beside
it, where a high r of gradients is a tautology (`association.CAVEAT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.association import (
    CAVEAT,
    gradient_ties,
    last_states,
    people_of,
    representation_ties,
    ripple,
    ripple_difference,
    semantic_ties,
    target_draws,
)
from unlearning.damage import damages, person_losses

if TYPE_CHECKING:
    from unlearning.pilot.audits import Audits

TARGETS, OTHERS, MAX_STEPS, RESAMPLES = 16, 192, 60, 2000


def holds(audits: Audits) -> tuple[bool, str]:
    """A11.

    Args:
        audits: audits of a study.

    Returns:
        Whether r of gradient dots is above that of representations by an interval over targets, and every r at both strengths.
    """
    material, records = audits.material, audits.study.people
    forgotten = people_of(records["forgotten"], material.forgotten)
    targets, rest = forgotten[:TARGETS], forgotten[TARGETS:]
    others = (rest + people_of(records["retained"], material.retained))[:OTHERS]
    original = audits.model("original")
    goal_T = person_losses(audits.model(audits.golds[0]), targets)
    done = damages(original, targets, others, goal_T, MAX_STEPS)
    dots_TN, cosines_TN = gradient_ties(original, targets, others)
    states = last_states(original, targets), last_states(original, others)
    shown_TN, cka_TN = representation_ties(*states)
    ties = {
        "gradient dot": dots_TN, "gradient cosine": cosines_TN, "representation cosine": shown_TN,
        "representation CKA": cka_TN, "semantic": semantic_ties(targets, others),
    }  # fmt: skip
    pairs_TN = np.ones(dots_TN.shape, dtype=bool)
    draws_BT = target_draws(len(targets), RESAMPLES, np.random.default_rng(material.seed))
    told = []
    for name, ties_TN in ties.items():
        used, first = (
            ripple(ties_TN, moved_TN, pairs_TN, draws_BT)
            for moved_TN in (done.damage_TN, done.first_TN)
        )
        told.append(f"{name} {used.r:.2f} ({used.low:.2f} to {used.high:.2f}; within targets {used.within:.2f}; first step {first.r:.2f})")  # fmt: skip
    gap, low, high = ripple_difference(dots_TN, shown_TN, done.damage_TN, pairs_TN, draws_BT)
    detail = (
        f"r of tie and damage, {len(targets)} targets x {len(others)} others, {int(done.steps_T.min())} to {int(done.steps_T.max())} steps, "
        f"{int(done.reached_T.sum())} reached gold's loss: {'; '.join(told)}; gradient dot less representation {gap:.2f} "
        f"({low:.2f} to {high:.2f}, > 0); {CAVEAT}"
    )
    return low > 0, detail
