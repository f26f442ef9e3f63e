"""Near-duplicate clustering, paired with datasketch on the same texts.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_clusters.py [--records 8000] [--rounds 3]

The corpus: random texts of about 2,000 characters over 20,000 invented words, drawn by Zipf's law. One record in ten is
a light edit of an earlier original (2 to 8 words replaced), one in twenty a heavy edit (half of the words replaced).

The peer: `datasketch.MinHash` and `MinHashLSH` as they come (its default banding weighs a miss like a false alarm), 128
permutations, threshold 0.8, shingles of three words; each record joins the earlier leader with the largest `jaccard`
estimate of at least the threshold, else it is inserted. That is our rule in the words of its manual.

`valuation.clusters.time`: CPU seconds from texts to clusters, median of the rounds, both in this process by turns.
`valuation.clusters.recall`: share of edited copies with a true similarity of at least 0.85 that joined a cluster.
`valuation.clusters.strangers`: members whose true similarity to their leader is below 0.7 (0.8 less three errors).

One JSON line per figure is kept in bench.jsonl. Timings are printed and kept; they never decide a test.
"""

import argparse
import hashlib
import statistics
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set

from valuation import cluster, shingle_hashes, token_hashes  # noqa: E402 - after the path is set

THRESHOLD, PERMUTATIONS, SEED = 0.8, 128, 0
CLEAR_COPY, CLEAR_STRANGER = 0.85, 0.7


def corpus(num_records):
    """Texts, and for each the record it was edited from, or -1."""
    generator = np.random.default_rng(SEED)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = [
        "".join(generator.choice(letters, size=size)) for size in generator.integers(3, 11, 20_000)
    ]
    texts, sources = [], []
    for index in range(num_records):
        kind = generator.random()
        if index and kind < 0.15:
            source = int(generator.choice(np.flatnonzero(np.array(sources) < 0)))
            text = list(texts[source])
            light = kind < 0.10
            count = int(generator.integers(2, 9)) if light else len(text) // 2
            for place in generator.choice(len(text), size=count, replace=False):
                text[place] = words[generator.integers(len(words))]
        else:
            source, text = -1, [words[i % len(words)] for i in generator.zipf(1.2, size=270)]
        texts.append(text)
        sources.append(source)
    return [" ".join(text) for text in texts], sources


def ours(texts):
    """Leader of each record, from texts to clusters."""
    prints = [hashlib.sha256(text.encode()).digest() for text in texts]
    return cluster(
        prints, texts, threshold=THRESHOLD, num_permutations=PERMUTATIONS
    ).cluster_N.tolist()


def peer(texts):
    """The same with datasketch."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
    sketches, leaders = {}, []
    for number, text in enumerate(texts):
        words = text.lower().split()
        shingles = {" ".join(words[i : i + 3]).encode() for i in range(max(len(words) - 2, 1))}
        sketch = MinHash(num_perm=PERMUTATIONS)
        sketch.update_batch(list(shingles))
        near = [(sketch.jaccard(sketches[key]), -key) for key in index.query(sketch)]
        best, key = max(near, default=(0.0, 0))
        leaders.append(-key if best >= THRESHOLD else number)
        if leaders[-1] == number:
            sketches[number] = sketch
            index.insert(number, sketch)
    return leaders


def cpu_seconds(task, texts):
    """CPU seconds of a task, all threads together, and its result."""
    start = time.process_time()
    result = task(texts)
    return time.process_time() - start, result


def similarities(texts, pairs):
    """True Jaccard similarity of pairs of records."""
    hashes, offsets = shingle_hashes(*token_hashes(texts))
    sets = [set(hashes[a:b].tolist()) for a, b in pairwise(offsets)]
    return [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs]


def accuracy(texts, sources, leaders):
    """Share of clear copies found, and number of clear strangers joined."""
    edits = [(i, s) for i, s in enumerate(sources) if s >= 0]
    clear = [
        i for (i, _), j in zip(edits, similarities(texts, edits), strict=True) if j >= CLEAR_COPY
    ]
    found = sum(leaders[i] != i for i in clear) / len(clear)
    joined = [(i, leader) for i, leader in enumerate(leaders) if leader != i]
    return found, sum(j < CLEAR_STRANGER for j in similarities(texts, joined)), len(clear)


def record(name, what, **figure):
    """One line of bench.jsonl."""
    figures.record(
        "bench.jsonl", name, packages=("numpy", "polars", "rensa"), what=what, kind="requirement", seeds=[SEED],
        peer_name="datasketch", peer_version=version("datasketch"), command="make bench", **figure,
    )  # fmt: skip


def measure(num_records, rounds):
    """Run both by turns and record three figures."""
    texts, sources = corpus(num_records)
    times, results = {ours: [], peer: []}, {}
    for number in range(rounds):
        for task in (
            (ours, peer) if number % 2 == 0 else (peer, ours)
        ):  # neither is always the second
            seconds, results[task] = cpu_seconds(task, texts)
            times[task].append(seconds)
    ratios = sorted(a / b for a, b in zip(times[ours], times[peer], strict=True))
    mine, theirs = statistics.median(times[ours]), statistics.median(times[peer])
    characters = sum(map(len, texts)) // len(texts)
    note = f"{num_records} records of {characters} characters, {PERMUTATIONS} permutations, threshold {THRESHOLD}"
    record(
        "valuation.clusters.time", "clusters of near duplicates, from texts to cluster ids", unit="CPU s",
        ours=mine, peer=theirs, ratio=statistics.median(ratios), better="lower", n=rounds,
        spread=f"{ratios[0]:.3f}..{ratios[-1]:.3f}", bar="ratio <= 0.5", holds=statistics.median(ratios) <= 0.5,
        note=note,
    )  # fmt: skip
    (found, strangers, num_clear), (peer_found, peer_strangers, _) = (
        accuracy(texts, sources, results[task]) for task in (ours, peer)
    )
    error = (found * (1 - found) / num_clear) ** 0.5
    record(
        "valuation.clusters.recall", f"copies with true similarity >= {CLEAR_COPY} that joined a cluster", unit="share",
        ours=found, peer=peer_found, ratio=found / peer_found, better="higher", n=num_clear,
        spread=f"standard error {error:.4f}", bar="ours >= 0.95", holds=found >= 0.95, note=note,
    )  # fmt: skip
    record(
        "valuation.clusters.strangers", f"members with true similarity < {CLEAR_STRANGER} to their leader", unit="records",
        ours=strangers, peer=peer_strangers, ratio=None, better="lower", n=num_records,
        spread="exact count", bar="ours <= 0", holds=strangers == 0, note=note,
    )  # fmt: skip


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description="Clustering against datasketch.")
    parser.add_argument("--records", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    measure(given.records, given.rounds)


if __name__ == "__main__":
    main()
