"""Exact erasure by shards, audited: `make accept STUDY=audit-sharded`. Two shards, three gold ensembles, every attack.

`audit-sharded-160` is the same audit of 160 forgotten people, with fewer budgets per secondary attack and without the deletions of single people:
with 64 people membership was open, also of two of the three gold ensembles, and the report said that 159 would decide.

The pilot's 384 made-up people. The released model is the mean of two models; the 64 forgotten people all stand in shard 0, which is trained again
without them (`unlearning.pilot.sharded`). Then two people are deleted, each alone, and the digests are held against a training over tokens in
which the person never stood. Resumable, as the other studies of audits.

`SHOTS` was looked up on the original alone, as tier 3's rate was: after 1, 2, 3, 4 lines it gives away 14, 8, 4, 4 of 64. With pages across shards it
was 2, 0, 0, 0, and the tier had no power: a page of people whom a model doesn't know teaches it that lines can't be told.
"""

import json

import torch
from corpora import STATE
from figures import record
from scipy.stats import binomtest
from study_audit import REPORT_ATTACKS, Clock, row

from unlearning.endpoints import Status
from unlearning.ensemble import read_ensemble
from unlearning.pilot.audits import audits_of
from unlearning.pilot.profiles import SHARDED, SHARDED_160
from unlearning.pilot.sharded import METHOD, prepare_sharded, subjects
from unlearning.plan import AttackPlan
from unlearning.repertoire import FULL

PACKAGES = ("torch", "numpy", "scipy")
SHOTS = 1
LIMITS = AttackPlan(demonstrations=SHOTS, fine_tune_steps=(10, 25, 50), repertoire=FULL)
MORE_LIMITS = AttackPlan(
    demonstrations=SHOTS, fine_tune_steps=(10, 25, 50), repertoire=REPORT_ATTACKS.repertoire
)
MOST = 1200  # CPU seconds


def more():
    """The audit with 160 forgotten people."""
    made, clock = begun(SHARDED_160)
    judged(made, clock, MORE_LIMITS)


def study():
    """The audit with 64, and two people deleted alone."""
    made, clock = begun(SHARDED)
    asked = subjects(made.people["forgotten"])
    deleted = [deletion(made, clock, person) for person in (asked[0], asked[-1])]
    right = [held for one in deleted for held in one["compared"].values()]
    common = common_of(made)
    record(
        "accept.jsonl", "unlearning.audit.sharded_digests", what="share of comparisons of digests that hold", unit="share", kind="requirement",
        estimate=sum(right) / len(right), bar=">= 1", holds=all(right), n=len(right), spread="bit for bit",
        note="; ".join(f"person {n}: {', '.join(f'{k} {v}' for k, v in one['compared'].items())}" for n, one in enumerate(deleted, 1)), **common,
    )  # fmt: skip
    cost = max(one["share"] for one in deleted)
    record(
        "accept.jsonl", "unlearning.audit.sharded_share", what="largest share of a training for one person", unit="share", kind="requirement",
        estimate=cost, bar="<= 0.5", holds=cost <= 0.5, n=len(deleted), spread="counted in steps", note="two shards, one slice each", **common,
    )  # fmt: skip
    judged(made, clock, LIMITS)


def begun(profile):
    """A study with all its ensembles, and its clock."""
    torch.set_num_threads(1)
    made = prepare_sharded(STATE / f"audit-{profile.name}", profile)
    clock = Clock(made.folder / "cpu.json")
    clock.timed("original", made.original)
    clock.timed(METHOD, lambda: made.unlearned(METHOD))
    for seed in range(profile.golds):
        clock.timed(f"gold-{seed}", lambda seed=seed: made.gold(seed))
    return made, clock


def common_of(made):
    """What every line of a study says."""
    return {
        "packages": PACKAGES, "command": f"make accept STUDY=audit-{made.profile.name}", "seeds": [made.profile.seed, 0, 1, 2, 3], "low": None,
        "high": None, "level": None,
    }  # fmt: skip


def judged(made, clock, limits):
    """Attack every model, judge the erased one, record."""
    audits, figure = (
        audits_of(made, limits),
        f"unlearning.audit.{made.profile.name.replace('-', '_')}",
    )
    names, common = ["original", METHOD, *audits.golds], common_of(made)
    for name in [*names, "random"]:
        clock.timed(f"attacks on {name}", lambda name=name: audits.rows(name))
    verdict = clock.timed("verdict", lambda: audits.audit(METHOD))
    table = clock.timed("table", lambda: [row(audits, name) for name in names])
    ends = [end for end in verdict.endpoints if not end.subgroup]
    leaks = ends[0].original
    interval = binomtest(round(leaks * ends[0].people), ends[0].people).proportion_ci(0.95)
    record(
        "accept.jsonl", f"{figure}_original", what="share of the forgotten people given away when asked", unit="share", kind="requirement",
        estimate=leaks, bar=">= 0.95", holds=leaks >= 0.95, n=ends[0].people, spread="Clopper-Pearson over people",
        note=f"power in the tiers: {', '.join(f'{e.name} {e.original:.3f} ({e.has_power})' for e in ends[:3])}",
        **common | {"low": float(interval.low), "high": float(interval.high), "level": 0.95},
    )  # fmt: skip
    passed = sum(end.status is Status.PASS for end in ends) / len(ends)
    value = passed if verdict.status is Status.PASS else 0.0
    record(
        "accept.jsonl", f"{figure}_verdict", what=f"verdict {verdict.status}; share of primary endpoints that PASS", unit="share",
        kind="requirement", estimate=value, bar=">= 1", holds=value >= 1, n=len(ends), spread="one data draw, one original, three gold ensembles",
        note="; ".join(verdict.reasons), table=table, controls=[[c.name, c.holds] for c in verdict.controls], **common,
    )  # fmt: skip
    seconds = sum(clock.spent.values())
    record(
        "accept.jsonl", f"{figure}_seconds", what="CPU seconds of the study", unit="s", kind="requirement", estimate=seconds,
        bar=f"<= {MOST}", holds=seconds <= MOST, n=1, spread="one run", note=", ".join(f"{k} {v:.0f}" for k, v in clock.spent.items()), **common,
    )  # fmt: skip


def deletion(made, clock, person):
    """One person deleted, and a training where the person never was.

    Args:
        made: the study.
        clock: of the study.
        person: a forgotten one.

    Returns:
        `compared` (claim → whether it holds) and `share` of a training.
    """
    name = f"without-{person}"
    shard = made.shape(0).place(person.encode())[0]
    folder, never = made.folder / name, made.folder / "never-held" / person
    spent = (
        made.folder / f"{name}.json"
    )  # of the call that trained: a later one finds everything and spends nothing
    if not spent.exists():
        _, done = clock.timed(name, lambda: made.ensemble(name, 0, frozenset([person])))
        spent.write_text(json.dumps(done.share))
    other = made.never_held(person, never)
    clock.timed(f"never-held-{person}", other.original)
    before, now, fresh = (
        [one.root for one in read_ensemble(where)]
        for where in (made.folder / "original", folder, never / "original")
    )
    return {
        "share": json.loads(spent.read_text()),
        "compared": {
            "equal to a training that never held the person": now == fresh,
            "the person's shard changed": now[shard] != before[shard],
            "the other shard didn't": now[1 - shard] == before[1 - shard],
        },
    }  # fmt: skip
