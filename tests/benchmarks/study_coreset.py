"""A core-set chosen by gradients against random ones: `make accept STUDY=unlearning-coreset`.

The pilot's people, original, one gold model and rates; NPO and the pilot's deep method (rau), five seeds of each choice.

    people     all 64 forgotten people are pushed, the half that gradients choose, or a random half: what is left of those left out?
    records    0.3 of the 256 records, as in the graph: by gradients, at random, or a random number line of each person first

One number of steps for all arms: the smaller of `STEPS` under which both methods, pushing all, leave at most one person given away.
Trained models and measurements are kept in `.dataworth-accept/studies/unlearning-coreset`.
"""

import json
import tomllib

import torch
from corpora import STATE
from figures import HERE, record
from study_audit import Clock

from provenance import write_atomic
from trainer.checkpoint import load_model
from unlearning.material import prepare as prepare_material
from unlearning.pilot.coreset_measures import differences, measured, student, summary
from unlearning.pilot.coresets import CHOICES, Arm, core_sets_of
from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import PILOT
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer

STUDY = "unlearning-coreset"
METHODS = ("npo", "rau")
SHARES = {"people": 0.5, "records": 0.3}
SEEDS = (0, 1, 2, 3, 4)
STEPS = (100, 200)
LIMITS = AttackPlan(fine_tune_steps=(10, 25, 50))
MOST = 1200  # CPU seconds
BARS = tomllib.loads((HERE / "acceptance.toml").read_text())
COMMON = {
    "packages": ("torch", "numpy", "scipy"), "command": f"make accept STUDY={STUDY}", "seeds": [PILOT.seed, *SEEDS],
}  # fmt: skip


def arms():
    """All arms; both methods on all people first, then unit by unit and seed by seed."""
    whole = [Arm(method, "all", 0) for method in METHODS]
    parts = [
        Arm(method, choice, seed, unit)
        for unit, choices in CHOICES.items()
        for seed in SEEDS
        for choice in choices
        for method in METHODS
        if choice != "all"
    ]
    return whole + parts


def names(method, choice, unit="people"):
    """Arms of a choice, by seed."""
    return [Arm(method, choice, seed, unit).name for seed in SEEDS]


def study():
    """Train, choose, push, attack, record."""
    torch.set_num_threads(1)
    site = Site(STATE / STUDY)
    figures(*site.rows(), site)


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
            "gradients", lambda: core_sets_of(self.study, self.load(self.original), SHARES)
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

    def row(self, arm, steps):
        """Measures of all people of an arm, of those with a pushed number line and of those left out."""
        if arm.choice == "all":
            measures = self.measures(f"{arm.name}-step-{steps}", self.whole(arm.method, steps))
        else:
            folder = self.clock.timed(arm.name, lambda: self.sets.unlearned(arm, steps))
            measures = self.measures(arm.name, folder)
        everybody, pushed = set(self.sets.people), self.sets.touched(arm)
        groups = {"all": everybody, "pushed": pushed}
        if (
            arm.unit == "people" and arm.choice != "all"
        ):  # of records, hardly anybody may be left out
            groups["rest"] = everybody - pushed
        row = {
            f"{group} {measure}": value
            for group, own in groups.items()
            for measure, value in summary(measures, own).items()
            if group == "all" or measure not in {"retained", "answered"}
        }
        return row | {"coverage": self.sets.covered(arm), "touched": len(pushed)}

    def rows(self):
        """Name of an arm -> its row; the table; the steps."""
        gold = self.clock.timed("gold-0", lambda: self.study.gold(0))
        table = [
            {"model": name, "all": summary(self.measures(name, folder), self.sets.people)}
            for name, folder in (("original", self.original), ("gold", gold))
        ]
        steps, rows = self.steps(), {}
        for arm in arms():
            rows[arm.name] = self.row(arm, steps)
            print(arm.name, rows[arm.name], flush=True)  # noqa: T201
        for method in METHODS:
            table.append({"model": f"{method}, all", "by": rows[Arm(method, "all", 0).name]})
            for unit, choices in CHOICES.items():
                for choice in choices:
                    if choice == "all":
                        continue
                    own = [rows[name] for name in names(method, choice, unit)]
                    line = {key: list(student([one[key] for one in own])) for key in own[0]}
                    table.append({"model": f"{method}, {unit} by {choice}"} | line)
        return rows, table, steps


