"""The engineer's measurements of an audit: depth of forgetting, ripples, and ripples by part of the model. They decide nothing.

Written as rows like all others (`rows.SCHEMA`), to a file of their own, `engineering.parquet`, because the verdict is a function of
`rows.parquet` alone and asks every model the same, which these do not::

    depth/layer-N      patch_drop, lens_logprob      one per question of a forgotten person and model            (`depth`)
                       cka_erasure, cka_weight       one per model, under the id "everybody"
    ripple/OTHER       gradient_dot, gradient_cosine, representation_cosine, representation_cka, semantic, damage, damage_first
                                                     one per target (the row's person) and other person          (`association`, `damage`)
    ripple             steps, rise, reached          one per target
    part/PART          applied_ and reverted_ loss, facts, outranked                  one per other person       (`grafts`)
                       update_norm                   unlearned from original, under "everybody"; gold from the first gold likewise
    part/all           applied_loss, applied_facts, applied_outranked                 the whole damage of the unlearned model
    gold_difference    loss, facts, outranked        a gold model less the first gold, per other person: the null
    kept/layer-N       kept_logprob                  one per question of a person who stays and model            (`downstream`)
                       cka_original, cka_gold        one per model, under "everybody"; left out where a stream doesn't vary

Of an ensemble the logit lens alone is defined (`ensemble.UNDEFINED` has the reasons), for each constituent as for any model, read by its own
head, so that its last layer says what the constituent says::

    lens/constituent-K/layer-N   lens_logprob          one per question of a forgotten person and model

"facts" is the share of a person's own questions that greedy decoding no longer answers. "outranked" is 1 where the person's own number is not the
likeliest of `OTHERS` + 1 numbers of as many digits: it also sees what is still known of facts that are not said (no row for people without a number). No row holds a text or a gradient; people
appear by the ids of the audit's rows. Each of the four stages is kept as soon as it is made (`rows.part-TAG-…`), so that a killed
audit goes on with the next one.

Cost: depth half a forward pass per layer and model; kept one pass per model; ripple `targets` times at most `max_steps` small steps; parts two evaluations of the
others per part. At most three copies of the model are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.attacks.memorised import OTHERS, bits_of
from unlearning.errors import PlanError
from unlearning.measuring import give_back, parts_tag
from unlearning.rows import Row, opaque_id, read_rows, to_table, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from trainer.spec import ModelSpec
    from unlearning.association import Person
    from unlearning.audit import Inputs
    from unlearning.material import Material
    from unlearning.probes import Probe

FILE = "engineering.parquet"
MEASURED = ("loss", "facts", "outranked")
_STREAM = 10
EVERYBODY = "everybody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured; in the run's settings, so that it stands in the run's digest."""

    questions: int = 128
    """Most questions of the depth measures, the first ones."""
    targets: int = 8
    """People who are pushed out alone, the first ones."""
    others: int = 64
    """People who stay that the damage is measured on, the first ones."""
    max_steps: int = 40
    """Most steps of one push."""

    def __post_init__(self) -> None:
        """Refuse a scale that measures nothing."""
        for one in fields(self):
            value = getattr(self, one.name)
            if type(value) is not int or value < 1:
                raise PlanError(f"expected engineering.{one.name} as a whole number >= 1, got {value!r}")  # fmt: skip

    @classmethod
    def from_json(cls, values: Any) -> Scale:
        """Read the setting `engineering` of an audit.

        Args:
            values: some of the fields.

        Returns:
            The scale.

        Raises:
            PlanError: for an unknown field or a wrong value.
        """
        known = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise PlanError(f"expected engineering with some of {sorted(known)}, got {values!r}")
        return cls(**values)


