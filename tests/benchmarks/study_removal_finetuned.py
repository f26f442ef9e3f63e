"""Does taking records away from a fine-tuning do what their values say? `make accept STUDY=removal-finetuned-sotu`, `-peps`.

`study_removal.py` trains from scratch, where values of single clean records decide next to nothing. Here the pretrained model of
`study_finetuned.py` is fine-tuned, at the dampings that were chosen there. Each replicate draws its own 256 records, queries, held-out records
and order, values the records for the sum of the queries, and fine-tunes from the same weights without the most helpful, the most harmful
and random tenths, which are masked. What is judged is the loss on the held-out records, so an interval over replicates holds all that is random but
the pretraining. Queries and held-out records are of documents that neither the records nor the pretraining come from; they share documents with each other
and no text with anything.

Two buyers, as in `study_removal.py`. `kinds` is the smoke and writes no figure. Resumable: values and each fine-tuning's losses are a file.
"""

import functools
import hashlib
import sys

import numpy as np
import torch
from corpora import STATE, corpus, excerpts, write
from figures import record
from study_finetuned import BASE, CHOSEN, EPS_ROOT, ROWS, STEPS, TUNING, pretrained
from study_magic import trained
from study_pays import BUYERS
from study_planted import HOW, PACKAGES

from provenance.canonical import write_atomic
from trainer.data import BatchPlan
from trainer.generate import evaluate
from valuation.curves import paired, ranked, subsets_along
from valuation.influence import ekfac, ekfac_cg
from valuation.influence.factors import fit
from valuation.influence.pairing import gradient_blocks, pair
from valuation.influence.scores import TokenSet
from valuation.metagradient import WeightedTraining
from valuation.retraining import open_tokens

REPLICATES, SMOKE = tuple(range(100, 108)), (100, 101, 102)
RECORDS, QUERIES, HELDOUT, SPARE, SHARE, RANDOM = 256, 24, 192, 32, 0.1, 3
OWNERS = {**BUYERS, "kinds": ("plays", "python")}
METHODS = ("cg", "ekfac")
ARMS = {"top": "most helpful", "bottom": "most harmful"}


@functools.cache
def drawn(name, replicate):
    """Folder, fine-tuning, records, and buyer -> (queries, held-out records)."""
    folder = STATE / f"{name}-removal-finetuned-{replicate}"
    corpus(name, RECORDS, QUERIES)  # checks the sources against their pin
    texts = excerpts(name, "train", RECORDS, replicate)
    store = open_tokens(folder / "train", write(folder / "train", texts))
    model = pretrained()
    read = open_tokens(BASE / "train")
    known = {tokens.tobytes() for _, tokens in texts} | {
        np.asarray(read.tokens(i), np.int64).tobytes() for i in range(read.size)
    }
    targets = {
        buyer: target(name, replicate, owners, known)
        for buyer, owners in (("everyone", None), ("some", OWNERS[name]))
    }
    plan = BatchPlan(store, replicate, ROWS)
    training = WeightedTraining(model, plan, TUNING, STEPS, eps_root=EPS_ROOT)
    return folder, training, TokenSet.of(store, ROWS.length), targets


def target(name, replicate, owners, known):
    """Queries and held-out records of a buyer, no text twice."""
    count = QUERIES + HELDOUT + SPARE
    found = {t.tobytes(): t for _, t in excerpts(name, "target_value", count, replicate, owners)}
    left = [tokens for text, tokens in found.items() if text not in known][: QUERIES + HELDOUT]
    if len(left) < QUERIES + HELDOUT:
        raise ValueError(
            f"{name}: expected {QUERIES + HELDOUT} distinct excerpts, got {len(left)}; raise SPARE"
        )
    rows = tuple((i, hashlib.sha256(b"%d" % i).digest(), t) for i, t in enumerate(left))
    return TokenSet(rows[:QUERIES], ROWS.length), TokenSet(rows[QUERIES:], ROWS.length)


def values(name, replicate):
    """buyer-method -> value of each record for the sum of the buyer's queries; residual -> of conjugate gradients, the larger."""
    folder, training, train, targets = drawn(name, replicate)
    path = folder / "values.npz"
    if not path.exists():
        final = trained(training)
        measure(folder / "all.f64", final, targets)
        factors = fit(final, train, HOW)
        damping, steps = CHOSEN["cg"]
        conjugate = ekfac_cg.solver(
            final, train, HOW, damping=damping, steps=steps, factors=factors
        )
        direct = ekfac.solver(final, train, HOW, damping=CHOSEN["ekfac"], factors=factors)
        sums = []
        for queries, _ in targets.values():
            blocks = [left for _, left in gradient_blocks(final, queries, HOW)]
            sums.append({n: sum(b[n].sum(0, keepdim=True) for b in blocks) for n in blocks[0]})
        left = {n: torch.cat([of[n] for of in sums]) for n in sums[0]}
        solved, residual = conjugate(left)
        found = {"residual": np.array(residual)}
        for method, side in (("cg", solved), ("ekfac", direct(left))):
            for buyer, value_N in zip(targets, pair(final, train, side, HOW)[0], strict=True):
                found[f"{buyer}-{method}"] = value_N
        np.savez(path, **found)
    with np.load(path) as file:
        return dict(file)


