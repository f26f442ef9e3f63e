"""What the damping does to EK-FAC and to conjugate gradients, on a corpus whose table isn't published: `make accept STUDY=damping-sotu`.

On `kinds` and `peps` conjugate gradients are not above EK-FAC (`study_influence.py`). Three causes can be told apart here, at 12 queries of
`sotu` and the 60 half subsets of `setting.py`:

    residual    is the damped system solved?  |g - (G + D) x| / |g| after the steps
    damping     D = c mean(Lam_l) I: LDS of both methods over c. Both invert above c and flatten below, but EK-FAC's eigenvalues are smoothed
                by its Kronecker form, so the same c doesn't remove the same directions
    stopping    a training of T steps fits a direction of curvature h only where h > D_t / sum_t lr_t, D_t AdamW's preconditioner (the quadratic
                limit of arXiv 2405.12186). In units of c:  c_stop = T' mean(sqrt(v)) / (sum_t lr_t mean(Lam_l)), T' labels of a document,
                as Lam is of summed losses and training of mean ones. No loss of a retraining enters: it is a default that may be shipped.

The bank is about 200 CPU seconds, conjugate gradients about 9 per query and 10 steps. Resumable: each result is a file.
"""

import sys

import numpy as np
import torch
from corpora import corpus
from figures import record
from own_influence import HOW, Job
from setting import bank_losses
from study_influence import PACKAGES, job, rng

from valuation.evaluation import lds, lds_difference
from valuation.influence import ekfac, ekfac_cg
from valuation.influence.factors import fit

QUERIES = 12
DAMPINGS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
SOLVED = ((0.1, 10), (1.0, 10), (10.0, 6))
"""(damping, steps) of conjugate gradients; the first was the default then."""

CHOSEN = (10.0, 6)
"""(damping, steps) of conjugate gradients with the highest LDS of `SOLVED` on `sotu`."""

TUNED = (30.0, 8)
"""The same that `study_finetuned.py` chose: does it help from scratch too?"""


def kept(path, compute):
    """(scores, residual) from a file, or computed."""
    if not path.exists():
        scores = compute()
        np.savez(
            path, scores_QN=scores.scores_QN, residual=float(scores.notes.get("residual", "nan"))
        )
    with np.load(path) as file:
        return file["scores_QN"], float(file["residual"])


def stopping(own, factors):
    """c_stop of every parameter, from the checkpoints' moments and rates alone."""
    steps = own.checkpoints
    total = (
        sum(float(own.arrays[f"{s}/lr"]) for s in steps) * steps[0]
    )  # a sum over steps by its 4 samples
    labels = factors.tokens / factors.documents
    last, found = steps[-1], {}
    for name, block in factors.blocks.items():
        second = torch.from_numpy(own.arrays[f"{last}/optimizer/{name}.exp_avg_sq"])
        root = float(second.sqrt().mean())
        found[name] = labels * root / (total * float(block.eigenvalues.mean()))
    return found


def study(name):
    """Both methods over the dampings."""
    found = corpus(name, 256, 24)
    folder = job(found)
    own = Job(folder)
    queries, factors = own.queries.take(range(QUERIES)), fit(own.model, own.train, HOW)
    stops = stopping(own, factors)
    print("c_stop", {n: round(c, 3) for n, c in stops.items()}, flush=True)  # noqa: T201 - this program's output
    member_MN, loss_RMQ = bank_losses(found, (0,))
    loss_MQ, table, scores = loss_RMQ[0][:, :QUERIES], {}, {}
    jobs = [
        (
            f"ekfac-{c:g}",
            lambda c=c: ekfac.scores(
                own.model, own.train, queries, damping=c, factors=factors, how=HOW
            ),
        )
        for c in DAMPINGS
    ]
    jobs += [
        (f"cg-{c:g}-{steps}", lambda c=c, steps=steps: ekfac_cg.scores(own.model, own.train, queries, damping=c, steps=steps, factors=factors, how=HOW))
        for c, steps in SOLVED
    ]  # fmt: skip
    for label, compute in jobs:
        scores[label], residual = kept(folder / f"damping-{label}.npz", compute)
        got = lds(scores[label], member_MN, loss_MQ, rng())
        table[label] = {
            "lds": round(got.lds.estimate, 4), "low": round(got.lds.low, 4), "high": round(got.lds.high, 4),
            "residual": None if np.isnan(residual) else residual,
        }  # fmt: skip
        print(label, table[label], flush=True)  # noqa: T201 - this program's output
    best = {
        kind: max(
            (label for label in table if label.startswith(kind)), key=lambda n: table[n]["lds"]
        )
        for kind in ("ekfac", "cg")
    }
    gap = lds_difference(scores[best["cg"]], scores[best["ekfac"]], member_MN, loss_MQ, rng())
    record(
        "accept.jsonl", f"valuation.influence.{name}.damping", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="LDS", n=60, seeds=[0], spread="bootstrap over queries and subsets", packages=PACKAGES, bar="none", kind="hypothesis",
        holds=None, what=f"LDS of {best['cg']} less {best['ekfac']}, each at its best damping here; all in `table`", table=table,
        note=f"12 queries; c_stop from {min(stops.values()):.3g} to {max(stops.values()):.3g}, median {np.median(list(stops.values())):.3g}",
        command=f"make accept STUDY=damping-{name}",
    )  # fmt: skip


def tuned(name):
    """From scratch, the damping that is best where a pretrained model is fine-tuned: `make accept STUDY=tuned-peps`."""
    confirm(name, TUNED, "fine-tuned kinds", "cg_tuned", "tuned")


def confirm(name, chosen=CHOSEN, where="sotu", figure="cg_damped", study="damping"):
    """The damping chosen elsewhere, on a corpus that had no part in the choice: all queries, the default EK-FAC beside it."""
    (damping, steps), found = chosen, corpus(name, 256, 24)
    folder = job(found)
    own = Job(folder)
    factors = fit(own.model, own.train, HOW)
    member_MN, loss_RMQ = bank_losses(found, (0,))
    plain, _ = kept(
        folder / "damping-confirm-ekfac.npz",
        lambda: ekfac.scores(own.model, own.train, own.queries, factors=factors, how=HOW),
    )
    solved, residual = kept(
        folder / f"damping-confirm-cg-{damping:g}-{steps}.npz",
        lambda: ekfac_cg.scores(own.model, own.train, own.queries, damping=damping, steps=steps, factors=factors, how=HOW),
    )  # fmt: skip
    gap = lds_difference(solved, plain, member_MN, loss_RMQ[0], rng())
    each = [lds(scores, member_MN, loss_RMQ[0], rng()).lds.estimate for scores in (solved, plain)]
    record(
        "accept.jsonl", f"valuation.influence.{name}.{figure}", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="LDS", n=60, seeds=[0], spread="bootstrap over queries and subsets", packages=PACKAGES, bar="low > 0", kind="hypothesis",
        holds=gap.low > 0, what=f"LDS of conjugate gradients at the damping chosen on {where}, {damping:g} with {steps} steps, less EK-FAC at its default",
        note=f"LDS {each[0]:.4f} and {each[1]:.4f}; largest relative residual {residual:.3f}",
        command=f"make accept STUDY={study}-{name}",
    )  # fmt: skip


if __name__ == "__main__":
    (study if sys.argv[1] == "sotu" else confirm)(sys.argv[1])
