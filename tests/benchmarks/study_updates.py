"""Do values follow a change without training everything anew? `make accept STUDY=owners-updates`.

The game of `study_eras`: eight eras, two buyers, three seeds, all 256 coalitions really retrained (they come from its bank, and are trained where it
lacks them). Each change is made as if only the old game were known, with at most 76 of the new game's 256 coalitions (0.30), and held
against the exact values of the new game:

    delivery   each era in turn arrives last; the game of the other seven is known
    erasure    each era in turn is gone
    target     the buyer of 1994 to 2016 asks, values for 1790 to 1828 are known, and the other way round; eight draws of coalitions

"Within the interval" = |updated - exact| <= the half-width that `update_values` states at 95 %, per value.
"""

import numpy as np
from figures import record
from owner_games import by_owner, nll, stored
from study_eras import PACKAGES, SEEDS, SPEC, TARGETS, material
from study_transfer import VOCAB, bpe

from valuation import exact_shapley
from valuation.updates import after_delivery, after_erasure, update_values

BUDGET, DRAWS = 76, 8


def tables():
    """(buyer, seed) → V of all coalitions in nats per target token; and how many eras."""
    names, rows, target, spare, *_ = material()
    found = stored("time", rows, target, bpe(spare), VOCAB, VOCAB - 1)
    member_KN, buyer_Q = by_owner(rows, names), np.array([name for name, _ in target])
    made = {}
    for seed in SEEDS:
        nll_CQ, tokens_Q = nll(found, member_KN, range(1 << len(names)), seed, SPEC)
        for buyer in TARGETS:
            at_Q = buyer_Q == buyer
            made[buyer, seed] = -nll_CQ[:, at_Q].sum(1) / tokens_Q[at_Q].sum()
    return made, len(names)


def moved_last(value_C, player, players):
    """The same game with one player renamed to be the last."""
    order = [k for k in range(players) if k != player] + [player]
    masks = np.arange(1 << players)
    source_C = sum(((masks >> bit & 1) << old) for bit, old in enumerate(order))
    return value_C[source_C]


def updated(known, base_C, truth_C, players, seed):
    """One update: whether each value is within its interval, half-widths over the largest value, and calls."""
    asked = []

    def utility(masks):
        asked.extend(masks)
        return truth_C[masks]

    made = update_values(players, known, base_C, utility, BUDGET, np.random.default_rng(seed))
    exact_n = exact_shapley(truth_C, players)
    inside_n = np.abs(made.values_n - exact_n) <= made.half_n
    return inside_n, made.half_n / np.abs(exact_n).max(), np.abs(made.values_n - exact_n) / np.abs(exact_n).max(), len(asked)  # fmt: skip


def study():
    """All changes."""
    value, players = tables()
    rows = {"delivery": [], "target": []}
    erased = 0.0
    for (buyer, seed), value_C in value.items():
        for player in range(players):
            new_C = moved_last(value_C, player, players)
            old_C = new_C[: len(new_C) // 2]
            known, base_C = after_delivery(old_C)
            rows["delivery"].append(updated(known, base_C, new_C, players, player))
            gap_n = exact_shapley(after_erasure(value_C, player), players - 1) - exact_shapley(old_C, players - 1)  # fmt: skip
            erased = max(erased, float(np.abs(gap_n).max()))
        other = next(name for name in TARGETS if name != buyer)
        rows["target"] += [
            updated({}, value[other, seed], value_C, players, draw) for draw in range(DRAWS)
        ]
    for name, found in rows.items():
        inside = np.concatenate([row[0] for row in found])
        half, gap = (np.concatenate([row[i] for row in found]) for i in (1, 2))
        calls = max(row[3] for row in found) / (1 << players)
        figure(
            name, float(inside.mean()), "share", ">= 0.95", "requirement", bool(inside.mean() >= 0.95), f"updated values within the stated interval of full recomputation after a change: {name}",
            n=len(inside), note=f"{len(found)} updates of {players} values; calls at most {calls:.3f} of full recomputation; half-width {half.mean():.2%} (worst {half.max():.2%}) and error {gap.mean():.2%} (worst {gap.max():.2%}) of the largest value",
        )  # fmt: skip
    calls = max(row[3] for found in rows.values() for row in found) / (1 << players)
    figure("calls", calls, "1", "<= 0.3", "requirement", calls <= 0.3, "most utility calls of an update over those of full recomputation", n=sum(len(f) for f in rows.values()))  # fmt: skip
    figure("erasure", erased, "nats per token", "<= 1e-12", "requirement", erased <= 1e-12, "largest difference of values after an erased era, without a call, from the exact game of the others", n=len(value) * players)  # fmt: skip


def figure(name, estimate, unit, bar, kind, holds, what, *, n, note=""):
    """A line of this study."""
    record(
        "accept.jsonl", f"valuation.owners.updates.{name}", packages=PACKAGES, kind=kind, seeds=list(SEEDS), n=n, unit=unit, what=what, estimate=estimate,
        low=None, high=None, level=None, spread="all changes and seeds", bar=bar, holds=holds, note=note, command="make accept STUDY=owners-updates",
    )  # fmt: skip