@dataclass(frozen=True, slots=True, repr=False)
class Bench:
    """What the three stages share; without a `repr`, so that no log can show it."""

    shape: ModelSpec
    inputs: Inputs
    material: Material
    scale: Scale

    def load(self, role: str, number: int = 0) -> Transformer:
        """One of the audit's models, in evaluation mode."""
        from unlearning.ensemble import load

        give_back()
        model = load(self.models(role)[number][1], self.shape)
        give_back()
        return model

    def compared(self) -> list[tuple[str, int]]:
        """(role, number) of the models that are compared, in order."""
        roles = ("original", "unlearned", "gold")
        return [(role, number) for role in roles for number in range(len(self.models(role)))]

    @property
    def divided(self) -> bool:
        """Whether one of them is an ensemble."""
        from unlearning.ensemble import read_ensemble

        return any(read_ensemble(self.models(role)[number][1]) for role, number in self.compared())

    def questions(self) -> list[Probe]:
        """What the depth measures ask."""
        public = self.material.questions.public
        probes = [probe for probe in self.material.trained if probe.record_id not in public]
        return probes[: self.scale.questions]

    def models(self, role: str) -> list[tuple[str, Path]]:
        """(digest, folder) of the models of a role."""
        return [(digest, folder) for name, folder, digest in self.inputs.models if name == role]

    def id(self, subject: str) -> str:
        """A person's id in rows."""
        return opaque_id(self.inputs.key, subject)

    def targets(self) -> list[Person]:
        """Who is pushed out alone."""
        from unlearning.association import people_of

        return people_of(self.inputs.forgotten, self.material.forgotten)[: self.scale.targets]

    def others(self) -> list[Person]:
        """Who stays."""
        from unlearning.association import people_of

        return people_of(self.inputs.retained, self.material.retained)[: self.scale.others]


def measure_engineering(
    shape: ModelSpec, directory: Path, inputs: Inputs, material: Material, scale: Scale
) -> int:
    """Measure every stage that has no part yet (of ensembles the lens only), and write `engineering.parquet`.

    Args:
        shape: shape of all models.
        directory: the run's folder.
        inputs: checked inputs.
        material: what is asked with.
        scale: how much.

    Returns:
        Number of rows; 0, and no file, without a gold model to measure against.
    """
    bench = Bench(shape, inputs, material, scale)
    if not bench.models("gold"):
        return 0
    tag = parts_tag(shape, inputs)
    rows: list[Row] = []
    stages: tuple[tuple[str, Callable[[Bench], Iterator[Row]]], ...]
    stages = ("depth", depth_rows), ("ripple", ripple_rows), ("parts", part_rows), ("kept", kept_rows)  # fmt: skip
    if bench.divided:
        stages = (("lens", lens_rows),)
    for name, stage in stages:
        part = directory / f"rows.part-{tag}-{name}.parquet"
        if not part.exists():
            write_rows(part, to_table(stage(bench)))
        rows += [Row(**row) for row in read_rows(part).to_pylist()]
    write_rows(directory / FILE, to_table(rows))
    return len(rows)


def depth_rows(bench: Bench) -> Iterator[Row]:
    """Patching, lens and CKA of every model."""
    from unlearning.depth import cka_erasure, lens_logprobs, patch_drops, sites, states

    probes = bench.questions()
    original = bench.load("original")
    batches = sites(probes, original)
    seen = {key: states(bench.load(*key), batches) for key in bench.compared()}
    for (role, number), source in seen.items():
        digest = bench.models(role)[number][0]
        drops_LN = patch_drops(original, batches, source)
        lens_LN = lens_logprobs(original, batches, source)
        cka = cka_erasure(seen["original", 0], source, seen["gold", 0])
        for layer in range(len(drops_LN)):
            attack = f"depth/layer-{layer + 1}"
            for place, probe in enumerate(probes):
                for score, value in (("patch_drop", drops_LN[layer, place]), ("lens_logprob", lens_LN[layer, place])):  # fmt: skip
                    yield _row(bench.id(probe.subject_id), "forgotten", probe.phrasing, (role, digest), attack, score, value)  # fmt: skip
            for score, value in (("cka_erasure", cka.erasure_L[layer]), ("cka_weight", cka.weight_L[layer])):  # fmt: skip
                yield _row(EVERYBODY, "forgotten", 0, (role, digest), attack, score, value)


