"""What an unlearning of some leaves of the others, and how two ways to choose are compared.

A gradient core-set is one set, a random one is a draw: their difference is taken by pairs of trainings, gradient with seed s less random draw s
with seed s, and its interval is Student's over the pairs. It holds what another draw *and* another training would change, and not what other people
would.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.attacks.fine_tune import attacked, drawn_batches
from unlearning.attacks.membership import losses
from unlearning.people import by_subject
from unlearning.probes import FileTokenizer, secret_in, trained_probes, unseen_probes
from unlearning.scoring import score_probes
from unlearning.statistics import auc

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.people import Record
    from unlearning.pilot.models import Study


def measured(model: Transformer, study: Study, material: Material) -> dict[str, Any]:
    """What a model gives away of each forgotten person, and what it costs those who stay.

    Args:
        model: any model of the study, not changed.
        study: people.
        material: batches and budget of the fine-tuning attack, records for the losses.

    Returns:
        `people`: person → `direct` (0 or 1: some question brings the number out), `steps` (step of the attack → the same) and `loss` (mean
        over the person's records, nats per token); `strangers`: the same loss of each look-alike; `retained`: mean loss over retained
        records; `answered`: share of retained people whose number still comes out.
    """
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    forgotten = study.people["forgotten"]
    found: dict[str, Any] = {
        person: {"direct": given, "steps": {}}
        for person, given in _given_away(model, forgotten, tokenizer).items()
    }
    limits = material.limits
    batches = [[material.retained[i].tokens for i in batch] for batch in drawn_batches(material)]
    for step, after in attacked(model, batches, limits.fine_tune_lr, limits.fine_tune_steps):
        for person, given in _given_away(after, forgotten, tokenizer).items():
            found[person]["steps"][str(step)] = given
    for person, loss in _losses(model, material, "forgotten").items():
        found[person]["loss"] = loss
    stayed = _given_away(model, study.people["retained"], tokenizer)
    return {
        "people": found,
        "strangers": list(_losses(model, material, "lookalikes").values()),
        "retained": float(np.mean(list(_losses(model, material, "retained").values()))),
        "answered": float(np.mean(list(stayed.values()))),
    }


def summary(measures: Mapping[str, Any], people: Collection[str]) -> dict[str, float]:
    """What was measured, of some of the forgotten people.

    Args:
        measures: of `measured`.
        people: whom to look at, at least one.

    Returns:
        `direct` and `recovered` (best step of the attack), shares; `membership`, AUC of minus the loss against strangers; `retained` and
        `answered` as they are.
    """
    own = [measures["people"][person] for person in sorted(people)]
    rates = [np.mean([one["steps"][step] for one in own]) for step in own[0]["steps"]]
    members_N = -np.array([one["loss"] for one in own])
    return {
        "direct": float(np.mean([one["direct"] for one in own])),
        "recovered": float(max(rates)),
        "membership": auc(members_N, -np.array(measures["strangers"])),
        "retained": measures["retained"],
        "answered": measures["answered"],
    }


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its two-sided 95 % interval of Student's t.

    Args:
        values: at least two, independent.

    Returns:
        (mean, low, high); mean ± t(0.975, n - 1) · s / sqrt(n).

    Raises:
        ValueError: for fewer than two values, which have no spread.
    """
    from scipy.stats import t

    count = len(values)
    if count < 2:
        raise ValueError(f"expected at least two values for an interval, got {count}")
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)
    return mean, mean - half, mean + half


def differences(
    rows: Mapping[str, Mapping[str, float]],
    first: Sequence[str],
    second: Sequence[str],
    measure: str,
) -> list[float]:
    """Arms less others, by pairs.

    Args:
        rows: name of an arm → measure → value.
        first: names, by seed.
        second: names, by seed.
        measure: key of the values.

    Returns:
        One difference per seed.
    """
    return [
        rows[one][measure] - rows[other][measure] for one, other in zip(first, second, strict=True)
    ]


def _given_away(
    model: Transformer, records: Sequence[Record], tokenizer: FileTokenizer
) -> dict[str, float]:
    """Person → 1.0 if the number comes out in some phrasing, trained or not."""
    numbered = [one for one in records if secret_in(one.text)]
    probes = [*trained_probes(numbered, tokenizer), *unseen_probes(records, tokenizer)]
    found = dict.fromkeys(by_subject(numbered), 0.0)
    for probe, exact in zip(probes, score_probes(model, probes).exact_N, strict=True):
        found[probe.subject_id] = max(found[probe.subject_id], float(exact))
    return found


def _losses(model: Transformer, material: Material, population: str) -> dict[str, float]:
    """Person → mean loss over the person's records."""
    own: dict[str, list[float]] = {}
    for one in losses(model, getattr(material, population), population, "membership"):
        own.setdefault(one.subject, []).append(one.value)
    return {person: float(np.mean(values)) for person, values in sorted(own.items())}
