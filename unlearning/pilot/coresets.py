"""Which half of the forgotten people is pushed, and what that does to the other half: by gradients, at random, or all of them.

::

    arm = (method, choice, seed)        choice: all | gradient | random         rest = forgotten people who are not pushed

    people ─▶ gradient per person ─▶ core_set ───┐
                            random_set(seed) ────┼─▶ sealed file ─▶ run of the method ─▶ asked, attacked, told apart
                                   all ──────────┘   (of the pushed)  (retains nobody of the forgotten)

People are the unit, not records: the three lines with a person's number share the secret, and whoever has one line pushed is not left out.
A person's gradient is the sum over the person's lines. All arms have the same steps and push the same number of records, so that each
record of a half is pushed twice as often as one of all.

A gradient core-set is one set, a random one is a draw: the difference of the two is taken by pairs of trainings, gradient with seed s less random
draw s with seed s, and its interval is Student's over the pairs. It holds what another draw *and* another training would change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.attacks.fine_tune import attacked, drawn_batches
from unlearning.attacks.membership import losses
from unlearning.methods.coreset import core_set, coverage, random_set, sketched_gradients
from unlearning.methods.forget_retain import Forgotten
from unlearning.people import by_subject
from unlearning.pilot.models import KEY, record_lines
from unlearning.probes import FileTokenizer, secret_in, trained_probes, unseen_probes
from unlearning.scoring import score_probes
from unlearning.statistics import auc

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.people import Record
    from unlearning.pilot.models import Study

CHOICES = ("all", "gradient", "random")
_STREAM = 31


@dataclass(frozen=True, slots=True)
class Arm:
    """One unlearning of the study."""

    method: str
    choice: str
    """One of `CHOICES`."""
    seed: int
    """Of the run, and of a random draw."""

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"{self.method}-{self.choice}-{self.seed}"


@dataclass(frozen=True, slots=True)
class CoreSets:
    """A study whose forgotten people are pushed in part."""

    study: Study
    count: int
    """People of a core-set."""
    people: tuple[str, ...]
    """All forgotten people, N."""
    gradients_NP: NDArray[np.float64]
    """One sketched gradient per person, at the original."""

    def chosen(self, arm: Arm) -> tuple[str, ...]:
        """People whom an arm pushes.

        Raises:
            ValueError: for a choice that is none.
        """
        size = len(self.people)
        if arm.choice == "all":
            places = list(range(size))
        elif arm.choice == "gradient":
            places = sorted(core_set(self.gradients_NP, self.count))
        elif arm.choice == "random":
            places = random_set(size, self.count, np.random.default_rng([_STREAM, arm.seed]))
        else:
            raise ValueError(f"expected a choice of {CHOICES}, got {arm.choice!r}")
        return tuple(self.people[place] for place in places)

    def covered(self, arm: Arm) -> dict[str, float]:
        """Mean coverage of all people and of those left out, see `coverage`."""
        chosen = set(self.chosen(arm))
        places = [n for n, person in enumerate(self.people) if person in chosen]
        covered_N = coverage(self.gradients_NP, places)
        rest = [n for n in range(len(self.people)) if n not in places]
        return {"all": float(covered_N.mean()), "rest": float(covered_N[rest].mean())}

    def unlearned(self, arm: Arm, steps: int, stride: int = 0) -> Path:
        """The arm's last checkpoint; trained at the first call.

        Args:
            arm: what to push.
            steps: of the run.
            stride: steps between two checkpoints, 0 = only the last.
        """
        from provenance.canonical import write_atomic
        from provenance.sealing import seal

        file = f"{arm.name}.sealed"
        if not (self.study.folder / file).exists():  # a seal has a random nonce
            own = set(self.chosen(arm))
            pushed = [one for one in self.study.people["forgotten"] if one.subject in own]
            write_atomic(self.study.folder / file, seal(KEY, record_lines(pushed)))
        return self.study.forgotten_run(
            arm.name, arm.method, steps=steps, stride=stride or steps, sealed=file, seed=arm.seed
        )


def core_sets_of(study: Study, original: Transformer, share: float) -> CoreSets:
    """Gradients of the study's forgotten people.

    Args:
        study: with its original trained.
        original: that model.
        share: of the people in a core-set, in (0, 1].
    """
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    probes = trained_probes(study.people["forgotten"], tokenizer)
    cut = [Forgotten((*p.prompt_tokens, *p.secret_tokens), len(p.prompt_tokens)) for p in probes]
    sketches_RP = sketched_gradients(original, cut)
    people = tuple(sorted({probe.subject_id for probe in probes}))
    owners = np.array([probe.subject_id for probe in probes])
    gradients_NP = np.stack([sketches_RP[owners == person].sum(0) for person in people])
    return CoreSets(study, max(1, round(share * len(people))), people, gradients_NP)


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
    rows: Mapping[str, Mapping[str, float]], first: tuple[str, str], second: tuple[str, str], measure: str, seeds: Sequence[int]
) -> list[float]:  # fmt: skip
    """One arm less another, by seed.

    Args:
        rows: name of an arm → measure → value.
        first: its method and choice.
        second: the other's.
        measure: key of the values.
        seeds: which pairs.
    """
    return [
        rows[Arm(*first, seed).name][measure] - rows[Arm(*second, seed).name][measure]
        for seed in seeds
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
