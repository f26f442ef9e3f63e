"""Do owner values from small proxies hold for a model ten times as large? `make accept STUDY=owners-transfer`.

Five owners of 160 records of 63 characters: three presidents from 1829 to 1988, school mathematics, plays. The buyer's target: 96
excerpts of addresses since 1994. Every model is retrained on all 32 coalitions and starts from V(nobody) = its untrained self;
values are exact Shapley, in nats per character of the target. Nothing is sampled: estimates from the same few coalitions
share the error of the choice, and then agree with each other whatever the models are (they did: rank correlation 1.00 between
models, -0.21 with the exact values). Large: 7.2 million parameters, one pass over at most 50,000 tokens, two seeds.
"""

from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from corpora import LENGTH, STATE, documents, encode, sotu, write
from figures import record
from scipy.stats import spearmanr
from setting import BANK, MODEL, OPTIM, setting

from trainer.spec import BatchSpec
from valuation import exact_shapley
from valuation.subsets import retrain_subsets

PRESIDENTS = ("jackson", "roosevelt-26", "reagan")
MODERN = ("clinton", "bush-43", "obama")
OTHERS = ("mathematics", "plays")
RECORDS, TARGETS, SEEDS = 160, 96, (0, 1)
VOCAB = 512
BATCH = BatchSpec(rows=8, length=LENGTH)
PACKAGES = ("torch", "numpy", "scipy", "tokenizers", "sotu")

Model = namedtuple("Model", "spec lr tokenizer")  # noqa: PYI024 - a row of a table
SMALL = replace(MODEL, num_layers=3, dim=72, ffn_dim=192)
PROXIES = {
    "0.05M": Model(replace(MODEL, dim=40, ffn_dim=104), 4e-3, "characters"),
    "0.2M": Model(SMALL, 4e-3, "characters"),
    "0.6M": Model(replace(MODEL, num_layers=4, dim=112, ffn_dim=304), 3e-3, "characters"),
    "0.2M, other architecture": Model(
        replace(
            MODEL, dim=96, ffn_dim=256, num_kv_heads=1, tied=True, qk_norm=True
        ),
        4e-3,
        "characters",
    ),
    "0.2M, other tokenizer": Model(replace(SMALL, vocab_size=VOCAB, dim=64, ffn_dim=176, tied=True), 4e-3, "bpe"),
}  # fmt: skip
LARGE = Model(
    replace(MODEL, num_layers=4, dim=384, num_heads=6, num_kv_heads=6, ffn_dim=1024), 1e-3, "characters"
)  # fmt: skip


def pieces(texts, count, rng):
    """`count` excerpts of 63 characters, drawn without replacement."""
    found = [t[i : i + LENGTH - 1] for t in texts for i in range(0, len(t) - LENGTH, LENGTH)]
    return [found[i] for i in rng.permutation(len(found))[:count]]


def material():
    """(owner, text) of the records, texts of the target, and texts for the tokenizer that neither holds."""
    rng = np.random.default_rng(20261202)
    texts = {name: [] for name in (*PRESIDENTS, *OTHERS, "target", "spare")}
    for owner, _, text in [*sotu(100), *documents("kinds"), *documents("peps")]:
        if owner in MODERN:
            texts["target"].append(text)
        elif owner in texts:
            texts[owner].append(text)
        elif owner in ("taft", "python", "Brett Cannon"):
            texts["spare"].append(text)
    rows = [
        (name, text)
        for name in (*PRESIDENTS, *OTHERS)
        for text in pieces(texts[name], RECORDS, rng)
    ]
    return rows, pieces(texts["target"], TARGETS, rng), texts["spare"]


def bpe(spare, vocab=VOCAB):
    """Encoder of a byte-pair vocabulary of `vocab` ids learnt from texts of others; the last id ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [t[:100_000] for t in spare],
        trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False),
    )
    return lambda text: np.array([*made.encode(text).ids, vocab - 1], dtype=np.int64)


def corpora():
    """Token folders by tokenizer, who owns what, and the target's characters."""
    rows, target, spare = material()
    found = {}
    for name, coder in (("characters", encode), ("bpe", bpe(spare))):
        folder = STATE / f"transfer-{name}"
        vocab, end = (VOCAB, VOCAB - 1) if name == "bpe" else (128, 0)
        digest = {
            "train": write(
                folder / "train", [(o, coder(t)) for o, t in rows], vocab=vocab, end=end
            ),
            "target_value": write(
                folder / "target_value", [("buyer", coder(t)) for t in target], vocab=vocab, end=end
            ),
        }
        found[name] = SimpleNamespace(
            name=name, folder=folder, digest=digest, path=lambda part, folder=folder: folder / part
        )
    member_KN = np.array([[owner == name for owner, _ in rows] for name in (*PRESIDENTS, *OTHERS)])
    return found, member_KN, sum(len(text) for text in target)


