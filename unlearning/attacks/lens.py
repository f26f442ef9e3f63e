"""Below the last layer: the answer is read off an inner layer, which a method that bent the last ones has left as it was.

The residual stream after layer l goes straight through the model's own final norm and head (logit lens), and the adversary decodes greedily from what comes
out. As in `scoring`, that gives the secret iff the true token is the layer's first choice at every position under teacher forcing, so one
forward pass answers for all layers. The last layer read so is the model itself and is not tried.

*Which layer* the adversary reads is chosen per model on people who stay, whose answers he may know, never on the forgotten: the layer from which
most of them come out, then the one that makes their answers likeliest, then the deepest. Their number is the plan's `repertoire.lens`. Of an ensemble a layer
is one layer of one constituent.

Source: logit lens, nostalgebraist, 2020; reading erased facts off inner layers, Patil et al., ICLR 2024, arXiv 2309.17410. The choice of layer is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.depth import lens_answers, sites, states
from unlearning.ensemble import members
from unlearning.rows import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.probes import Probe

ATTACK = "lens"
_STREAM = 9


def lens(model: Transformer, material: Material) -> list[Measurement]:
    """Read the answers about every forgotten person off the chosen layer.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        Exact match (0 or 1) and mean log-probability of each secret, and the number of the layer it was read from, counted from 1; attack `lens`.
    """
    parts = members(model)
    validation = _validation(material)
    ranked = []
    for place, part in enumerate(parts):
        exact_LN, logprob_LN = _read(part, validation)
        for layer in range(_inner(part)):
            told = {
                p.subject_id for p, exact in zip(validation, exact_LN[layer], strict=True) if exact
            }
            ranked.append((len(told), float(logprob_LN[layer].mean()) if validation else 0.0, layer, place))  # fmt: skip
    _, _, layer, place = max(ranked)
    probes = (*material.trained, *material.unseen)
    exact_LN, logprob_LN = _read(parts[place], probes)
    asked: dict[str, int] = {}
    measured = []
    for number, probe in enumerate(probes):
        mine = asked[probe.subject_id] = asked.get(probe.subject_id, -1) + 1
        values = {"exact_match": exact_LN[layer, number], "secret_logprob": logprob_LN[layer, number], "layer": layer + 1}  # fmt: skip
        measured += [
            Measurement(probe.subject_id, "forgotten", mine, ATTACK, score, float(value))
            for score, value in values.items()
        ]
    return measured


def _inner(model: Transformer) -> int:
    """Layers that are read: all but the last, which is the model itself; of a single one that one."""
    return max(1, model.spec.num_layers - 1)


def _read(model: Transformer, probes: Sequence[Probe]) -> tuple[np.ndarray, np.ndarray]:
    batches = sites(probes)
    if not batches:
        return np.zeros((model.spec.num_layers, 0)), np.zeros((model.spec.num_layers, 0))
    return lens_answers(model, batches, states(model, batches))


def _validation(material: Material) -> list[Probe]:
    """Questions about drawn people who stay."""
    people = sorted({probe.subject_id for probe in material.demonstrations})
    drawn = np.random.default_rng([material.seed, _STREAM]).permutation(people)
    chosen = set(drawn[: material.limits.repertoire.lens].tolist())
    return [probe for probe in material.demonstrations if probe.subject_id in chosen]
