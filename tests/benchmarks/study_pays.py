"""Does it pay? `make accept STUDY=pays-sotu` and `pays-peps`: choosing a quarter of a pool by seven rules, then training on it.

The pool: 768 excerpts of all owners, 128 of noise (half random characters, half shuffled text), 128 copies (half of them with two
characters changed). The buyer's target: two
or three owners; rules see target_value, losses are those of target_test. Every training reads 96 steps of 32 rows, so "all" passes
its 1,024 records three times and the others their 256 records twelve times.

*Equal tokens*: 96 steps for everybody. *Equal compute*: a rule's training is cut by what its values cost, in steps of the same CPU
time; values by influence and in-run credit come from one pass (32 steps) over the pool. Rules without a model cost nothing here. A rule
that costs more than 96 steps has nothing left to train with: it keeps one step, and its figure says what that means.
"""

import time
from dataclasses import replace

import numpy as np
from corpora import LENGTH, STATE, corpus, encode, excerpts, write
from figures import record
from setting import BANK, BATCH, OPTIM, setting
from study_planted import HOW, edited, token_sets

from trainer.data import BatchPlan
from trainer.model import Transformer, init_parameters
from valuation.clusters import cluster
from valuation.curves import paired
from valuation.detection import shuffled_tokens
from valuation.gradients import aggregate_gradient, record_dots
from valuation.influence import baselines, factors
from valuation.inrun import credited_steps
from valuation.quality import text_quality
from valuation.subsets import fit_subset, retrain_subsets

BUYERS = {"sotu": ("clinton", "obama", "nixon"), "peps": ("Victor Stinner", "Guido van Rossum")}
SEEDS = tuple(range(3, 13))  # 0 to 2 decided too little
STEPS, CHOSEN, EPOCHS = 96, 256, 12
CURVATURE_RECORDS, TARGET_ROWS = 256, 16
RULES = ("influence", "inrun", "entropy", "dedup_quality", "bm25", "all")
PACKAGES = ("torch", "numpy", "scipy")


def pool(name):
    """The setting of a pool: records and the two targets of the buyer."""
    base = corpus(name, 1024, 64)
    rng = np.random.default_rng([2, *name.encode()])
    real = excerpts(name, "train", 768, 0)
    picked = rng.permutation(768)
    noise = [
        ("noise", encode("".join(map(chr, rng.integers(32, 127, LENGTH - 1))))) for _ in range(64)
    ]
    noise += [("noise", shuffled_tokens(real[i][1], rng)) for i in picked[:64]]
    copies = [
        ("copier", edited(real[i][1], rng, 0.03 * (k % 2))) for k, i in enumerate(picked[64:192])
    ]
    records = real + noise + copies
    records = [records[i] for i in rng.permutation(len(records))]
    folder = STATE / f"{base.folder.name}-pool"
    changes = {"train": folder / "train", "train_digest": write(folder / "train", records), "epochs": EPOCHS,
               "max_tokens": STEPS * BATCH.rows * BATCH.length}  # fmt: skip
    configs = []
    for part in ("target_value", "target_test"):
        digest = write(folder / part, excerpts(name, part, 64, 0, BUYERS[name]))
        configs.append(
            replace(setting(base), **changes, target=folder / part, target_digest=digest)
        )
    return *configs, folder


def orders(config, seed):
    """Rule -> (records, best first; CPU seconds of the values); and CPU seconds of one step."""
    train, queries = token_sets(config)
    store = config.stores()[0]
    rng, size = np.random.default_rng([3, seed]), store.size
    found = {"random": (rng.permutation(size), 0.0), "all": (np.arange(size), 0.0)}
    one_pass = setting_of_one_pass(config)
    start = time.process_time()
    fit = fit_subset(one_pass, np.ones(size, bool), 1000 + seed)
    step_s = (time.process_time() - start) / fit.steps
    value_N = target_values(fit.model, train, queries, rng)
    found["influence"] = np.argsort(-value_N), time.process_time() - start
    start = time.process_time()
    model = Transformer(config.model)
    init_parameters(model, 1000 + seed)
    credit_N = np.zeros(size)
    plan = BatchPlan(store, 1000 + seed, BATCH)
    sample = queries.take(rng.permutation(len(queries.records))[:TARGET_ROWS])
    steps = size // BATCH.rows
    for step in credited_steps(model, plan, list(sample.batches(TARGET_ROWS)), OPTIM, steps):
        np.add.at(credit_N, step.segments.index_S, next(iter(step.credits_S.values())))
    found["inrun"] = np.argsort(-credit_N), time.process_time() - start
    bits_N = baselines.entropy(train, queries, config.model.vocab_size).scores_QN[0]
    found["entropy"] = np.argsort(-bits_N), 0.0
    match_N = baselines.bm25(train, queries, terms=baselines.ngrams(4)).totals_N()
    found["bm25"] = np.argsort(-match_N), 0.0
    found["dedup_quality"] = clean(store, bits_N, rng), 0.0
    return {rule: (order, cost) for rule, (order, cost) in found.items()}, step_s


