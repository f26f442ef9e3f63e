"""Speed and memory of level 1 over text of a given size: surprisal of every token, entropy of records and owners, quality of every record.

Usage: `python bench_surprisal.py` (three times 200 MB, then 1 GB: the figures) or `python bench_surprisal.py MEGABYTES` (a look). The text is
that of state of the union addresses, Python enhancement proposals, school mathematics and plays in records of up to 4,000 characters,
a tenth of it with other characters than ASCII, repeated and streamed from a parquet file; each record is judged alone, so repeating
gains nothing. Tokens are Zipf-distributed, V = 8,192, 4.12 bytes of text per token (what our tokenizer has at this size), memory-mapped as
uint16, of sixteen owners. Both are written before a clock starts. Each part runs in a process of its own, two threads, and says its wall
time from its first call to its last (imports left out; reading, writing and fsync not), CPU time of user and system, and peak of
resident memory since the process began, mapped pages included. The speed is the text's size over the sum of the wall times: of entropy and
quality, which is the requirement and one row, and of all three parts, which is another.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from corpora import documents
from figures import ROOT, record

from valuation import measure_information
from valuation.quality import stream_quality
from valuation.surprisal import open_surprisal, write_surprisal

VOCAB, BYTES_PER_TOKEN, THREADS, RECORD_TOKENS = 8192, 4.12, 2, 970
PARTS = ("surprisal", "entropy", "quality")
PASSES = {"quality": ("entropy", "quality"), "surprisal": PARTS}
"""Parts whose times are added up, by the name of the figures; entropy reads the surprisals that are there."""
SMALL, LARGE, ROUNDS = 200, 1000, 3


def main(sizes):
    """Measure; with all sizes, write the figures down."""
    found = {}
    for megabytes, rounds in sizes:
        with tempfile.TemporaryDirectory(dir=scratch()) as folder:
            written_tokens(Path(folder) / "tokens.bin", int(megabytes * 1e6 / BYTES_PER_TOKEN))
            written_texts(Path(folder) / "texts.parquet", megabytes * 1e6)
            found[megabytes] = [measured(folder, megabytes) for _ in range(rounds)]
    if set(found) == {SMALL, LARGE}:
        write_down(found[SMALL], found[LARGE])


def measured(folder, megabytes):
    """Wall and CPU seconds and peak memory of each part, each in a process of its own."""
    parts = {}
    for part in PARTS:
        done = subprocess.run(
            [sys.executable, __file__, part, folder], stdout=subprocess.PIPE, check=True
        )
        parts[part] = json.loads(done.stdout)
    note = f"{megabytes} MB: " + ", ".join(
        f"{name} {p['wall']:.1f} s wall, {p['cpu']:.1f} CPU s, {p['peak'] / 1e9:.2f} GB" for name, p in parts.items()
    )  # fmt: skip
    passes = {}
    for name, which in PASSES.items():
        wall, cpu = (sum(parts[part][key] for part in which) for key in ("wall", "cpu"))
        passes[name] = {
            "speed": megabytes / wall, "cpu": cpu / megabytes * 1000, "busy": cpu / wall / THREADS,
            "peak": max(parts[part]["peak"] for part in which), "note": note,
        }  # fmt: skip
        print(  # noqa: T201 - for whoever looks
            f"{' + '.join(which)}, {megabytes} MB: {passes[name]['speed']:.1f} MB/s (bar 40), {passes[name]['cpu']:.1f} CPU s/GB (bar 40), "
            f"{passes[name]['busy']:.0%} of {THREADS} threads busy, {passes[name]['peak'] / 1e9:.2f} GB (bar 2)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    print(note, file=sys.stderr, flush=True)  # noqa: T201
    return passes


def part_of(name, folder):
    """Run one part and print what it took."""
    tokens = np.memmap(folder / "tokens.bin", dtype="<u2", mode="r")
    offsets = np.append(np.arange(0, len(tokens), RECORD_TOKENS), len(tokens))
    rng = np.random.default_rng(1)
    fold, owner = (rng.integers(0, n, len(offsets) - 1) for n in (2, 16))
    wall, cpu = time.monotonic(), time.process_time()
    if name == "surprisal":
        write_surprisal(folder, tokens, offsets, fold, VOCAB, threads=THREADS)
    elif name == "entropy":
        measure_information(
            tokens, offsets, bytes_N=np.diff(offsets) * 4, fold_N=fold, owner_N=owner, num_owners=16, vocab_size=VOCAB,
            bits_T=open_surprisal(folder, len(tokens)), threads=THREADS,
        )  # fmt: skip
    else:
        batches = pq.ParquetFile(folder / "texts.parquet").iter_batches(batch_size=4096)
        stream_quality((pl.Series(batch.column(0)) for batch in batches), threads=THREADS)
    took = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(took | {"peak": peak}))  # noqa: T201


def write_down(small, large):
    """The figures."""
    rows = [
        (name, suffix, key, runs, what.format(parts=" and ".join(which)), unit, better, bar, limit)
        for name, which in PASSES.items()
        for suffix, key, runs, what, unit, better, bar, limit in (
            ("speed", "speed", large, "MB of text per wall second: {parts}, 2 threads, 1 GB", "MB/s", "higher", ">= 40", 40),
            ("speed_small", "speed", small, "MB of text per wall second: {parts}, 2 threads, 200 MB, median of three", "MB/s", "higher", ">= 40", 40),
            ("cpu", "cpu", large, "CPU seconds per GB of text, user and system: {parts}, 1 GB", "s/GB", "lower", "<= 40", 40),
            ("cpu_small", "cpu", small, "CPU seconds per GB of text: {parts}, 200 MB, median of three", "s/GB", "lower", "<= 40", 40),
            ("memory", "peak", large, "peak resident memory of the largest of {parts}, 1 GB, mapped pages included", "byte", "lower", "<= 2e9 bytes", 2e9),
        )
    ]  # fmt: skip
    for name, suffix, key, runs, what, unit, better, bar, limit in rows:
        values = sorted(run[name][key] for run in runs)
        ours = values[len(values) // 2]
        record(
            "bench.jsonl", f"valuation.owners.{name}_{suffix}", what=what, unit=unit, ours=ours, better=better, bar=bar,
            holds=ours >= limit if better == "higher" else ours <= limit, n=len(values),
            spread=f"{values[0]:.4g} to {values[-1]:.4g}" if len(values) > 1 else "one run", seeds=[0], packages=("numpy", "polars", "zstandard", "pyarrow"),
            kind="requirement", peer=None, peer_name="none", peer_version="none", ratio=None, command="python tests/benchmarks/bench_surprisal.py",
            note="; ".join(run[name]["note"] for run in runs),
        )  # fmt: skip


def scratch():
    """A folder that git ignores: a gigabyte and a half of scratch files beside the code gets committed one day."""
    folder = ROOT / ".dataworth-accept"
    folder.mkdir(exist_ok=True)
    return folder


def written_tokens(path, count):
    """So many tokens."""
    rng = np.random.default_rng(0)
    share = 1 / (np.arange(VOCAB) + 2.7)
    bounds = np.cumsum(share / share.sum())
    with path.open("wb") as file:
        for at in range(0, count, 1 << 22):
            draw = rng.random(min(1 << 22, count - at), dtype=np.float32)
            file.write(np.minimum(np.searchsorted(bounds, draw), VOCAB - 1).astype("<u2").tobytes())


def written_texts(path, size):
    """A parquet file of `size` bytes of text."""
    whole = [text for name in ("peps", "kinds") for _, _, text in documents(name)]
    texts = [text[at : at + 4000] for text in whole for at in range(0, len(text), 4000)]
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    once = sum(len(text.encode()) for text in texts)
    with pq.ParquetWriter(path, table.schema) as writer:
        for at in range(0, int(size), once):
            share = min(1.0, (size - at) / once)
            writer.write_table(table.slice(0, round(share * len(texts))))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        part_of(sys.argv[1], Path(sys.argv[2]))
    elif sys.argv[1:]:
        main([(float(sys.argv[1]), 1)])
    else:
        main([(SMALL, ROUNDS), (LARGE, 1)])
