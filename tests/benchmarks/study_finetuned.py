"""Does the Gauss-Newton inverse beat EK-FAC where a pretrained model is fine-tuned? `make accept STUDY=finetuned-kinds`, `-sotu`, `-peps`.

The other studies train from scratch. Influence functions suppose a small change near an optimum, and the published figures that put conjugate
gradients above EK-FAC are of a fine-tuned model. So here the char-GPT of `setting.py` is pretrained once, on documents of `kinds` and `peps` that
no corpus takes records or queries from, and then fine-tuned on the 256 records. Truth: 80 half subsets, each fine-tuned from the same
weights in the same order, the other records masked; losses of 24 queries.

`kinds` chooses all: the fine-tuning, and each method's damping (on 12 queries). Their difference is judged on `sotu` and `peps`, at what stands in
`CHOSEN`. How far the damped system is solved stands in the tables: |g - (G + D) x| / |g|, the largest of the queries. Resumable: each
retraining and each method's scores are a file.
"""

import sys

import numpy as np
import torch
from corpora import STATE, corpus, excerpts, write
from figures import record
from setting import BATCH, MODEL, half_subsets, setting
from study_influence import PACKAGES, rng
from study_magic import scored, trained, truth
from study_planted import HOW

from trainer.data import BatchPlan
from trainer.generate import evaluate
from trainer.model import Transformer
from trainer.spec import BatchSpec, OptimSpec
from valuation.evaluation import lds, lds_difference, reliability
from valuation.influence import baselines, dot
from valuation.influence.factors import fit
from valuation.influence.scores import TokenSet
from valuation.metagradient import WeightedTraining
from valuation.subsets import fit_subset

BASE = STATE / "finetuned-base"
NAMES = ("kinds", "sotu", "peps")
EXCERPTS, PASSES = 2048, 6
"""Texts of pretraining from each of four sets of documents, and passes over them."""

PRETRAINING = OptimSpec(lr=4e-3, warmup_steps=50, weight_decay=0.01)
TUNING = OptimSpec(lr=1e-3, warmup_steps=4, weight_decay=0.0, clip_norm=1.0)
ROWS, STEPS, EPS_ROOT = BatchSpec(rows=64, length=BATCH.length), 32, 1e-6
SUBSETS, QUERIES, CHOOSING_QUERIES, CEILING_SUBSETS = 80, 24, 12, 40
EKFAC = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
CG = ((1.0, 8), (10.0, 10), (30.0, 8), (100.0, 6))
"""(damping, steps) of conjugate gradients."""

CHOSEN = {"ekfac": 0.1, "cg": (30.0, 8)}
"""What has the highest LDS on `kinds`."""


def pretrained():
    """The base model of all corpora."""
    path = BASE / "weights.pt"
    if not path.exists():
        known = {
            tokens.tobytes()
            for name in NAMES for part, count in (("train", 256), ("target_value", QUERIES)) for _, tokens in excerpts(name, part, count, 0)
        }  # fmt: skip
        texts = [
            (owner, tokens)
            for name in ("kinds", "peps") for part in ("target_test", "target_confirm")
            for owner, tokens in excerpts(name, part, EXCERPTS, 1) if tokens.tobytes() not in known
        ]  # fmt: skip
        folder = BASE / "train"
        config = setting(
            corpus("kinds", 256, QUERIES), train=folder, train_digest=write(folder, texts), optim=PRETRAINING, epochs=PASSES
        )  # fmt: skip
        torch.save(fit_subset(config, np.ones(len(texts), bool), 0).model.state_dict(), path)
    model = Transformer(MODEL)
    model.load_state_dict(torch.load(path))
    return model


def prepared(name, seed=0, num_subsets=SUBSETS):
    """Folder, fine-tuning, records, queries, half subsets and their losses [M, Q] in the order of a seed."""
    found = corpus(name, 256, QUERIES)
    train_store, target = setting(found).stores()
    training = WeightedTraining(
        pretrained(), BatchPlan(train_store, seed, ROWS), TUNING, STEPS, eps_root=EPS_ROOT
    )
    queries, folder = TokenSet.of(target, ROWS.length), found.folder / f"finetuned-{seed}"
    member_MN = half_subsets(train_store.size, SUBSETS)[:num_subsets]
    loss_MQ = truth(folder, training, queries, member_MN)
    return folder, training, TokenSet.of(train_store, ROWS.length), queries, member_MN, loss_MQ


