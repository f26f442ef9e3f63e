"""A12: depth of forgetting on the study's models, by activation patching (`unlearning.depth`).

The unlearning-depth score is 1 for gold and 0 for the original by construction; if it isn't, patching is broken. Those of the methods
stand beside it as evidence: a ruined model also scores near 1, so that they mean nothing without the utility in the same table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.depth import erasure, patch_drops, sites, states

if TYPE_CHECKING:
    from unlearning.pilot.audits import Audits


def depths(audits: Audits) -> dict[str, tuple[float, list[float]]]:
    """Depth of every model of a study.

    Args:
        audits: audits of a study with its methods.

    Returns:
        Model → (mean score over questions whose secret some layer carries, median erasure ratio of each layer).
    """
    probes = [
        p for p in audits.material.trained if p.record_id not in audits.material.questions.public
    ]
    original = audits.model("original")
    batches = sites(probes, original)
    gold_LN = patch_drops(original, batches, states(audits.model(audits.golds[0]), batches))
    found = {}
    for name in ("original", audits.golds[0], *audits.study.profile.methods):
        drops_LN = patch_drops(original, batches, states(audits.model(name), batches))
        seen = erasure(gold_LN, drops_LN)
        layers = [float(np.nanmedian(row)) if np.isfinite(row).any() else float("nan") for row in seen.ratios_LN]  # fmt: skip
        found[name] = (float(np.nanmean(seen.scores_N)), layers)
    return found


def holds(audits: Audits) -> tuple[bool, str]:
    """A12.

    Args:
        audits: audits of a study with its methods.

    Returns:
        Whether gold scores 1 and the original 0, and the scores of all models with the median erasure ratio per layer.
    """
    found = depths(audits)
    gold, original = found[audits.golds[0]][0], found["original"][0]
    detail = "; ".join(
        f"{name} {score:.2f} [{' '.join(f'{ratio:.2f}' for ratio in layers)}]"
        for name, (score, layers) in found.items()
    )
    return abs(gold - 1.0) < 1e-6 and abs(original) < 1e-6, f"unlearning depth: {detail}"
