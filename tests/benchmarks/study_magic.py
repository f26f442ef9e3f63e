"""Metagradients, and conjugate gradients, against retraining: `make accept STUDY=magic` and `magic-cg`.

The ceiling of accuracy, in a training that metagradients are made for (metasmooth): 0.02 million parameters, one layer, steps of 64 rows,
warm-up, clipping and a root of the second moment kept away from 0 (eps_root 1e-6). Truth: 40 subsets of 95 % of the 256 records of
`kinds`, the others masked, trained by the same code under record weights of 0 and 1. EK-FAC, the dot product and BM25 are
held against the same truth.

`magic-cg` asks what `study_influence.py` could not: whether the Gauss-Newton inverse beats EK-FAC where the system is really solved. The
model is small enough for 40 steps a query. Each method's damping is chosen on 40 subsets; the difference is judged on 80 others.
"""

import copy
import dataclasses

import numpy as np
import torch
from corpora import corpus
from figures import record
from setting import BATCH, MODEL, setting
from study_planted import HOW

from provenance.canonical import write_atomic
from trainer.data import BatchPlan, pack
from trainer.model import Transformer, init_parameters
from trainer.spec import BatchSpec, OptimSpec
from valuation.evaluation import lds, lds_difference
from valuation.influence import baselines, dot, ekfac, ekfac_cg
from valuation.influence.factors import fit
from valuation.influence.scores import TokenSet
from valuation.metagradient import WeightedTraining, scores, smoothness
from valuation.subsets import random_subsets

SHAPE = dataclasses.replace(MODEL, dim=32, num_layers=1, ffn_dim=80)
OPTIM = OptimSpec(lr=3e-3, warmup_steps=8, weight_decay=0.01, clip_norm=1.0)
ROWS = BatchSpec(rows=64, length=BATCH.length)
STEPS, QUERIES, SUBSETS, EPS_ROOT = 32, 8, 40, 1e-6
CHOOSING, JUDGING, CG_QUERIES, CG_STEPS = 40, 80, 16, 40
DAMPINGS = {"ekfac": (0.001, 0.01, 0.1, 1.0, 10.0), "cg": (0.01, 0.1, 1.0, 10.0)}


def study():
    """Metagradients of 8 queries, 40 retrainings, one LDS each."""
    _, training, train, queries, member_MN, loss_MQ = prepared("magic", QUERIES, SUBSETS, 5)
    final = trained(training)
    judged = {
        "magic": scores(training, train, queries),
        "ekfac": ekfac.scores(final, train, queries, how=HOW),
        "dot": dot.scores(final, train, queries, how=HOW),
        "bm25": baselines.bm25(train, queries, terms=baselines.ngrams(4)),
    }
    found = {
        m: lds(s.scores_QN, member_MN, loss_MQ, np.random.default_rng(7)).lds
        for m, s in judged.items()
    }
    best = found["magic"]
    smooth = smoothness(training, np.random.default_rng(1))
    record(
        "accept.jsonl", "valuation.influence.magic_lds", estimate=best.estimate, low=best.low, high=best.high, level=best.level,
        unit="LDS", n=SUBSETS, seeds=[0], spread="bootstrap over queries and subsets", bar="estimate >= 0.9", kind="requirement",
        holds=best.estimate >= 0.9, what=f"LDS of metagradients, {QUERIES} queries, metasmoothness {smooth:.3f}; others in `table`",
        table={m: [round(x, 4) for x in (e.estimate, e.low, e.high)] for m, e in found.items()},
        packages=("torch", "numpy", "scipy"), note="", command="make accept STUDY=magic",
    )  # fmt: skip


