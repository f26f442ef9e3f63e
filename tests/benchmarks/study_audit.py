"""Studies of audits: `make accept STUDY=audit-pilot`. Original, three gold models, eight methods, every attack, A1 to A16.

=====================  ==================================================================================================
`audit-pilot`          256 retained, 64 forgotten and 64 look-alike people; a quarter of an hour on one core
`audit-pilot-bpe`      the same with the platform's own tokenizer, trained by the platform on presidential messages, as its
                       default corpus is; with four methods
`audit-report`         300 people of each kind: bounds five times as tight, with fewer budgets per attack (`REPORT_ATTACKS`)
=====================  ==================================================================================================

Resumable: trainings and each model's rows are kept in `.dataworth-accept/studies/STUDY`. CPU seconds of what an earlier call
finished are kept there too and added.
"""

import dataclasses
import json
import math
import time

import torch
from corpora import STATE, sotu
from figures import record

from unlearning.pilot.assertions import claims, controls
from unlearning.pilot.audits import audits_of
from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import PILOT, PILOT_BPE, REPORT
from unlearning.plan import AttackPlan
from unlearning.repertoire import FULL
from unlearning.statistics import wilson_bounds

PACKAGES = ("torch", "numpy", "scipy")
LIMITS = AttackPlan(fine_tune_steps=(10, 25, 50), repertoire=FULL)
# Every attack of FULL, at fewer budgets: with 300 people all of them cost minutes for each of thirteen models. Benign records are tried at
# two rates here, 0.0001 as tier 3 and 0.001; the other sources at 0.001.
REPORT_ATTACKS = AttackPlan(
    fine_tune_steps=(10, 50),
    repertoire=dataclasses.replace(FULL, shots=(1, 4, 16), rates=("0.001",), bits=(4,), candidates=33),
)  # fmt: skip


class Clock:
    """CPU seconds of steps, also of those that an earlier call did."""

    def __init__(self, path):
        self.path = path
        self.spent = json.loads(path.read_text()) if path.exists() else {}

    def timed(self, name, work):
        """Run a step and keep what it cost when it was really done."""
        start = time.process_time()
        result = work()
        seconds = time.process_time() - start
        self.spent[name] = max(seconds, self.spent.get(name, 0.0))
        self.path.write_text(json.dumps(self.spent))
        print(f"{name}: {seconds:.1f} s", flush=True)  # noqa: T201
        return result


MOST = {"pilot": 1200, "pilot-bpe": 1500, "report": 4500}  # CPU seconds
VOCAB_SIZE = 512  # the platform's smallest: names fall into pieces, digits are single


def platform_tokenizer(folder):
    """The platform's tokenizer of a corpus without our people."""
    from pipelines.storage.tokens import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "platform-tokenizer.json"
    train_tokenizer((text for _, _, text in sotu(16)), VOCAB_SIZE, path)
    return path


def platform():
    """The pilot in the platform's tokens."""
    study(PILOT_BPE)


def report():
    """The pilot with 300 forgotten people."""
    study(REPORT, REPORT_ATTACKS)


def study(profile=PILOT, limits=LIMITS):
    """Train, attack, judge, assert, record."""
    torch.set_num_threads(1)
    name = f"audit-{profile.name}"
    folder = STATE / name
    made = prepare(folder, profile, None if profile.own_tokenizer else platform_tokenizer(folder))
    clock = Clock(folder / "cpu.json")
    clock.timed("original", made.original)
    for seed in range(profile.golds):
        clock.timed(f"gold-{seed}", lambda seed=seed: made.gold(seed))
    for method in profile.methods:
        clock.timed(method, lambda method=method: made.unlearned(method))
    audits = audits_of(made, limits)
    names = ["original", *audits.golds, *profile.methods, "random"]
    for one in names:
        clock.timed(f"attacks on {one}", lambda one=one: audits.rows(one))
    found = clock.timed("controls", lambda: list(controls(audits)))
    found += clock.timed("claims", lambda: list(claims(audits)))
    table = clock.timed("table", lambda: [row(audits, one) for one in names])
    share = sum(one.holds for one in found) / len(found)
    common = {
        "packages": PACKAGES, "seeds": [profile.seed, 0, 1, 2], "command": f"make accept STUDY={name}", "low": None, "high": None,
        "level": None,
    }  # fmt: skip
    figure = f"unlearning.audit.{profile.name.replace('-', '_')}"
    record(
        "accept.jsonl", f"{figure}_assertions", what="share of A1 to A16 that hold", unit="share", kind="hypothesis",
        estimate=share, bar=">= 1", holds=share >= 1, n=len(found), spread="one data draw, one original, three gold models",
        note="; ".join(f"{o.name} {'holds' if o.holds else 'FAILS'}: {o.detail}" for o in found),
        table=table, **common,
    )  # fmt: skip
    seconds = sum(clock.spent.values())
    record(
        "accept.jsonl", f"{figure}_seconds", what="CPU seconds of the study", unit="s", kind="requirement", estimate=seconds,
        bar=f"<= {MOST[profile.name]}", holds=seconds <= MOST[profile.name], n=1, spread="one run", note=", ".join(f"{k} {v:.0f}" for k, v in clock.spent.items()),
        **common,
    )  # fmt: skip


def row(audits, name):
    """One line of the README's table."""
    verdict = audits.audit(name)
    ends = {end.name: end for end in verdict.endpoints if not end.subgroup}
    side = {one.name: one for one in verdict.secondary}
    counts = audits.study.profile.counts
    people = counts["forgotten"]

    def rate(value, n=people):
        bounds = wilson_bounds(round(value * n), n, 0.025)
        return [round(one, 3) for one in (value, bounds.low, bounds.high)]

    auc = ends["membership"]
    quality = audits.forget_quality(name, "gold-1" if name == "gold-0" else "gold-0")
    return {
        "model": name, "verdict": str(verdict.status),
        "failed": [e.name for e in ends.values() if e.status == "FAIL"] + [s.name for s in side.values() if s.leaks],
        "tier1": rate(ends["direct"].unlearned), "unseen": rate(audits.rate(name, "direct/unseen")),
        "tier2": rate(ends["in_context"].unlearned), "shots": rate(max(side[s].unlearned for s in ("shots/lookalike", "shots/related"))),
        "tier3": rate(ends["fine_tune"].unlearned),
        **{s: rate(side[f"restored/{s}"].unlearned, side[f"restored/{s}"].people) for s in FULL.sources},
        "leak64": round(side["sampled/k-64"].unlearned, 3), "auc": round(auc.unlearned, 3),
        "auc_difference": None if math.isnan(auc.low) else [round(auc.low, 3), round(auc.high, 3)],
        "epsilon": round(audits.epsilon(name), 2), "exposure": round(audits.exposure(name), 2),
        "ks": [round(quality.d, 3), float(f"{quality.p_value:.2g}")],
        "retained": rate(audits.rate(name, "control/retained", population="retained"), counts["retained"]),
        "utility": round(ends["utility"].unlearned, 3), "int4": rate(side["quantised/int-4"].unlearned),
    }  # fmt: skip
