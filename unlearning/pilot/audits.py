"""Audits of a study: every model is attacked once, and each audit is put together from the rows of its models.

An attack depends on the model, the questions and the plan's seed only. So the rows of original and gold serve the audits of all
methods: eight audits cost eight models more, not forty. What is kept is `FOLDER/rows/MODEL.parquet`, one file per model. A verdict is
judged once, from tables: at 300 people a model has a hundred thousand rows.

Beside the plan's attacks each model is asked about look-alikes (nobody could have learned them) and about retained people (what
utility means here), under the attacks `control/lookalike` and `control/retained`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unlearning.attacks.direct import ask
from unlearning.attacks.fine_tune import fine_tune
from unlearning.canaries import epsilon_from_scores
from unlearning.endpoints import membership_scores
from unlearning.equivalence import Distance, distance
from unlearning.material import prepare
from unlearning.measuring import measurements, random_model, secondary_measurements
from unlearning.pilot.models import KEY
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.probes import FileTokenizer, trained_probes
from unlearning.rows import SCHEMA, Evidence, Row, opaque_id, read_rows, to_table, write_rows
from unlearning.verdict import verdict_from_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.pilot.models import Study
    from unlearning.rows import Measurement
    from unlearning.verdict import Verdict

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Audits:
    """A study with the attacks of its audits."""

    study: Study
    limits: AttackPlan
    material: Material
    _tables: dict[str, pa.Table] = field(default_factory=dict, repr=False)
    _verdicts: dict[tuple[str, tuple[str, ...], str], Verdict] = field(default_factory=dict, repr=False)  # fmt: skip
    _seen: dict[str, Evidence] = field(default_factory=dict, repr=False)

    @property
    def golds(self) -> list[str]:
        """Names of the gold models."""
        return [f"gold-{seed}" for seed in range(self.study.profile.golds)]

    def rows(self, name: str) -> pa.Table:
        """Rows of one model, measured at the first call; their role is "original" until an audit gives them one.

        Args:
            name: original, gold-N, a method of the profile, or random.
        """
        path = self.study.folder / "rows" / f"{name}.parquet"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            model, digest = self._model(name)
            found = self._controls(model)
            for _, attack in (*measurements(), *secondary_measurements(self.limits.repertoire)):
                found += attack(model, self.material)
            write_rows(path, to_table(self._rows_of(found, digest)))
        if name not in self._tables:
            self._tables[name] = read_rows(path)
        return self._tables[name]

    def audit(self, unlearned: str, golds: Sequence[str] | None = None, lr: str = "") -> Verdict:
        """The verdict on one model; judged once.

        Args:
            unlearned: name of the model under audit.
            golds: names of the gold models, default all: a gold model under audit stands among them, since three distinct ones are needed, and its
                distance from itself is none, which an envelope over gold models can't use.
            lr: another learning rate of tier 3; its rows are measured again for these models.

        Returns:
            The verdict of the plan's rule.
        """
        chosen = tuple(self.golds if golds is None else golds)
        key = (unlearned, chosen, lr)
        if key not in self._verdicts:
            self._verdicts[key] = self._judged(*key)
        return self._verdicts[key]

    def _judged(self, unlearned: str, golds: tuple[str, ...], lr: str) -> Verdict:
        roles = [("original", "original"), ("unlearned", unlearned), *(("gold", g) for g in golds)]
        limits = dataclasses.replace(self.limits, fine_tune_lr=lr) if lr else self.limits
        chosen, digests = [], {}
        for role, name in roles:
            table = self.rows(name)
            digests[role, name] = _digest_of(table)
            if lr:
                cooler = pc.starts_with(table["attack"], "fine_tune/")
                table = pa.concat_tables(
                    [table.filter(pc.invert(cooler)), self._hotter(name, limits)]
                )
            chosen.append(_as_role(table, role))
        random = self.rows(RANDOM)
        random = random.filter(pc.equal(random["attack"], "utility"))
        chosen.append(_as_role(random, RANDOM))
        people = self.study.profile.counts
        plan = AuditPlan(
            num_forgotten=people["forgotten"], num_retained=people["retained"], num_lookalikes=people["lookalike"],
            original=digests["original", "original"], unlearned=digests["unlearned", unlearned],
            gold=tuple(digests["gold", g] for g in golds), attacks=limits, random_init=_digest_of(random),
        )  # fmt: skip
        return verdict_from_rows(pa.concat_tables(chosen), plan)

    def evidence(self, name: str) -> tuple[Evidence, tuple[str, str]]:
        """Rows of one model as evidence, and the key that it has there."""
        table = self.rows(name)
        if name not in self._seen:
            self._seen.clear()  # hundreds of megabytes for all models, and they are asked about one after the other
            self._seen[name] = Evidence(table)
        return self._seen[name], ("original", _digest_of(table))

    def rate(self, name: str, *attacks: str, population: str = "forgotten") -> float:
        """Share of people whom one of the attacks gives away."""
        evidence, model = self.evidence(name)
        return float(evidence.per_person(model, attacks, "exact_match", population)[1].mean())

    def epsilon(self, name: str) -> float:
        """One-run bound from the losses; indicative, since the cut into forgotten and look-alikes is no set of coins."""
        evidence, model = self.evidence(name)
        scores = membership_scores(evidence, model)
        most = sum(map(len, scores))
        return epsilon_from_scores(*scores, [r for r in (16, 32, 64, 128) if r <= most])

    def forget_quality(self, name: str, gold: str) -> Distance:
        """TOFU's test: distance of the truth ratios from gold's."""
        return distance(*(self._values(n, "truth_ratio", "log_truth_ratio") for n in (name, gold)))

    def exposure(self, name: str) -> float:
        """Median bits ahead of chance."""
        return float(np.median(self._values(name, "exposure", "exposure")))

    def model(self, name: str) -> Transformer:
        """A model of the study by its name."""
        return self._model(name)[0]

    def _values(self, name: str, attack: str, score: str) -> NDArray[np.float64]:
        evidence, model = self.evidence(name)
        return evidence.per_person(model, [attack], score)[1]

    def _hotter(self, name: str, limits: AttackPlan) -> pa.Table:
        model, digest = self._model(name)
        found = fine_tune(model, dataclasses.replace(self.material, limits=limits))
        return to_table(self._rows_of(found, digest))

    def _controls(self, model: Transformer) -> list[Measurement]:
        tokenizer = FileTokenizer(self.study.folder / "tokenizer.json")
        found = []
        for population in ("lookalike", "retained"):
            probes = trained_probes(self.study.people[population], tokenizer)
            measured = ask(model, probes, f"control/{population}")
            found += [dataclasses.replace(m, population=population) for m in measured]
        return found

    def _model(self, name: str) -> tuple[Transformer, str]:
        from trainer.root import state_root
        from unlearning.ensemble import load, root_of

        study = self.study
        shape = study.profile.model(study.vocab_size)
        if name == RANDOM:
            model = random_model(shape, 0)
            return model, state_root(model.state_dict())
        folder = _folder(study, name)
        return load(folder, shape), root_of(folder)

    def _rows_of(self, measured: Sequence[Measurement], digest: str) -> list[Row]:
        return [
            Row(
                opaque_id(KEY, m.subject), m.population, self.material.groups.get(m.subject, "") if m.population == "forgotten" else "",
                m.probe, "original", digest, m.attack, m.score, m.value,
            )
            for m in measured
        ]  # fmt: skip


def audits_of(study: Study, limits: AttackPlan) -> Audits:
    """Audits of a study.

    Args:
        study: people and models.
        limits: attacks of the plan.

    Returns:
        Audits; nothing is measured yet.
    """
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    people = study.people
    material = prepare(
        people["forgotten"], people["retained"], people["lookalike"], tokenizer, limits, 0
    )
    return Audits(study, limits, material)


def _digest_of(table: pa.Table) -> str:
    return table["model_digest"][0].as_py()


def _as_role(table: pa.Table, role: str) -> pa.Table:
    """The same rows under another role; sorted rows of one model stay sorted."""
    column = table.schema.get_field_index("model")
    return table.set_column(column, SCHEMA.field("model"), pa.array([role] * len(table)))


def _folder(study: Study, name: str) -> Path:
    if name == "original":
        return study.original()
    if name.startswith("gold-"):
        return study.gold(int(name.removeprefix("gold-")))
    return study.unlearned(name)
