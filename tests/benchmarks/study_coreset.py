"""A core-set chosen by gradients against random ones: `make accept STUDY=unlearning-coreset`.

The pilot's people, original, one gold model and rates. NPO and the pilot's deep method (rau) push all 64 forgotten people, the half that
gradients choose, or a random half; five seeds of each half, and what comes out is measured of those who were left out, and of all
(`unlearning.pilot.coresets`). One number of steps for all arms: the smaller of `STEPS` under which both methods, pushing all,
leave at most one person given away. Trained models and measurements are kept in `.dataworth-accept/studies/unlearning-coreset`.
"""

import json

import torch
from corpora import STATE
from figures import record
from study_audit import Clock

from provenance import write_atomic
from trainer.checkpoint import load_model
from unlearning.material import prepare as prepare_material
from unlearning.pilot.coresets import Arm, core_sets_of, differences, measured, student, summary
from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import PILOT
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer

STUDY = "unlearning-coreset"
METHODS = ("npo", "rau")
SHARE = 0.5
SEEDS = (0, 1, 2, 3, 4)
STEPS = (100, 200)
LIMITS = AttackPlan(fine_tune_steps=(10, 25, 50))
MOST = 1200  # CPU seconds
COMMON = {
    "packages": ("torch", "numpy", "scipy"), "command": f"make accept STUDY={STUDY}", "seeds": [PILOT.seed, *SEEDS],
}  # fmt: skip


def arms():
    """All arms; both methods on all people first, then seed by seed."""
    halves = [Arm(m, choice, s) for s in SEEDS for choice in ("random", "gradient") for m in METHODS]  # fmt: skip
    return [*(Arm(method, "all", 0) for method in METHODS), *halves]


def study():
    """Train, choose, push, attack, record."""
    torch.set_num_threads(1)
    site = Site(STATE / STUDY)
    rows, table = site.rows()
    figures(rows, table, site)


class Site:
    """The study's folder with what is done."""

    def __init__(self, folder):
        self.study = prepare(folder, PILOT)
        self.folder, self.clock = folder, Clock(folder / "cpu.json")
        people = self.study.people
        tokenizer = FileTokenizer(folder / "tokenizer.json")
        self.material = prepare_material(
            people["forgotten"], people["retained"], people["lookalike"], tokenizer, LIMITS, 0
        )
        self.original = self.clock.timed("original", self.study.original)
        self.sets = self.clock.timed(
            "gradients", lambda: core_sets_of(self.study, self.load(self.original), SHARE)
        )

    def load(self, folder):
        """A model of the study."""
        return load_model(folder, PILOT.model(self.study.vocab_size)).eval()

    def measures(self, name, folder):
        """Of one model; kept."""
        file = self.folder / "measures" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            found = self.clock.timed(
                f"attacks on {name}",
                lambda: measured(self.load(folder), self.study, self.material),
            )
            write_atomic(file, json.dumps(found).encode())
        return json.loads(file.read_text())

    def whole(self, method, steps):
        """The checkpoint after so many steps of the run that pushes everybody."""
        arm = Arm(method, "all", 0)
        self.clock.timed(arm.name, lambda: self.sets.unlearned(arm, STEPS[-1], STEPS[0]))
        return self.folder / arm.name / f"step-{steps}"

    def steps(self):
        """The rule above."""
        most = 1 / len(self.sets.people)
        for steps in STEPS:
            hidden = [
                summary(
                    self.measures(f"{m}-all-0-step-{steps}", self.whole(m, steps)), self.sets.people
                )["direct"]
                for m in METHODS
            ]
            if max(hidden) <= most:
                return steps
        return STEPS[-1]

    def rows(self):
        """Name of an arm -> measures of those left out, of all and of the pushed; and the table."""
        gold = self.clock.timed("gold-0", lambda: self.study.gold(0))
        people = self.sets.people
        table = [
            {"model": name, "all": summary(self.measures(name, folder), people)}
            for name, folder in (("original", self.original), ("gold", gold))
        ]
        steps = self.steps()
        rows = {"steps": steps}
        for arm in arms():
            if arm.choice == "all":
                measures = self.measures(f"{arm.name}-step-{steps}", self.whole(arm.method, steps))
            else:
                folder = self.clock.timed(arm.name, lambda arm=arm: self.sets.unlearned(arm, steps))
                measures = self.measures(arm.name, folder)
            pushed = self.sets.chosen(arm)
            groups = {"all": people, "pushed": pushed, "rest": set(people) - set(pushed)}
            rows[arm.name] = {
                f"{group} {measure}": value
                for group, own in groups.items()
                if own
                for measure, value in summary(measures, own).items()
            }
            if arm.choice != "all":
                rows[arm.name] |= {f"{k} coverage": v for k, v in self.sets.covered(arm).items()}
            print(arm.name, rows[arm.name], flush=True)  # noqa: T201
        for method in METHODS:
            table.append({"model": f"{method}, all", "by": rows[Arm(method, "all", 0).name]})
            for choice in ("gradient", "random"):
                own = [rows[Arm(method, choice, seed).name] for seed in SEEDS]
                table.append(
                    {"model": f"{method}, {choice}"}
                    | {key: list(student([one[key] for one in own])) for key in own[0]}
                )
        return rows, table