def lens_rows(bench: Bench) -> Iterator[Row]:
    """Logit lens of every constituent of every model, each read by its own head."""
    from unlearning.depth import lens_logprobs, sites, states
    from unlearning.ensemble import members

    probes = bench.questions()
    for role, number in bench.compared():
        model = (role, bench.models(role)[number][0])
        for place, part in enumerate(members(bench.load(role, number)), start=1):
            batches = sites(probes, part)
            lens_LN = lens_logprobs(part, batches, states(part, batches))
            for layer, values_N in enumerate(lens_LN, start=1):
                attack = f"lens/constituent-{place}/layer-{layer}"
                for probe, value in zip(probes, values_N, strict=True):
                    yield _row(bench.id(probe.subject_id), "forgotten", probe.phrasing, model, attack, "lens_logprob", value)  # fmt: skip


def ripple_rows(bench: Bench) -> Iterator[Row]:
    """Ties and damage of every pair of a target and another person."""
    from unlearning.association import (
        TIES,
        gradient_ties,
        last_states,
        representation_ties,
        semantic_ties,
    )
    from unlearning.damage import damages, person_losses

    targets, others = bench.targets(), bench.others()
    goal_T = person_losses(bench.load("gold"), targets)
    done = damages(lambda: bench.load("original"), targets, others, goal_T, bench.scale.max_steps)
    original = bench.load("original")
    found = (
        *gradient_ties(original, targets, others),
        *representation_ties(last_states(original, targets), last_states(original, others)),
        semantic_ties(targets, others),
    )
    pairs = dict(zip(TIES, found, strict=True))
    pairs |= {"damage": done.damage_TN, "damage_first": done.first_TN}
    model = ("original", bench.models("original")[0][0])
    for row, target in enumerate(targets):
        subject = bench.id(target.subject)
        alone = {"steps": done.steps_T[row], "rise": done.rise_T[row], "reached": done.reached_T[row]}  # fmt: skip
        for score, value in alone.items():
            yield _row(subject, "forgotten", 0, model, "ripple", score, value)
        for column, other in enumerate(others):
            attack = f"ripple/{bench.id(other.subject)}"
            for score, values_TN in pairs.items():
                yield _row(subject, "forgotten", 0, model, attack, score, values_TN[row, column])


def part_rows(bench: Bench) -> Iterator[Row]:
    """Grafts of the unlearned model, and what gold models differ by among themselves."""
    from unlearning.grafts import grafts, update_norms

    others = bench.others()
    people = [bench.id(other.subject) for other in others]
    questions, numbers = _questions(bench, others), _numbers(bench, others)

    def measure(model: Transformer) -> NDArray[np.float64]:
        outranked = [_outranked(model, *numbers[one.subject]) if one.subject in numbers else np.nan for one in others]  # fmt: skip
        return np.stack([*_damage(model, others, questions), np.array(outranked)])

    def told(model: tuple[str, str], attack: str, scores: Mapping[str, NDArray[np.float64]]) -> Iterator[Row]:  # fmt: skip
        for score, values_N in scores.items():
            for person, other, value in zip(people, others, values_N, strict=True):
                if other.subject in numbers or not score.endswith("outranked"):
                    yield _row(person, "retained", 0, model, attack, score, value)

    original, changed = bench.load("original"), bench.load("unlearned")
    model = ("unlearned", bench.models("unlearned")[0][0])
    whole_KN = measure(changed) - measure(original)
    yield from told(model, "part/all", {f"applied_{name}": whole_KN[k] for k, name in enumerate(MEASURED)})  # fmt: skip
    for one in grafts(original, dict(changed.named_parameters()), measure):
        attack = f"part/{one.part}"
        yield _row(EVERYBODY, "retained", 0, model, attack, "update_norm", one.norm)
        sides = (("applied", one.applied), ("reverted", one.reverted))
        scores = {f"{side}_{name}": gap_KN[k] for side, gap_KN in sides for k, name in enumerate(MEASURED)}  # fmt: skip
        yield from told(model, attack, scores)
    del original, changed
    golds = bench.models("gold")
    if len(golds) < 2:
        return
    first = bench.load("gold")
    base_KN, weights = measure(first), dict(first.named_parameters())
    for number, (digest, _) in enumerate(golds[1:], start=1):
        other = bench.load("gold", number)
        gap_KN = measure(other) - base_KN
        yield from told(("gold", digest), "gold_difference", dict(zip(MEASURED, gap_KN, strict=True)))  # fmt: skip
        for part, norm in update_norms(weights, dict(other.named_parameters())).items():
            yield _row(EVERYBODY, "retained", 0, ("gold", digest), f"part/{part}", "update_norm", norm)  # fmt: skip
        del other  # before the next one is read