def measure(path, model, targets):
    """Write nats per token by buyer, on its queries and on its held-out records."""
    rows = []
    for tokens in (t for pair_of in targets.values() for t in pair_of):
        nll_Q, tokens_Q = evaluate(model, [t for *_, t in tokens.records], ROWS.rows, ROWS.length)
        rows.append(nll_Q.sum() / tokens_Q.sum())
    write_atomic(path, np.array(rows).tobytes())


def losses(name, replicate, label, member_N):
    """Buyer -> nats per token on its queries and on its held-out records, after a fine-tuning on some of the records."""
    folder, training, _, targets = drawn(name, replicate)
    path = folder / f"{label}.f64"
    if not path.exists():
        measure(path, trained(training, torch.from_numpy(member_N.astype(np.float64))), targets)
    return dict(zip(targets, np.frombuffer(path.read_bytes()).reshape(-1, 2), strict=True))


def replicated(name, replicate, buyer):
    """Arm -> losses on queries and held-out records; and the residual of conjugate gradients."""
    value = values(name, replicate)
    rng = np.random.default_rng([replicate, 7])

    def without(label, value_N, arm):
        member_N = subsets_along(ranked(value_N, arm, rng), (SHARE,), "remove")[0]
        return losses(name, replicate, label, member_N)[buyer]

    anyone = [without(f"random-{i}", np.zeros(RECORDS), "random") for i in range(RANDOM)]
    row = {
        "all": losses(name, replicate, "all", np.ones(RECORDS, bool))[buyer],
        "random": np.mean(anyone, axis=0),
    }
    for method in METHODS:
        for arm in ARMS:
            value_N = value[f"{buyer}-{method}"]
            row[f"{method}-{arm}"] = without(f"{buyer}-{method}-{arm}", value_N, arm)
    return row, float(value["residual"])


def study(name):
    """Both buyers, both methods, both ends."""
    for buyer in ("everyone", "some"):
        rows, residuals = [], []
        for replicate in SMOKE if name == "kinds" else REPLICATES:
            row, residual = replicated(name, replicate, buyer)
            print(name, buyer, replicate, {k: v.round(4).tolist() for k, v in row.items()}, f"{residual:.3f}", flush=True)  # noqa: T201  # fmt: skip
            rows.append(row)
            residuals.append(residual)
        loss_R2 = {label: np.array([row[label] for row in rows]) for label in rows[0]}
        for method in METHODS:
            for arm in ARMS:
                figure(name, buyer, method, arm, loss_R2, max(residuals))
        if name != "kinds":
            harmful(name, buyer, loss_R2)


def figure(name, buyer, method, arm, loss_R2, residual):
    """One line: held-out loss without a tenth less the mean without random ones; the same of the queries in its note."""
    valued, gap = (
        paired(loss_R2[f"{method}-{arm}"][:, i], loss_R2["random"][:, i]) for i in (0, 1)
    )
    note = f"the same of the loss on the valued queries: {valued.estimate:.4f} ({valued.low:.4f} to {valued.high:.4f})"
    if method == "cg":
        note += f"; largest residual of conjugate gradients {residual:.3f}"
    if name == "kinds":
        print(buyer, method, arm, gap, note)  # noqa: T201
        return
    damping = CHOSEN[method][0] if method == "cg" else CHOSEN[method]
    record(
        "accept.jsonl", f"valuation.removal.{name}.{buyer}.finetuned_{method}_{arm}", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="nats per token", n=len(REPLICATES), seeds=list(REPLICATES), spread="Student over replicates",
        bar="low > 0" if arm == "top" else "high < 0", holds=gap.low > 0 if arm == "top" else gap.high < 0,
        kind="requirement" if method == "cg" else "hypothesis",
        what=f"held-out loss without the {ARMS[arm]} 10% less the mean without {RANDOM} random 10%, a fine-tuned model, target of {buyer}, values of {method}-{damping:g}",
        table={label: [round(float(x), 4) for x in of_R2.mean(0)] for label, of_R2 in loss_R2.items()}, packages=PACKAGES, note=note,
        command=f"make accept STUDY=removal-finetuned-{name}",
    )  # fmt: skip


def harmful(name, buyer, loss_R2):
    """One line: held-out loss without the most harmful tenth less the loss with all records. Without a bar: looked at after the others."""
    gap = paired(loss_R2["cg-bottom"][:, 1], loss_R2["all"][:, 1])
    record(
        "accept.jsonl", f"valuation.removal.{name}.{buyer}.finetuned_cg_bottom_all", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="nats per token", n=len(REPLICATES), seeds=list(REPLICATES), spread="Student over replicates", bar="none", kind="hypothesis", holds=None,
        what=f"held-out loss without the most harmful 10% less the loss with all records, a fine-tuned model, target of {buyer}, values of cg-{CHOSEN['cg'][0]:g}",
        packages=PACKAGES, note="", command=f"make accept STUDY=removal-finetuned-{name}",
    )  # fmt: skip


if __name__ == "__main__":
    study(sys.argv[1])
