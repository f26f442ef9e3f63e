"""Does taking records away do what their values say? `make accept STUDY=removal-sotu` and `removal-peps`.

Each replicate draws its own 256 records and targets of 64, values the records by EK-FAC's mean over target_value (averaged over models
of two seeds), and retrains without the most helpful, the most harmful and random ones, under a seed of its own. What is judged is the
loss on target_test, so an interval over replicates holds all that is random: records, targets, values and trainings. (With one draw and 24
seeds of training, the order at 40 % was the wrong one on `sotu`, -0.043 (-0.060 to -0.025) nats: decided, and of that one draw only.)

Two buyers: `everyone` wants the owners' texts in general, `some` those of a few owners, as in `study_pays.py`.
"""

from dataclasses import replace

import numpy as np
from corpora import STATE, corpus, excerpts, write
from figures import record
from setting import BANK, setting
from study_pays import BUYERS
from study_planted import PACKAGES, values

from valuation.curves import Curve, curve

REPLICATES = tuple(range(100, 116))
SHARES = (0.1, 0.4)
RECORDS, QUERIES = 256, 64
ARMS = ("random", "top", "bottom")


def drawn(name, replicate, buyer):
    """The setting of a replicate's records with target_value, and with target_test."""
    folder = STATE / f"{name}-removal-{replicate}"
    digest = write(folder / "train", excerpts(name, "train", RECORDS, replicate))
    base = setting(corpus(name, RECORDS, 24))
    only = BUYERS[name] if buyer == "some" else None
    configs = []
    for part in ("target_value", "target_test"):
        target = folder / f"{buyer}-{part}"
        target_digest = write(target, excerpts(name, part, QUERIES, replicate, only))
        changes = {"train": folder / "train", "train_digest": digest}
        configs.append(replace(base, target=target, target_digest=target_digest, **changes))
    return *configs, folder


def losses(name, replicate, buyer):
    """Mean loss on target_test by arm and share."""
    value_config, test_config, folder = drawn(name, replicate, buyer)
    cached = folder / f"{buyer}-values.npy"
    if not cached.exists():
        np.save(cached, values(value_config, (1000 + replicate, 2000 + replicate)))
    value_N = np.load(cached)
    return {
        arm: curve(test_config, value_N, arm, SHARES, (replicate,), BANK).loss_RF for arm in ARMS
    }


def study(name):
    """Loss without the most helpful, the most harmful and random records, for both buyers."""
    for buyer in ("everyone", "some"):
        found = [losses(name, replicate, buyer) for replicate in REPLICATES]
        arms = {
            arm: Curve(np.array(SHARES), np.concatenate([of[arm] for of in found])) for arm in ARMS
        }
        figure(name, buyer, "top", arms, "random", 0.1, "low > 0")
        figure(name, buyer, "bottom", arms, "random", 0.1, "high < 0")
        figure(name, buyer, "curve", arms, "bottom", 0.4, "low > 0")


def figure(name, buyer, label, arms, other, share, bar):
    """One line: an arm's loss less another's at a share."""
    arm = "bottom" if label == "bottom" else "top"
    gap = arms[arm].difference(arms[other], share)
    requirement = label != "curve"
    record(
        "accept.jsonl", f"valuation.removal.{name}.{buyer}.{label}", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="nats per token", n=len(REPLICATES), seeds=list(REPLICATES), spread="Student over replicates", bar=bar,
        kind="requirement" if requirement else "hypothesis", holds=gap.low > 0 if bar == "low > 0" else gap.high < 0,
        what=f"loss without the {arm} {share:.0%} less loss without the {other} {share:.0%}, target of {buyer}",
        table={a: [round(float(x), 4) for x in of.loss_RF.mean(0)] for a, of in arms.items()}, packages=PACKAGES, note="",
        command=f"make accept STUDY=removal-{name}",
    )  # fmt: skip