def kept_rows(bench: Bench) -> Iterator[Row]:
    """People who stay, after every layer of every model."""
    from unlearning.downstream import streams

    probes = [probe for mine in _questions(bench, bench.others()) for probe in mine]
    if not probes:
        return
    for one in streams(bench.load, bench.compared(), probes):
        model = (one.role, bench.models(one.role)[one.number][0])
        for layer, values_N in enumerate(one.kept_LN):
            attack = f"kept/layer-{layer + 1}"
            for probe, value in zip(probes, values_N, strict=True):
                yield _row(bench.id(probe.subject_id), "retained", probe.phrasing, model, attack, "kept_logprob", value)  # fmt: skip
            for score, cka in (("cka_original", one.cka_original_L[layer]), ("cka_gold", one.cka_gold_L[layer])):  # fmt: skip
                if np.isfinite(cka):
                    yield _row(EVERYBODY, "retained", 0, model, attack, score, cka)


def _questions(bench: Bench, others: list[Person]) -> list[list[Probe]]:
    """The questions about each of the others, in their order."""
    found: dict[str, list[Probe]] = {other.subject: [] for other in others}
    for probe in bench.material.demonstrations:
        if probe.subject_id in found:
            found[probe.subject_id].append(probe)
    return list(found.values())


def _numbers(
    bench: Bench, others: list[Person]
) -> dict[str, tuple[Probe, tuple[tuple[int, ...], ...]]]:
    """A question about the number of each of the others who has one, and other numbers that fit it."""
    from unlearning.people import by_subject
    from unlearning.questions import candidates_of, other_numbers

    chosen = {other.subject for other in others}
    people = by_subject([r for r in bench.inputs.retained if r.subject in chosen])
    generator = np.random.default_rng([bench.inputs.plan.seed, _STREAM])
    return candidates_of(people, other_numbers(people, OTHERS, generator), bench.inputs.tokenizer)


def _outranked(model: Transformer, probe: Probe, others: tuple[tuple[int, ...], ...]) -> float:
    """1.0 where another number is as likely as the person's own, or likelier."""
    return float(bits_of(model, probe, others) < np.log2(len(others) + 1))


def _damage(
    model: Transformer, others: list[Person], questions: list[list[Probe]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean loss of each person, and the share of the person's questions that greedy decoding doesn't answer."""
    from unlearning.damage import person_losses
    from unlearning.scoring import score_probes

    asked = [probe for mine in questions for probe in mine]
    right = iter(score_probes(model, asked).exact_N if asked else ())
    missed = [1.0 - np.mean([next(right) for _ in mine]) if mine else 0.0 for mine in questions]
    return person_losses(model, others), np.array(missed, dtype=np.float64)


def _row(subject: str, population: str, probe: int, model: tuple[str, str], attack: str, score: str, value: Any) -> Row:  # fmt: skip
    return Row(
        subject_id=subject, population=population, subgroup="", probe=probe, model=model[0], model_digest=model[1], attack=attack,
        score=score, value=float(value),
    )  # fmt: skip