def target_values(model, train, queries, rng):
    """EK-FAC influence on the target as a whole: one direction, so one pass over the records; curvature of a sample of them.

    <H^-1 sum_q g_q, g_n> is what the scores of all queries add up to, without a gradient per query.
    """
    sample = train.take(rng.permutation(len(train.records))[:CURVATURE_RECORDS])
    curvature = factors.fit(model, sample, HOW, corrected=True)
    whole = aggregate_gradient(model, queries.batches(HOW.rows)).direction
    solved = curvature.solve({name: g[None] for name, g in whole.items()}, 0.1)
    direction = {name: g[0] for name, g in solved.items()}
    return record_dots(model, train.batches(HOW.rows), [direction]).dots_NK[:, 0]


def setting_of_one_pass(config):
    """The proxy that values come from."""
    return replace(config, epochs=1, max_tokens=None)


def clean(store, bits_N, rng):
    """Random order of one record per cluster of copies without visible defects; then the others.

    Also left out: the tenth with the most bits per token under bigrams of the others, a quality filter by perplexity.
    """
    texts = [bytes(store.tokens(i)[:-1].tolist()).decode() for i in range(store.size)]
    quality = text_quality(texts)
    leaders = cluster(
        [store.record_id(i) for i in range(store.size)], texts, threshold=0.5
    ).cluster_N
    good_N = (leaders == np.arange(store.size)) & (bits_N < np.quantile(bits_N, 0.9))
    good_N &= quality.score_N >= np.quantile(quality.score_N, 0.05)
    shuffled = rng.permutation(store.size)
    return np.concatenate([shuffled[good_N[shuffled]], shuffled[~good_N[shuffled]]])


def study(name):
    """Losses of every rule and seed, at equal tokens and at equal compute."""
    value_config, test_config, folder = pool(name)
    size = value_config.stores()[0].size
    losses = {mode: {rule: [] for rule in (*RULES, "random")} for mode in ("tokens", "compute")}
    costs = []
    for seed in SEEDS:
        cached = folder / f"orders-{seed}.npz"
        if not cached.exists():
            found, step_s = orders(value_config, seed)
            np.savez(
                cached, step_s=step_s, **{f"order/{r}": o for r, (o, _) in found.items()},
                **{f"cost/{r}": c for r, (_, c) in found.items()},
            )  # fmt: skip
        with np.load(cached) as file:
            kept = {key: file[key] for key in file.files}
        for rule in (*RULES, "random"):
            member_N = np.zeros(size, bool)
            member_N[kept[f"order/{rule}"][: size if rule == "all" else CHOSEN]] = True
            spent = float(kept[f"cost/{rule}"]) / float(kept["step_s"])
            costs.append((rule, spent))
            for mode, steps in (("tokens", STEPS), ("compute", max(1, STEPS - round(spent)))):
                config = cut(test_config, steps)
                losses[mode][rule].append(
                    retrain_subsets(config, member_N[None], seed, BANK).mean_M[0]
                )
    for mode, by_rule in losses.items():
        table = {rule: [round(float(x), 4) for x in found] for rule, found in by_rule.items()}
        for rule in RULES:
            gap = paired(np.array(by_rule[rule]), np.array(by_rule["random"]))
            spent = [round(cost, 1) for r, cost in costs if r == rule]
            record(
                "accept.jsonl", f"valuation.pays.{name}.{mode}.{rule}", estimate=gap.estimate, low=gap.low, high=gap.high,
                level=gap.level, unit="nats per token", n=len(SEEDS), seeds=list(SEEDS), spread="Student over seeds",
                bar="high < 0", kind="hypothesis", holds=gap.high < 0, what=f"loss on target_test: {rule} less random, equal {mode}",
                losses={rule: table[rule], "random": table["random"]}, cost_steps=spent, packages=PACKAGES, note="",
                command=f"make accept STUDY=pays-{name}",
            )  # fmt: skip


def cut(config, steps):
    """The same training with fewer steps."""
    return replace(config, max_tokens=steps * BATCH.rows * BATCH.length)