def utilities(found, member_KN, characters, masks, model, seed):
    """V of each coalition in nats per character of the target."""
    member_CN = ((np.array(masks)[:, None] >> np.arange(len(member_KN)) & 1) @ member_KN.astype(int)) > 0  # fmt: skip
    config = setting(
        found[model.tokenizer], epochs=1, model=model.spec, optim=replace(OPTIM, lr=model.lr), batch=BATCH
    )  # fmt: skip
    return -retrain_subsets(config, member_CN, seed, BANK).nll_MQ.sum(1) / characters


def moved(small_n, large_n):
    """Share of a pool that other owners would get: half of the absolute difference of the two divisions."""
    one_n, other_n = (np.maximum(v, 0) / np.maximum(v, 0).sum() for v in (small_n, large_n))
    return float(np.abs(one_n - other_n).sum() / 2)


def bootstrap(function, small_Rn, large_Rn, draws=2000):
    """95 % interval of a function of two value vectors, over owners and over each side's seeds."""
    rng, found = np.random.default_rng(11), []
    players = small_Rn.shape[1]
    while len(found) < draws:
        owner_n = rng.integers(players, size=players)
        one_n, other_n = (v[rng.integers(len(v), size=len(v))].mean(0)[owner_n] for v in (small_Rn, large_Rn))  # fmt: skip
        # Of one owner drawn five times, or of owners that are all paid nothing, there is nothing to compare.
        if np.ptp(one_n) and np.ptp(other_n) and one_n.max() > 0 and other_n.max() > 0:
            found.append(function(one_n, other_n))
    return [float(x) for x in np.percentile(found, [2.5, 97.5])]


def rho(one_n, other_n):
    """Spearman's rank correlation."""
    return float(spearmanr(one_n, other_n).statistic)


def figure(name, pair, *, unit, bar, holds, what, spread, kind="hypothesis", **more):
    """A line of this study."""
    estimate, low, high = pair
    record(
        "accept.jsonl", f"valuation.owners.transfer{name}", packages=PACKAGES, kind=kind, seeds=list(SEEDS), n=len(SEEDS), unit=unit,
        what=what, estimate=estimate, low=low, high=high, level=None if low is None else 0.95, spread=spread, bar=bar, holds=holds,
        command="make accept STUDY=owners-transfer", **{"note": "", **more},
    )  # fmt: skip


def study():
    """Every model, then what they say of each other."""
    found, member_KN, characters = corpora()
    names, players = (*PRESIDENTS, *OTHERS), len(member_KN)
    masks = list(range(1 << players))
    value = {name: [] for name in (*PROXIES, "large")}
    for seed in SEEDS:
        for name, model in {**PROXIES, "large": LARGE}.items():
            value_C = utilities(found, member_KN, characters, masks, model, seed)
            value[name].append(exact_shapley(value_C[:, None], players)[:, 0])
            print(seed, name, value_C[[0, -1]].round(3), value[name][-1].round(4), flush=True)  # noqa: T201
    value = {name: np.array(rows) for name, rows in value.items()}
    large_Rn = value["large"]
    table = {}
    for name in (*PROXIES, "large"):
        mean_n = value[name].mean(0)
        row = {
            "values": dict(zip(names, mean_n.round(5).tolist(), strict=True)),
            "by_seed": [dict(zip(names, v.tolist(), strict=True)) for v in value[name]],
        }
        if name != "large":
            for label, function in (("rho", rho), ("moved", moved)):
                estimate = function(mean_n, large_Rn.mean(0))
                row[label] = [estimate, *bootstrap(function, value[name], large_Rn)]
        table[name] = row
    spread = "bootstrap over owners and seeds"
    first = table["0.05M"]
    figure(
        "", first["rho"], unit="1", bar=">= 0.8", holds=first["rho"][0] >= 0.8, spread=spread,
        what="Spearman correlation of owner values from the smallest proxy with those from retraining a 7.2M model, 5 owners",
        table=table, note="; ".join(f"{n}: {r['rho'][0]:.2f} ({r['rho'][1]:.2f} to {r['rho'][2]:.2f}), {r['moved'][0]:.1%} of the pool moves" for n, r in table.items() if n != "large"),
    )  # fmt: skip
    worst = max((r["moved"] for n, r in table.items() if n != "large"), key=lambda r: r[0])
    figure(
        ".moved", worst, unit="share", bar="<= 0.1", holds=worst[0] <= 0.1, spread=spread,
        what="share of the pool that would change hands if the 7.2M model's values were paid instead of a proxy's, worst of five proxies",
    )  # fmt: skip
    estimate = rho(large_Rn[0], large_Rn[1])
    figure(
        ".seeds", (estimate, None, None), unit="1", bar="none", holds=None, spread="one pair of seeds",
        what="Spearman correlation of the 7.2M model's values of two seeds: what any proxy could reach",
        note=f"{moved(*large_Rn):.1%} of the pool moves between its own two seeds",
    )  # fmt: skip
