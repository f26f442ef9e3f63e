"""What owners are worth: `make accept STUDY=owners-gsm8k`, `owners-planted`, `owners-shells`.

Records are whole solutions of grade-school problems (GSM8K), as characters; the buyer's target is human solutions of *other* problems. Owners are four
models and the human who solved the same problems, with 21.7, 39.0, 34.7, 56.3 and 100 % correct answers. Utilities are held-out losses of the char-GPT of
`setting.py` (0.11 million parameters), one pass, exact Shapley values over all coalitions, three seeds of weights and order. A value's interval
is Student's over the target's records and adds the variance over seeds.
"""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
from corpora import DATA, STATE, encode, write
from figures import record
from setting import BANK, MODEL, setting

from valuation import (
    cluster,
    content_axis,
    cut_lots,
    exact_shapley,
    first_in_cluster,
    lot_gains,
    lot_shares,
    owner_intervals,
    purity,
)
from valuation.detection import shuffled_tokens
from valuation.subsets import retrain_subsets

SEEDS = (0, 1, 2)
CORRECT = {"6b_finetuning": 0.217, "175b_finetuning": 0.347, "6b_verification": 0.390, "175b_verification": 0.563, "human": 1.0}  # fmt: skip
PACKAGES = ("torch", "numpy", "scipy")
TARGETS = 96


def solutions(count, seed=0):
    """Owner → texts of the same `count` problems."""
    lines = (DATA / "gsm8k" / "example_model_solutions.jsonl").read_text().splitlines()
    chosen = np.random.default_rng(seed).permutation(len(lines))[:count]
    rows = [json.loads(lines[i]) for i in sorted(chosen)]
    found = {name: [row[name]["solution"] for row in rows] for name in CORRECT if name != "human"}
    return found | {"human": [row["ground_truth"] for row in rows]}


