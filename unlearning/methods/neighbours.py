"""Retained batches that hold the forgotten people's neighbours: records of the owners of whom something is forgotten.

    share of retained tokens of these owners  >=  share         by raising how often their records stand in an epoch

Whoever pushes 500 lines about people down bends what the model does with *any* line of that form, and the retain term can straighten only
what it sees. Drawn as in training, retained batches hold as much of the neighbours as is left of them: of 200 people with 100 forgotten, 41 % of
tokens in the demonstration, and 3 looks at each line in 100 steps. This raises the *mixture* of the run (`repeats` by owner), nothing else: an
epoch still holds every retained record, in the order that the run's seed keys, and run.json says how often each owner, by pseudonym, stands in
it, so that windows, `explain` and resuming know no other rule. With w_o tokens of owner o that stay, r_o repeats of it and N the
owners of forgotten records,

    r'_o = round( r_o · f )  for o in N,       f = max(1,  share / (1 - share) · sum_{o not in N} r_o w_o / sum_{o in N} r_o w_o )

*At most `LOOKS` looks at each.* Of an owner with one line left nine tenths of a run would be that line, four thousand times: the share is lowered so that a
neighbour's record is drawn `LOOKS` times in the run on average, about what it takes to learn a line by heart, or as often as in training.

Where nothing of these owners stays there is no neighbour to protect, and where nothing else stays all are: the mixture is left as it is.

Source: ours; PrivUn (arXiv 2604.22076) finds the damage of unlearning on neighbours of the forgotten.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

import numpy as np

from trainer.order import MICRO
from trainer.selection import find, sorted_ids
from trainer.spec import MixtureSpec
from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from trainer.selection import RecordWeights
    from trainer.spec import RunSpec
    from trainer.store import TokenStore


LOOKS = 20
"""Most times that a run draws a neighbour's record, on average, because of a wanted share."""


def with_neighbours(run: RunSpec, directory: Path, share: str) -> RunSpec:
    """A run whose retained batches hold enough of the neighbours.

    Args:
        run: specification of an unlearning run.
        directory: its folder, where its relative paths start.
        share: decimal string in 0..1, below 1; 0 leaves the run as it is.

    Raises:
        PlanError: a share out of range.
        UnlearningError: sealed records are refused.
    """
    from trainer.inputs import load_excluded, load_selection, open_store
    from unlearning.methods.forget_retain import ForgetConfig, sealed_ids
    from unlearning.people import read_sealed

    wanted = share_of(share)
    if not wanted:
        return run
    records, _ = read_sealed(ForgetConfig.from_extra(run.config.extra).sealed, directory)
    forgotten = sealed_ids(records)
    mixture = raised(
        open_store(run, directory), run.config.mixture, load_excluded(run, directory), forgotten, wanted, load_selection(run, directory),
        drawn=run.steps * run.config.batch.rows * run.config.batch.length,
    )  # fmt: skip
    return replace(run, config=replace(run.config, mixture=mixture))


def share_of(text: str) -> float:
    """A share as a number.

    Raises:
        PlanError: no decimal string in 0..1, or 1.
    """
    try:
        share = float(Decimal(text))
    except InvalidOperation:
        share = -1.0
    if not 0 <= share < 1:
        raise PlanError(
            f"expected neighbours as a decimal string from 0 to below 1, such as '0.75', got {text!r}"
        )
    return share


def raised(
    store: TokenStore, mixture: MixtureSpec, excluded: Collection[bytes], forgotten: Collection[bytes], share: float,
    weights: RecordWeights | None = None, *, drawn: int,
) -> MixtureSpec:  # fmt: skip
    """The mixture in which neighbours have at least a share of the retained tokens, to the rounding of repeats.

    Args:
        store: the documents.
        mixture: repeats per owner as in training.
        excluded: records that are not retained, besides the forgotten.
        forgotten: ids of the records that are pushed; their owners' other records are the neighbours.
        share: wanted, 0..1, below 1.
        weights: of records, as in training.
        drawn: retained tokens of the whole run; they say how often a record is seen.

    Returns:
        The mixture; the same if the share is reached, or nothing of these owners, or nothing else, stays.
    """
    gone_M, pushed_M = sorted_ids(frozenset(excluded) | frozenset(forgotten)), sorted_ids(frozenset(forgotten))  # fmt: skip
    gone_N, pushed_N = (np.zeros(store.size, dtype=bool) for _ in range(2))
    micro_N = np.full(store.size, MICRO, dtype=np.int64)
    for first, ids_N32 in store.record_ids():
        here = slice(first, first + len(ids_N32))
        gone_N[here], pushed_N[here] = find(gone_M, ids_N32)[0], find(pushed_M, ids_N32)[0]
        if weights is not None:
            micro_N[here] = weights.of(ids_N32)
    near = {store.owners[code] for code in np.unique(store.owner_codes_N[pushed_N]) if code >= 0}
    tokens_N = store.lengths_N * (micro_N / MICRO) * ~gone_N
    repeats = store.repeats(mixture)
    tokens_O = {
        owner: repeats[owner] * float(tokens_N[store.owner_codes_N == code].sum())
        for code, owner in enumerate(store.owners)
    }
    close = sum(tokens for owner, tokens in tokens_O.items() if owner in near)
    others = sum(tokens_O.values()) - close
    once = sum(tokens_O[owner] / repeats[owner] for owner in near if repeats[owner])
    share = min(share, LOOKS * once / drawn) if drawn else share
    if not close or not others or close >= share * (close + others):
        return mixture
    factor = share / (1 - share) * others / close
    changed = {owner: round(repeats[owner] * factor) for owner in near if repeats[owner]}
    # Owners that the mixture named stay named, all of them by pseudonym.
    named = {o for o in repeats if {o, store.pseudonym(o)} & set(mixture.repeats)} | set(changed)
    return MixtureSpec(repeats={store.pseudonym(o): (repeats | changed)[o] for o in sorted(named)})