def study(name):
    """The dampings over `kinds`, or the difference at the chosen ones on another corpus."""
    folder, training, train, queries, member_MN, loss_MQ = prepared(name)
    choosing = name == "kinds"
    if choosing:
        queries, loss_MQ = queries.take(range(CHOOSING_QUERIES)), loss_MQ[:, :CHOOSING_QUERIES]
    final = trained(training)
    factors = fit(final, train, HOW)
    runs = {
        "dot": (dot.scores(final, train, queries, how=HOW).scores_QN, None),
        "bm25": (baselines.bm25(train, queries, terms=baselines.ngrams(4)).scores_QN, None),
    }
    for damping in EKFAC:
        runs[f"ekfac-{damping:g}"] = scored(
            folder, "ekfac", damping, final, train, queries, factors
        )
    for damping, steps in CG if choosing else [CHOSEN["cg"]]:
        runs[f"cg-{damping:g}"] = scored(
            folder, "cg", damping, final, train, queries, factors, steps
        )
    table = {}
    for label, (scores_QN, residual) in runs.items():
        e = lds(scores_QN, member_MN, loss_MQ, rng()).lds
        table[label] = {"lds": round(e.estimate, 4), "low": round(e.low, 4), "high": round(e.high, 4), "residual": residual}  # fmt: skip
        print(label, table[label], flush=True)  # noqa: T201 - this program's output
    best = {"ekfac": f"ekfac-{CHOSEN['ekfac']:g}", "cg": f"cg-{CHOSEN['cg'][0]:g}"}
    if choosing:
        best = {
            kind: max((n for n in table if n.startswith(kind)), key=lambda n: table[n]["lds"])
            for kind in best
        }
    gap = lds_difference(runs[best["cg"]][0], runs[best["ekfac"]][0], member_MN, loss_MQ, rng())
    nats = [mean_loss(model, tokens) for tokens in (train, queries) for model in (training.model, final)]  # fmt: skip
    figure(
        name, "finetuned_damping" if choosing else "finetuned_cg", gap, "LDS", table=table,
        what=f"LDS of {best['cg']} less that of {best['ekfac']} in a fine-tuned model, {len(queries.records)} queries; all in `table`",
        note="nats per token before and after: records {:.3f} and {:.3f}, queries {:.3f} and {:.3f}".format(*nats),
        **({"bar": "none", "kind": "hypothesis", "holds": None} if choosing else {"bar": "low > 0", "kind": "requirement", "holds": gap.low > 0}),
    )  # fmt: skip
    if choosing:
        ceiling(name)


def ceiling(name):
    """How far the losses agree with those of another order."""
    losses = [prepared(name, seed, CEILING_SUBSETS)[-1] for seed in (0, 1)]
    got = reliability(np.stack(losses), rng())
    figure(
        name, "finetuned_ceiling", got.ceiling_one, "LDS", n=CEILING_SUBSETS, seeds=[0, 1], bar="none", kind="hypothesis", holds=None,
        what=f"ceiling of an LDS against the losses of one order of fine-tuning, {QUERIES} queries", note="",
    )  # fmt: skip


def mean_loss(model, tokens):
    """Nats per token."""
    nll_Q, tokens_Q = evaluate(model, [t for *_, t in tokens.records], ROWS.rows, ROWS.length)
    return nll_Q.sum() / tokens_Q.sum()


def figure(corpus_name, name, estimate, unit, **more):
    """A line of accept.jsonl."""
    values = {
        "estimate": estimate.estimate, "low": estimate.low, "high": estimate.high, "level": estimate.level, "unit": unit, "n": SUBSETS,
        "seeds": [0], "spread": "bootstrap over queries and subsets", "packages": PACKAGES, "command": f"make accept STUDY=finetuned-{corpus_name}",
    }  # fmt: skip
    record("accept.jsonl", f"valuation.influence.{corpus_name}.{name}", **(values | more))


if __name__ == "__main__":
    study(sys.argv[1])