def target_texts():
    """Human solutions of other problems: GSM8K's training half."""
    lines = (DATA / "gsm8k" / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"].replace("####", "A:") for line in lines[:TARGETS]]


def stored(name, rows):
    """Token folders of (owner, text) and of the target."""
    folder = STATE / f"owners-{name}"
    digest = {
        "train": write(folder / "train", [(owner, encode(text)) for owner, text in rows]),
        "target_value": write(
            folder / "target_value", [("buyer", encode(t)) for t in target_texts()]
        ),
    }
    return SimpleNamespace(name=name, folder=folder, digest=digest, path=lambda part: folder / part)


def losses(found, member_KN, seed, model=MODEL):
    """Summed nats of each target record for every coalition of the players, and the target's tokens."""
    masks = np.arange(1 << len(member_KN))
    member_CN = ((masks[:, None] >> np.arange(len(member_KN)) & 1) @ member_KN.astype(int)) > 0
    config = setting(found, epochs=1, model=model)
    made = retrain_subsets(config, member_CN, seed, BANK, jobs=1)
    return made.nll_MQ, made.tokens_Q


def valued(found, member_KN, model=MODEL, seeds=SEEDS):
    """Values [R, K] per seed, and the half-width of each player's interval over targets and seeds."""
    values, spread = [], []
    for seed in seeds:
        nll_CQ, tokens_Q = losses(found, member_KN, seed, model)
        gains_KQ = -exact_shapley(nll_CQ, len(member_KN))
        one = owner_intervals(gains_KQ, np.eye(len(member_KN), dtype=int), tokens_Q)
        values.append(one.values_n)
        spread.append(one.se_n)
    values_RK = np.array(values)
    seeds_K = values_RK.var(axis=0, ddof=1) / len(values) if len(values) > 1 else 0.0
    return values_RK, 1.96 * np.sqrt(np.mean(spread, axis=0) ** 2 + seeds_K)


def by_owner(rows, names):
    """Which records are whose."""
    return np.array([[owner == name for owner, _ in rows] for name in names])


def said(names, mean_K, half_K):
    """Values with intervals, in words."""
    return ", ".join(
        f"{n} {v:.4f} ± {h:.4f}" for n, v, h in zip(names, mean_K, half_K, strict=True)
    )


def gsm8k():
    """Are owner values ordered as correctness?"""
    from scipy.stats import spearmanr

    names = list(CORRECT)
    texts = solutions(200)
    rows = [(name, text) for name in names for text in texts[name]]
    values_RK, half_K = valued(stored("gsm8k", rows), by_owner(rows, names))
    share = list(CORRECT.values())
    rho_R = [spearmanr(row, share).statistic for row in values_RK]
    rho = float(np.mean(rho_R))
    record(
        "accept.jsonl", "valuation.owners.gsm8k_order", packages=PACKAGES, kind="hypothesis", seeds=list(SEEDS), n=len(SEEDS), unit="1",
        what="Spearman correlation of owner value with correctness, 5 owners", estimate=rho, low=float(min(rho_R)), high=float(max(rho_R)), level=None,
        spread="least and largest of the seeds", bar=">= 0.9", holds=rho >= 0.9, note="nats per target token: " + said(names, values_RK.mean(0), half_K),
        command="make accept STUDY=owners-gsm8k",
    )  # fmt: skip


def plants():
    """(owner, text) of two clean owners, a copy, noise and shuffled text; the players' names and records; and how many copies are valued."""
    rng = np.random.default_rng(7)
    human = solutions(300, seed=1)["human"]
    clean_a, clean_b, third = human[:100], human[100:200], human[200:]
    noise = ["".join(map(chr, rng.integers(33, 127, len(text)))) for text in third]
    mixed = ["".join(map(chr, shuffled_tokens(encode(t), rng)[:-1])) for t in third]
    parts = {
        "clean_a": clean_a,
        "clean_b": clean_b,
        "copy_of_a": clean_a,
        "noise": noise,
        "shuffled": mixed,
    }
    rows = [(name, text) for name, texts in parts.items() for text in texts]
    found = cluster(
        [hashlib.sha256(text.encode()).digest() for _, text in rows], [text for _, text in rows]
    )
    first_N = first_in_cluster(found.cluster_N, np.arange(len(rows)))
    names = ["clean_a", "clean_b", "noise", "shuffled"]
    member_KN = by_owner(rows, names) & first_N
    copied = int((by_owner(rows, ["copy_of_a"])[0] & first_N).sum())
    return rows, names, member_KN, copied


def planted():
    """Noise, shuffled text and a copy against two clean owners; V(nobody) is the untrained model."""
    rows, names, member_KN, copied = plants()
    values_RK, half_K = valued(stored("planted", rows), member_KN)
    mean_K = values_RK.mean(axis=0)
    clean = float(mean_K[:2].mean())
    worst = float(max(mean_K[2:] + half_K[2:]) / clean)
    record(
        "accept.jsonl", "valuation.owners.planted", packages=PACKAGES, kind="requirement", seeds=list(SEEDS), n=len(SEEDS), unit="1",
        what="largest upper end of a planted owner's value over the mean clean owner's", estimate=worst, low=None, high=None, level=0.95,
        spread="interval over targets and seeds", bar="<= 0", holds=worst <= 0 and copied == 0,
        note=f"the copy has {copied} valued records of 100 and so the value 0; " + said(names, mean_K, half_K), command="make accept STUDY=owners-planted",
    )  # fmt: skip


def lots_of(name, rows, seed):
    """Owner → (value, half-width) through lots, as the graph makes them; and the lots' purity."""
    rows = sorted(rows, key=lambda row: row[0])  # leaves stand by owner
    order_N = np.array([place for _, _, place in rows])  # commits as they came
    texts = [text for _, text, _ in rows]
    prints = [hashlib.sha256(text.encode()).digest() for text in texts]
    first_N = first_in_cluster(cluster(prints, texts).cluster_N, order_N)
    tokens = [encode(text) for text in texts]
    lengths = np.array([len(t) for t in tokens])
    axis_N = content_axis(
        np.concatenate(tokens), np.concatenate([[0], np.cumsum(lengths)]), prints, first_N
    )
    lots = cut_lots(prints, lengths, [None] * len(rows), [False] * len(rows), first_N, axis_N, 4)
    owners, tokens_OK = lot_shares(lots, [owner for owner, _, _ in rows], lengths)
    member_KN = np.array([lots.lot_N == k for k in range(len(lots.ids))])
    nll_CQ, tokens_Q = losses(
        stored(f"{name}-{seed}", [(o, t) for o, t, _ in rows]), member_KN, seed
    )
    gains_KQ, _ = lot_gains(dict(enumerate(nll_CQ)), len(lots.ids), None, tokens_Q)
    each = owner_intervals(gains_KQ, tokens_OK, tokens_Q)
    half_O = each.ci_high_n - each.values_n
    return {o: (v, h) for o, v, h in zip(owners, each.values_n, half_O, strict=True)}, purity(
        tokens_OK
    )


def shells():
    """One owner as 2, 4, 8 names, and one who copies it verbatim and nearly: what its names gain together, retrained."""
    texts = solutions(80, seed=2)
    names = ("6b_finetuning", "175b_verification", "human")
    base = [(n, t) for n in names for t in texts[n]]
    mine = "175b_verification"
    rng = np.random.default_rng(3)

    def nearly(text):
        words = text.split(" ")
        words[int(rng.integers(len(words)))] = "so"
        return " ".join(words)

    def posing(count):
        return [(f"z{i % count}" if o == mine else o, t, i) for i, (o, t) in enumerate(base)]

    copies = [t for o, t in base if o == mine]
    variants = {"1 name": posing(1)} | {f"{k} names": posing(k) for k in (2, 4, 8)} | {
        "verbatim": posing(1) + [("zcopy", t, 1000 + i) for i, t in enumerate(copies)],
        "nearly": posing(1) + [("zcopy", nearly(t), 1000 + i) for i, t in enumerate(copies)],
    }  # fmt: skip
    gains, notes = {}, []
    half = pure = 0.0
    base_R = []
    for name, rows in variants.items():
        totals = []
        for seed in SEEDS:
            values, pure_K = lots_of(f"shells-{name.replace(' ', '-')}", rows, seed)
            totals.append(sum(v for o, (v, _) in values.items() if o.startswith("z")))
            if name == "1 name":
                half, pure = max(half, values["z0"][1]), float(np.mean(pure_K))
        if name == "1 name":
            base_R = totals
        else:
            gap_R = np.array(totals) - np.array(base_R)
            gains[name] = float(gap_R.mean()) / half
            notes.append(f"{name} {gap_R.mean():+.5f} ({gap_R.min():+.5f} to {gap_R.max():+.5f})")
    worst = float(max(gains.values()))
    record(
        "accept.jsonl", "valuation.owners.shells", packages=PACKAGES, kind="requirement", seeds=list(SEEDS), n=len(SEEDS), unit="half-widths",
        what="largest gain of one owner under more names or with copies, in half-widths of its interval", estimate=worst, low=min(gains.values()),
        high=worst, level=0.95, spread="least and largest of the ways", bar="<= 1", holds=bool(worst <= 1),
        note=f"value {np.mean(base_R):.4f} ± {half:.4f} nats; gains: {'; '.join(notes)}; 4 lots, mean purity {pure:.2f}",
        command="make accept STUDY=owners-shells",
    )  # fmt: skip
