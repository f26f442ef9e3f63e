"""Metagradients against retraining: `make accept STUDY=magic`.

The ceiling of accuracy, in a training that metagradients are made for (metasmooth): 0.02 million parameters, one layer, steps of 64 rows,
warm-up, clipping and a root of the second moment kept away from 0 (eps_root 1e-6). Truth: 40 subsets of 95 % of the 256 records of
`kinds`, the others masked, trained by the same code under record weights of 0 and 1. EK-FAC, the dot product and BM25 are
held against the same truth.
"""

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
from valuation.evaluation import lds
from valuation.influence import baselines, dot, ekfac
from valuation.influence.scores import TokenSet
from valuation.metagradient import WeightedTraining, scores, smoothness
from valuation.subsets import random_subsets

SHAPE = dataclasses.replace(MODEL, dim=32, num_layers=1, ffn_dim=80)
OPTIM = OptimSpec(lr=3e-3, warmup_steps=8, weight_decay=0.01, clip_norm=1.0)
ROWS = BatchSpec(rows=64, length=BATCH.length)
STEPS, QUERIES, SUBSETS, EPS_ROOT = 32, 8, 40, 1e-6


def study():
    """Metagradients of 8 queries, 40 retrainings, one LDS each."""
    base = corpus("kinds", 256, 24)
    train_store, target = setting(base).stores()
    plan = BatchPlan(train_store, 0, ROWS)
    model = Transformer(SHAPE)
    init_parameters(model, 0)
    training = WeightedTraining(model, plan, OPTIM, STEPS, eps_root=EPS_ROOT)
    train = TokenSet.of(train_store, ROWS.length)
    queries = TokenSet.of(target, ROWS.length, range(QUERIES))
    member_MN = random_subsets(SUBSETS, train_store.size, 0.95, np.random.default_rng(5))
    loss_MQ = truth(base.folder / "magic", training, queries, member_MN)
    final = Transformer(SHAPE)
    with torch.no_grad():
        for name, value in training.weights_of(training.train()).items():
            dict(final.named_parameters())[name].copy_(value)
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