def solved():
    """EK-FAC and conjugate gradients over their dampings: chosen on some subsets, compared on others."""
    folder, training, train, queries, member_MN, loss_MQ = prepared(
        "magic-cg", CG_QUERIES, CHOOSING + JUDGING, 11
    )
    final = trained(training)
    factors = fit(final, train, HOW)
    runs = {
        f"{method}-{c:g}": scored(folder, method, c, final, train, queries, factors)
        for method, dampings in DAMPINGS.items() for c in dampings
    }  # fmt: skip
    first, rest = slice(CHOOSING), slice(CHOOSING, None)
    table = {
        label: {
            "choosing": round(lds(s_QN, member_MN[first], loss_MQ[first], np.random.default_rng(7)).lds.estimate, 4),
            "judging": round(lds(s_QN, member_MN[rest], loss_MQ[rest], np.random.default_rng(7)).lds.estimate, 4),
            "residual": residual,
        }
        for label, (s_QN, residual) in runs.items()
    }  # fmt: skip
    best = {
        method: max(
            (label for label in table if label.startswith(method)), key=lambda n: table[n]["choosing"]
        )
        for method in DAMPINGS
    }  # fmt: skip
    one, two = runs[best["cg"]][0], runs[best["ekfac"]][0]
    gap = lds_difference(one, two, member_MN[rest], loss_MQ[rest], np.random.default_rng(7))
    record(
        "accept.jsonl", "valuation.influence.magic.cg_above_ekfac", estimate=gap.estimate, low=gap.low, high=gap.high, level=gap.level,
        unit="LDS", n=JUDGING, seeds=[0], spread="bootstrap over queries and subsets", bar="low > 0", kind="requirement", holds=gap.low > 0,
        what=f"LDS of {best['cg']} less that of {best['ekfac']}, {CG_QUERIES} queries, dampings chosen on {CHOOSING} other subsets; all in `table`",
        table=table, packages=("torch", "numpy", "scipy"), note="", command="make accept STUDY=magic-cg",
    )  # fmt: skip


def scored(folder, method, damping, final, train, queries, factors, steps=CG_STEPS):
    """(scores, largest relative residual) of a method at a damping, from a file or computed."""
    path = folder / f"{method}-{damping:g}.npz"
    if not path.exists():
        of = {"damping": damping, "factors": factors, "how": HOW}
        if method == "cg":
            found = ekfac_cg.scores(final, train, queries, steps=steps, **of)
        else:
            found = ekfac.scores(final, train, queries, **of)
        np.savez(
            path, scores_QN=found.scores_QN, residual=float(found.notes.get("residual", "nan"))
        )
    with np.load(path) as file:
        residual = float(file["residual"])
        return file["scores_QN"], None if np.isnan(residual) else residual


def prepared(name, num_queries, num_subsets, seed):
    """Folder of the retrainings, the metasmooth training, records, queries, subsets of 95 % and their losses."""
    base = corpus("kinds", 256, 24)
    train_store, target = setting(base).stores()
    model = Transformer(SHAPE)
    init_parameters(model, 0)
    plan = BatchPlan(train_store, 0, ROWS)
    training = WeightedTraining(model, plan, OPTIM, STEPS, eps_root=EPS_ROOT)
    queries = TokenSet.of(target, ROWS.length, range(num_queries))
    member_MN = random_subsets(num_subsets, train_store.size, 0.95, np.random.default_rng(seed))
    folder = base.folder / name
    loss_MQ = truth(folder, training, queries, member_MN)
    return folder, training, TokenSet.of(train_store, ROWS.length), queries, member_MN, loss_MQ


def trained(training, weight_N=None):
    """The model at its end, with these weights of the records or ones."""
    final = copy.deepcopy(training.model)
    with torch.no_grad():
        for name, value in training.weights_of(training.train(weight_N)).items():
            dict(final.named_parameters())[name].copy_(value)
    return final


def truth(folder, training, queries, member_MN):
    """Losses [M, Q] of the masked retrainings, one file each."""
    folder.mkdir(exist_ok=True)
    batches = [[pack([r], queries.length)] for r in queries.records]
    rows = []
    for m, member_N in enumerate(member_MN):
        path = folder / f"{m}.f64"
        if not path.exists():
            state = training.train(torch.from_numpy(member_N.astype(np.float64)))
            with torch.no_grad():
                losses = np.array([training.loss(state, batch).item() for batch in batches])
            write_atomic(path, losses.tobytes())
        rows.append(np.frombuffer(path.read_bytes()))
    return np.stack(rows)
