"""Single records by shadow models: `make accept STUDY=audit-ulira`. 24 small models, canaries in or out by committed coins, NPO, gold.

32 canaries beside 64 retained people (`profiles.SHADOWS`). Each canary is in each model by a coin of its own; the coins' seed is the digest of a
commit that was there before this study, and `acceptance.toml` holds what was committed to. Every model is a target once, and the others are its
shadows (`unlearning.pilot.shadows`). NPO runs at the pilot's rate; on one model outside this study 80 steps hid every number and left 0.59 of the
retained people answered, 160 left all of them answered and made every canary less likely than one that was never in. Both are measured.

A threshold may look either way: it is given the better of both directions. Resumable: trainings and scores are kept.
"""

import hashlib
import json
import tomllib

import numpy as np
import torch
from corpora import STATE
from figures import HERE, record
from study_audit import Clock

from unlearning.canaries import epsilon_from_scores
from unlearning.coins import checked_coins, throw_coins
from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import SHADOWS
from unlearning.pilot.shadows import RATES, Shadows, evidence, told

PACKAGES = ("torch", "numpy", "scipy")
SEED = hashlib.sha256(b"73fd919ee3bd5f87188ca9b142504311eef3c0e3").digest()
MODELS, GOLDS, STEPS = 24, 4, (80, 160)
BUDGETS = (16, 32)
DRAWS = 100  # coins thrown again for each gold model, which has seen none
MOST = 720  # CPU seconds


