"""How often a model was shown a text: counted from the order of its run, not taken from anybody's word.

The order of a training is a pure function of what its run file commits to (`trainer.order`), so the number of times that a record had
begun in a row before the last step ended can be counted afterwards::

    shown(r) = sum over epochs e of  #{ places of r in epoch e that begin before token steps * rows * length }
    times(text) = sum of shown(r) over every record r of the corpus whose tokens are the text's           copies count, whoever owns them

A text that was cut by the end of the last step counts as shown: its beginning was. Cost: one pass over the orders that were
used, and a look at the records that are as long as one of the texts.

Source: the axis of Carlini et al., arXiv 2202.07646, figure 1 (extraction grows with the logarithm of the number of repetitions).
"""

# ruff: noqa: N802 - shape suffixes in names (STYLE 2)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.data import BatchPlan


def shown_N(plan: BatchPlan, steps: int) -> NDArray[np.int64]:
    """How often each record of a corpus had begun when a run ended.

    Args:
        plan: the run's batches.
        steps: steps that it took, ≥ 0.

    Returns:
        int64 [N], by index in the corpus; 0 for tombstones and excluded records.
    """
    end = steps * plan.spec.rows * plan.spec.length
    counts_N = np.zeros(plan.store.size, dtype=np.int64)
    number = 0
    while (epoch := plan.order.epoch(number)).first < end:
        begun = int(np.searchsorted(epoch.starts_R1[:-1], end - epoch.first, side="left"))
        counts_N += np.bincount(epoch.order_R[:begun], minlength=plan.store.size)
        number += 1
    return counts_N


def times_shown(folder: Path, texts: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """How often the model of a checkpoint was shown each of some texts.

    Args:
        folder: the checkpoint's folder, in the folder of its run; or an ensemble's.
        texts: record id (hex, or any other name) → tokens, with the end-of-text token. A record that stands in the corpus is looked up by
            the tokens that stand there.

    Returns:
        record id → times, 0 for texts that never stood in the run's corpus; None where it can't be told: no run file beside
        the checkpoint, tokens that are gone, or a model that goes on from another one.
    """
    from unlearning.ensemble import read_ensemble

    listed = read_ensemble(folder)
    if listed is None:
        return _times_in(folder.parent, texts, alone=True)
    # No record is in two shards, and a shard's slices are one training after the other.
    counts = [
        _times_in((folder / stage).parent, texts, alone=False)
        for one in listed
        for stage in one.stages or (one.folder,)
    ]
    if any(one is None for one in counts):
        return None
    return {name: sum(one[name] for one in counts if one is not None) for name in texts}


def _times_in(
    directory: Path, texts: Mapping[str, Sequence[int]], *, alone: bool
) -> dict[str, int] | None:
    """`times_shown` by one run; `alone` asks for one that goes on from no other."""
    from trainer.errors import DataError
    from trainer.inputs import batch_plan
    from trainer.spec import load_run

    if not (directory / "run.json").exists():
        return None
    run = load_run(directory)
    if alone and run.init != "none":
        return None
    try:
        plan = batch_plan(run, directory)
    except (DataError, OSError):
        return None
    own = _in_corpus(plan, texts)
    tokens = {
        name: np.asarray(plan.store.tokens(own[name]) if name in own else given, dtype=np.uint32)
        for name, given in texts.items()
    }
    shown = shown_N(plan, run.steps)
    sums: dict[bytes, int] = {one.tobytes(): 0 for one in tokens.values()}
    lengths = list({len(one) for one in tokens.values()})
    for index in np.flatnonzero(np.isin(plan.store.lengths_N, lengths) & (shown > 0)):
        text = plan.store.tokens(int(index)).astype(np.uint32).tobytes()
        if text in sums:
            sums[text] += int(shown[index])
    return {name: sums[one.tobytes()] for name, one in tokens.items()}


def _in_corpus(plan: BatchPlan, texts: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Name of a text → index in the corpus, for texts that are named by the id of a record there."""
    found = {}
    for first, ids_N32 in plan.store.record_ids():
        for place, record_id in enumerate(ids_N32):
            if (name := record_id.tobytes().hex()) in texts:
                found[name] = first + place
    return found
