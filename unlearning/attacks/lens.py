"""Below the last layer: the answer is read off an inner layer, which a method that bent the later ones has left as it was.

The residual stream after layer l goes straight through the model's own final norm and head (logit lens), and the adversary decodes greedily from what comes
out. As in `scoring`, that gives the secret iff the true token is the layer's first choice at every position under teacher forcing, so one
forward pass answers for all layers. The last layer read so is the model itself and is not tried.

*Every inner layer is a budget* of one attack, of an ensemble every inner layer of every constituent: the adversary's best counts, for each model its own, and so
it does on gold (`secondary`). No layer is chosen beforehand: one that was chosen on people who stay would miss a method that hides the forgotten alone
from there on.

Source: logit lens, nostalgebraist, 2020; reading erased facts off inner layers, Patil et al., ICLR 2024, arXiv 2309.17410.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.depth import lens_answers, sites, states
from unlearning.ensemble import members
from unlearning.rows import Measurement

if TYPE_CHECKING:
    from trainer.model import Transformer
    from unlearning.material import Material

ATTACK = "lens"


def lens(model: Transformer, material: Material) -> list[Measurement]:
    """Read the answers about every forgotten person off every inner layer.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        Exact match (0 or 1) and mean log-probability of each secret; attack `lens/layer-L`, of an ensemble
        `lens/constituent-K/layer-L`, layers and constituents counted from 1. Of a model of one layer that one is read.
    """
    probes = (*material.trained, *material.unseen)
    asked: dict[str, int] = {}
    numbers = []
    for probe in probes:
        asked[probe.subject_id] = asked.get(probe.subject_id, -1) + 1
        numbers.append(asked[probe.subject_id])
    parts = members(model)
    batches = sites(probes, parts[0])
    measured = []
    for place, part in enumerate(parts, start=1):
        # One batch at a time: the states of all layers for all questions would be larger than the model.
        read = lens_answers(part, batches, (states(part, [site])[0] for site in batches))
        constituent = f"constituent-{place}/" if len(parts) > 1 else ""
        for layer in range(max(1, part.spec.num_layers - 1)):
            attack = f"{ATTACK}/{constituent}layer-{layer + 1}"
            for score, values_LN in zip(("exact_match", "secret_logprob"), read, strict=True):
                measured += [
                    Measurement(probe.subject_id, "forgotten", number, attack, score, float(value))
                    for probe, number, value in zip(probes, numbers, values_LN[layer], strict=True)
                ]
    return measured