def study():
    """Train, ask, judge, record."""
    torch.set_num_threads(1)
    folder = STATE / "audit-ulira"
    shadows = Shadows(prepare(folder, SHADOWS), SEED, MODELS, STEPS)
    bars = tomllib.loads((HERE / "acceptance.toml").read_text())
    committed = bars["unlearning.ulira.epsilon"]["coins"]
    in_JN = checked_coins(SEED, shadows.names, committed).reshape(MODELS, -1)
    clock = Clock(folder / "cpu.json")
    kinds = {"original": [], **{f"npo-{step}": [] for step in STEPS}, "gold": []}
    for j in range(MODELS):
        kinds["original"].append(scored(shadows, clock, f"original-{j}", lambda j=j: [shadows.original(j)])[0])  # fmt: skip
        for step, found in zip(STEPS, scored(shadows, clock, f"npo-{j}", lambda j=j: shadows.npo(j)), strict=True):  # fmt: skip
            kinds[f"npo-{step}"].append(found)
    kinds["gold"] = [scored(shadows, clock, f"gold-{g}", lambda g=g: [shadows.gold(g)])[0] for g in range(GOLDS)]  # fmt: skip
    p = {kind: np.array([one["p"] for one in found]) for kind, found in kinds.items()}
    judged = {kind: clock.timed(f"judge {kind}", lambda kind=kind: judge(p[kind], p[kind], in_JN, own=True)) for kind in list(kinds)[:-1]}  # fmt: skip
    tiled = p["gold"][np.arange(MODELS) % GOLDS]  # each gold model under the coins of six originals
    for kind in list(judged):
        judged[f"gold by {kind}"] = clock.timed(f"judge gold by {kind}", lambda kind=kind: judge(tiled, p[kind], in_JN, own=False))  # fmt: skip
    table = [row(name, *both) for name, both in judged.items()]
    kept = {kind: [round(float(v), 3) for v in np.quantile([one["retained"] for one in found], [0, 0.5, 1])] for kind, found in kinds.items()}  # fmt: skip
    common = {
        "packages": PACKAGES, "command": "make accept STUDY=audit-ulira", "seeds": [SHADOWS.seed, *range(MODELS + GOLDS)], "unit": "share",
        "n": MODELS, "level": 0.95, "spread": "95 %, 500 resamples of models and of 32 canaries",
    }  # fmt: skip

    def record_it(name, **figure):
        record("accept.jsonl", f"unlearning.ulira.{name}", **common | figure)

    first, _ = judged["original"]
    record_it(
        "original", what="true positive rate at 1 % of the per-record test, originals", kind="requirement", estimate=first.rates[0], low=first.rate_lows[0],
        high=None, bar=">= 0.9", holds=first.rates[0] >= 0.9, table=table, note=f"retained people answered (least, median, most): {kept}",
    )  # fmt: skip
    null = judged[f"gold by npo-{STEPS[0]}"][0]
    record_it(
        "gold", what="AUC of the per-record test on gold", kind="requirement", estimate=null.auc, low=null.low, high=null.high,
        bar="0.5 within the interval", holds=null.low <= 0.5 <= null.high, note="coins of 24 originals, four gold models in turn",
    )  # fmt: skip
    for step in STEPS:
        single, crowd = judged[f"npo-{step}"]
        record_it(
            f"npo_{step}", what=f"AUC of the per-record test after {step} steps of NPO", kind="hypothesis", estimate=single.auc, low=single.low, high=single.high,
            bar="none", holds=None, note=f"at {RATES}: {single.rates}; the better threshold: AUC {crowd.auc:.3f}, {crowd.rates}",
        )  # fmt: skip
        low, high = np.quantile(single.drawn_B - crowd.drawn_B, [0.025, 0.975])
        record_it(
            f"npo_{step}_gain", what="AUC of the per-record test less that of the better threshold", kind="hypothesis", estimate=single.auc - crowd.auc,
            low=float(low), high=float(high), bar="> 0", holds=bool(low > 0), note="on the same resamples; holds = the whole interval lies above",
        )  # fmt: skip
    spent = [epsilon_from_scores(p["original"][j][in_JN[j]], p["original"][j][~in_JN[j]], BUDGETS) for j in range(MODELS)]  # fmt: skip
    record_it(
        "epsilon", what="one-run lower bound of epsilon, median of the originals", unit="nats", kind="requirement", estimate=float(np.median(spent)),
        low=float(min(spent)), high=float(max(spent)), level=None, bar=">= 1.5", holds=bool(np.median(spent) >= 1.5), spread="least and most of 24 models",
        note=f"32 committed coins a model; after NPO: {[round(float(np.median([epsilon_from_scores(q[i], q[~i], BUDGETS) for q, i in zip(p[f'npo-{s}'], in_JN, strict=True)])), 2) for s in STEPS]}",
    )  # fmt: skip
    drawn = [
        epsilon_from_scores(q[i], q[~i], BUDGETS)
        for g, q in enumerate(p["gold"])
        for i in (throw_coins(SEED, [f"gold/{g}/{d}/{one}" for one in shadows.canaries]) for d in range(DRAWS))
    ]  # fmt: skip
    above = float(np.mean(np.array(drawn) > 0))
    record_it(
        "epsilon_gold", what="share of coins under which a gold model shows more than nothing", kind="requirement", estimate=above, low=None, high=None, level=None,
        bar="<= 0.05", holds=above <= 0.05, n=len(drawn), spread="one number", note=f"largest {max(drawn):.2f}",
    )  # fmt: skip
    seconds = sum(clock.spent.values())
    record_it(
        "seconds", what="CPU seconds of the study", unit="s", kind="requirement", estimate=seconds, low=None, high=None, level=None, bar=f"<= {MOST}",
        holds=seconds <= MOST, n=1, spread="one run", note=f"{MODELS} originals, {MODELS} runs of NPO, {GOLDS} gold models",
    )  # fmt: skip


def scored(shadows, clock, name, train):
    """Scores of a run's checkpoints, kept in a file."""
    path = shadows.study.folder / f"{name}.json"
    if not path.exists():

        def work():
            found = [shadows.scores(folder) for folder in train()]
            return [{"p": p.tolist(), "retained": kept} for p, kept in found]

        found = clock.timed(name, work)
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


def judge(target_TN, shadow_JN, in_JN, *, own):
    """The per-record test and the better threshold, on the same canaries and resamples."""
    found = evidence(target_TN, shadow_JN, in_JN, own=own)
    score = np.where(np.isnan(found), np.nan, target_TN)
    single, up, down = (told(one, in_JN, np.random.default_rng(0)) for one in (found, score, -score))  # fmt: skip
    return single, max(up, down, key=lambda one: one.auc)


def row(name, single, crowd):
    """One line of the README's table."""
    return {"models": name, "per_record": numbers(single), "threshold": numbers(crowd)}


def numbers(one):
    """A judgement, rounded."""
    return {
        "auc": [round(v, 3) for v in (one.auc, one.low, one.high)],
        "rates": [
            [round(a, 3), round(b, 3)] for a, b in zip(one.rates, one.rate_lows, strict=True)
        ],
    }