def figures(rows, table, site):
    """Nineteen lines."""
    note = (
        f"{rows['steps']} steps, {site.sets.count} of {len(site.sets.people)} people pushed; interval: t over {len(SEEDS)} pairs of a gradient "
        "run and a random draw"
    )

    def line(name, values, bar, unit, *, kind="hypothesis", spread="t over pairs", **more):
        mean, low, high = student(values)
        number = float(bar.split()[-1])
        holds = {"high <": high < number, "high <=": high <= number, "low >": low > number, "<=": mean <= number}  # fmt: skip
        record(
            "accept.jsonl", f"unlearning.coreset.{name}", estimate=mean, low=low, high=high, level=0.95, unit=unit, n=len(values),
            spread=spread, bar=bar, holds=holds[bar.rsplit(" ", 1)[0]], what=name, note=note, kind=kind, **COMMON, **more,
        )  # fmt: skip

    def single(name, value, bar, holds, unit, n, kind="requirement", words=note):
        record(
            "accept.jsonl", f"unlearning.coreset.{name}", estimate=value, low=None, high=None, level=None, unit=unit, n=n,
            spread="one model" if n != 1 else "one run", bar=bar, holds=holds, what=name, note=words, kind=kind, **COMMON,
        )  # fmt: skip

    def choices(method, measure):
        return differences(rows, (method, "gradient"), (method, "random"), measure, SEEDS)

    line("coverage", choices("npo", "rest coverage"), "low > 0", "cosine", kind="requirement")
    original, gold = (one["all"]["recovered"] for one in table[:2])
    size = len(site.sets.people)
    single("attack", original, ">= 0.9", original >= 0.9, "share", size)
    single("gold", gold, "<= 0.04", gold <= 0.04, "share", size)
    pushed = {m: [rows[a.name]["pushed direct"] for a in arms() if a.method == m] for m in METHODS}
    line(
        "pushed",
        max(pushed.values(), key=sum),
        "<= 0.05",
        "share",
        spread="t over models",
        table=table,
    )
    for method in METHODS:
        line(f"{method}_recovered", choices(method, "rest recovered"), "high < 0", "share")
        own = [rows[Arm(method, "gradient", seed).name]["rest recovered"] for seed in SEEDS]
        line(f"{method}_erases", own, "<= 0.05", "share", spread="t over seeds")
        line(f"{method}_direct", choices(method, "rest direct"), "high < 0", "share")
        line(f"{method}_recovered_all", choices(method, "all recovered"), "high < 0", "share")
        line(f"{method}_membership", choices(method, "rest membership"), "high < 0", "AUC")
        line(f"{method}_retained", choices(method, "all retained"), "high <= 0.1", "nats per token")
    for choice in ("random", "gradient"):
        deep = differences(rows, ("rau", choice), ("npo", choice), "rest recovered", SEEDS)
        line(f"deep_{choice}", deep, "high < 0", "share")
    seconds = sum(site.clock.spent.values())
    spent = ", ".join(f"{name} {value:.0f}" for name, value in site.clock.spent.items())
    single("seconds", seconds, f"<= {MOST}", seconds <= MOST, "s", 1, words=spent)