def figures(rows, table, steps, site):
    """Twenty-five lines."""
    note = f"{steps} steps; interval: t over {len(SEEDS)} seeds, each with a draw and a training of its own"

    def line(
        name, values, bar, unit, *, kind="hypothesis", spread="t over pairs", note=note, **more
    ):
        mean, low, high = student(values)
        number = float(bar.split()[-1])
        holds = {"high <": high < number, "high <=": high <= number, "low >": low > number, "<=": mean <= number}  # fmt: skip
        record(
            "accept.jsonl", f"unlearning.coreset.{name}", estimate=mean, low=low, high=high, level=0.95, unit=unit, n=len(values),
            spread=spread, bar=bar, holds=holds[bar.rsplit(" ", 1)[0]], what=BARS[f"unlearning.coreset.{name}"]["what"], note=note, kind=kind, **COMMON, **more,
        )  # fmt: skip

    def single(name, value, bar, holds, unit, n, kind="requirement", words=note):
        record(
            "accept.jsonl", f"unlearning.coreset.{name}", estimate=value, low=None, high=None, level=None, unit=unit, n=n,
            spread="one model" if n != 1 else "one run", bar=bar, holds=holds, what=BARS[f"unlearning.coreset.{name}"]["what"], note=words, kind=kind, **COMMON,
        )  # fmt: skip

    def choices(method, measure):
        return differences(rows, names(method, "gradient"), names(method, "random"), measure)

    between, within = site.sets.cosines()
    words = f"mean cosine of gradients: of two people {between:.3f}, of two number lines of one person {within:.3f}"
    line(
        "coverage", choices("npo", "coverage"), "low > 0", "cosine", kind="requirement", note=words
    )
    original, gold = (one["all"]["recovered"] for one in table[:2])
    size = len(site.sets.people)
    single("attack", original, ">= 0.9", original >= 0.9, "share", size)
    single("gold", gold, "<= 0.04", gold <= 0.04, "share", size)
    whole = [arm for arm in arms() if arm.unit == "people"]
    pushed = {m: [rows[a.name]["pushed direct"] for a in whole if a.method == m] for m in METHODS}
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
        own = [rows[name]["rest recovered"] for name in names(method, "gradient")]
        line(f"{method}_erases", own, "<= 0.05", "share", spread="t over seeds")
        line(f"{method}_direct", choices(method, "rest direct"), "high < 0", "share")
        line(f"{method}_recovered_all", choices(method, "all recovered"), "high < 0", "share")
        line(f"{method}_membership", choices(method, "rest membership"), "high < 0", "AUC")
        line(f"{method}_retained", choices(method, "all retained"), "high <= 0.1", "nats per token")
        mine, drawn, spread = (names(method, c, "records") for c in CHOICES["records"])
        apart = differences(rows, mine, drawn, "all recovered")
        line(f"records_{method}_recovered", apart, "high < 0", "share")
        apart = differences(rows, mine, spread, "all recovered")
        line(f"records_{method}_spread", apart, "high < 0", "share")
        own = [rows[name]["all recovered"] for name in mine]
        line(f"records_{method}_erases", own, "<= 0.05", "share", spread="t over seeds")
    for choice in ("random", "gradient"):
        deep = differences(rows, names("rau", choice), names("npo", choice), "rest recovered")
        line(f"deep_{choice}", deep, "high < 0", "share")
    seconds = sum(site.clock.spent.values())
    spent = ", ".join(f"{name} {value:.0f}" for name, value in site.clock.spent.items())
    single("seconds", seconds, f"<= {MOST}", seconds <= MOST, "s", 1, words=spent)
