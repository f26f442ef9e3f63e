"""Which part of the forgotten people, or of their records, is pushed: by gradients, at random, or all.

::

    arm = (method, choice, seed, unit)

    records ─▶ sketched gradient of each ─▶ core_set ───┐
                                   random_set(seed) ────┼─▶ sealed file ─▶ run of the method ─▶ asked, attacked, told apart
                                          all ──────────┘   (of the pushed)  (retains nobody of the forgotten)

**unit "people"**: all lines of a person are pushed or none, so that it is clear who was left out. A person's gradient is the sum over the lines.
**unit "records"**: single lines, as in the graph. Three lines of a person share a number, and pushing one pushes all three; `spread`
(a random number line of each person first) is the control that knows whose line is whose and asks no gradient.

All arms have the same steps and push the same number of records, so that each record of a half is pushed twice as often as one of all.
`coreset_measures` says what is measured and how arms are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.methods.coreset import core_set, coverage, random_set, sketched_gradients
from unlearning.methods.forget_retain import Forgotten
from unlearning.pilot.models import KEY, record_lines
from unlearning.probes import FileTokenizer, secret_in, trained_probes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from unlearning.people import Record
    from unlearning.pilot.models import Study

CHOICES = {"people": ("all", "gradient", "random"), "records": ("gradient", "random", "spread")}
"""Unit → how a part is chosen."""
_STREAM = 31


@dataclass(frozen=True, slots=True)
class Arm:
    """One unlearning of the study."""

    method: str
    choice: str
    """One of the unit's `CHOICES`."""
    seed: int
    """Of the run, and of a random draw."""
    unit: str = "people"
    """What is chosen: people or records."""

    @property
    def name(self) -> str:
        """Name of its run."""
        unit = "" if self.unit == "people" else f"-{self.unit}"
        return f"{self.method}{unit}-{self.choice}-{self.seed}"


@dataclass(frozen=True, slots=True)
class CoreSets:
    """A study whose forgotten people are pushed in part."""

    study: Study
    shares: dict[str, float]
    """Unit → share that is pushed, in (0, 1]."""
    records: tuple[Record, ...]
    """All forgotten records, R."""
    sketches_RP: NDArray[np.float64]
    """Sketched gradient of each at the original."""
    people: tuple[str, ...]
    """All forgotten people, N."""
    gradients_NP: NDArray[np.float64]
    """One per person: the sum of the person's."""

    def chosen(self, arm: Arm) -> list[Record]:
        """Records that an arm pushes.

        Raises:
            ValueError: for a choice that its unit does not have.
        """
        if arm.choice not in CHOICES.get(arm.unit, ()):
            raise ValueError(f"expected a choice of {CHOICES}, got {arm.choice!r} of {arm.unit!r}")
        generator = np.random.default_rng([_STREAM, arm.seed])
        share = self.shares[arm.unit]
        if arm.unit == "people":
            own = {self.people[place] for place in self._places(arm.choice, self.gradients_NP, share, generator)}  # fmt: skip
            return [one for one in self.records if one.subject in own]
        if arm.choice == "spread":
            places = self._spread(max(1, round(share * len(self.records))), generator)
        else:
            places = self._places(arm.choice, self.sketches_RP, share, generator)
        return [self.records[place] for place in places]

    def touched(self, arm: Arm) -> set[str]:
        """People of whom a line with the number is pushed."""
        return {one.subject for one in self.chosen(arm) if secret_in(one.text)}

    def covered(self, arm: Arm) -> float:
        """Mean coverage (see `coverage`) of what an arm leaves out, people or records; 1 if it leaves nothing out."""
        chosen = self.chosen(arm)
        if arm.unit == "people":
            names, gradients_NP = self.people, self.gradients_NP
            own = {one.subject for one in chosen}
        else:
            names, gradients_NP = tuple(one.record_id for one in self.records), self.sketches_RP
            own = {one.record_id for one in chosen}
        places = [place for place, name in enumerate(names) if name in own]
        rest = [place for place, name in enumerate(names) if name not in own]
        return float(coverage(gradients_NP, places)[rest].mean()) if rest else 1.0

    def cosines(self) -> tuple[float, float]:
        """Mean cosine of the gradients of two people, and of two number lines of one person: along what a push can spread."""
        unit_NP = self.gradients_NP / np.linalg.norm(self.gradients_NP, axis=1, keepdims=True)
        unit_RP = self.sketches_RP / np.linalg.norm(self.sketches_RP, axis=1, keepdims=True)
        owner_R = np.array([one.subject for one in self.records])
        numbered_R = np.array([secret_in(one.text) is not None for one in self.records])
        same_RR = (owner_R[:, None] == owner_R) & (numbered_R[:, None] & numbered_R)
        same_RR &= ~np.eye(len(owner_R), dtype=bool)
        apart_NN = ~np.eye(len(unit_NP), dtype=bool)
        return float((unit_NP @ unit_NP.T)[apart_NN].mean()), float((unit_RP @ unit_RP.T)[same_RR].mean())  # fmt: skip

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
            sealed = seal(KEY, record_lines(self.chosen(arm)))
            write_atomic(self.study.folder / file, sealed)
        return self.study.forgotten_run(
            arm.name, arm.method, steps=steps, stride=stride or steps, sealed=file, seed=arm.seed
        )

    @staticmethod
    def _places(
        choice: str, gradients_NP: NDArray[np.float64], share: float, generator: np.random.Generator
    ) -> list[int]:
        size = len(gradients_NP)
        count = max(1, round(share * size))
        if choice == "all":
            return list(range(size))
        if choice == "gradient":
            return sorted(core_set(gradients_NP, count))
        return random_set(size, count, generator)

    def _spread(self, count: int, generator: np.random.Generator) -> list[int]:
        """A random number line of each person, people in random order, then any lines."""
        lines: dict[str, list[int]] = {}
        for place, one in enumerate(self.records):
            if secret_in(one.text):
                lines.setdefault(one.subject, []).append(place)
        first = [own[generator.integers(len(own))] for own in lines.values()]
        first = [first[place] for place in generator.permutation(len(first))]
        left = [place for place in range(len(self.records)) if place not in first]
        rest = [left[place] for place in generator.permutation(len(left))]
        return sorted([*first, *rest][:count])


def core_sets_of(study: Study, original: Transformer, shares: dict[str, float]) -> CoreSets:
    """Gradients of the study's forgotten people.

    Args:
        study: with its original trained.
        original: that model.
        shares: unit → share that is pushed, in (0, 1].
    """
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    known = {one.record_id: one for one in study.people["forgotten"]}
    probes = trained_probes(study.people["forgotten"], tokenizer)
    cut = [Forgotten((*p.prompt_tokens, *p.secret_tokens), len(p.prompt_tokens)) for p in probes]
    sketches_RP = sketched_gradients(original, cut)
    people = tuple(sorted({probe.subject_id for probe in probes}))
    owners = np.array([probe.subject_id for probe in probes])
    gradients_NP = np.stack([sketches_RP[owners == person].sum(0) for person in people])
    records = tuple(known[probe.record_id] for probe in probes)
    return CoreSets(study, shares, records, sketches_RP, people, gradients_NP)
