"""Made-up rows of an audit: who is given away under which attack, as sets of people; used by the tests of verdicts."""

import numpy as np

from unlearning.plan import AttackPlan, AuditPlan
from unlearning.rows import Row, to_table
from unlearning.verdict import verdict_from_rows

STEPS = (10, 25)
ORIGINAL, UNLEARNED, GOLD, GOLD_2, GOLD_3 = MODELS = (
    ("original", "o"),
    ("unlearned", "u"),
    ("gold", "g1"),
    ("gold", "g2"),
    ("gold", "g3"),
)


def plan_of(n=64, gold=("g1", "g2", "g3"), lookalikes=None, **changes):
    """A plan for n forgotten, 20 retained and as many look-alikes as forgotten people."""
    lookalikes = n if lookalikes is None else lookalikes
    values = {"num_forgotten": n, "num_retained": 20, "num_lookalikes": lookalikes, "gold": gold}
    attacks = AttackPlan(fine_tune_steps=STEPS)
    return AuditPlan(
        original="o", unlearned="u", attacks=attacks, resamples=400, **(values | changes)
    )


class Facts:
    """What each model did; defaults are a clean erasure, every attribute is model -> value."""

    def __init__(self, n=64, models=MODELS, lookalikes=None, groups=None):
        self.n, self.models = n, models
        self.lookalikes = n if lookalikes is None else lookalikes
        self.groups = groups or {}
        everybody = set(range(n))
        self.direct = {m: everybody if m == ORIGINAL else set() for m in models}
        self.in_context = dict(self.direct)
        self.fine_tune = {m: [s, s] for m, s in self.direct.items()}
        self.shift = {m: -3.0 if m == ORIGINAL else 0.0 for m in models}
        self.utility = dict.fromkeys(models, 0.5)

    def rows(self):
        """One row per measurement."""
        found = []
        noise = np.random.default_rng(3).normal(size=2 * (self.n + self.lookalikes))
        for role, digest in self.models:
            m = (role, digest)

            def add(population, person, attack, score, value, probe=0, m=m):
                subject = f"{population}-{person:04d}"
                group = self.groups.get(person, "") if population == "forgotten" else ""
                found.append(
                    Row(subject, population, group, probe, *m, attack, score, float(value))
                )

            for person in range(self.n):
                # The second phrasing never leaks: one leaking question must be enough.
                add("forgotten", person, "direct/trained", "exact_match", person in self.direct[m])
                add("forgotten", person, "direct/trained", "exact_match", 0, probe=1)
                add("forgotten", person, "in_context", "exact_match", person in self.in_context[m])
                for step, leaked in zip(STEPS, self.fine_tune[m], strict=True):
                    add(
                        "forgotten",
                        person,
                        f"fine_tune/step-{step}",
                        "exact_match",
                        person in leaked,
                    )
                if self.lookalikes:
                    add(
                        "forgotten", person, "membership", "loss", 5 + noise[person] + self.shift[m]
                    )
            for person in range(self.lookalikes):
                add("lookalike", person, "membership", "loss", 5 + noise[self.n + person])
            for person in range(20):
                add("retained", person, "utility", "loss", self.utility[m] + 0.01 * noise[person])
        return found

    def judge(self, plan=None):
        """The verdict on these facts."""
        golds = tuple(d for r, d in self.models if r == "gold")
        plan = plan or plan_of(self.n, golds, self.lookalikes)
        return verdict_from_rows(to_table(self.rows()), plan)
