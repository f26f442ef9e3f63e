"""Speed and memory of level 1 over text of a given size: surprisal of every token, entropy of records and owners, quality of every record.

Usage: `python bench_surprisal.py MEGABYTES` (1000 for the figure; smaller for a look). The text is that of the state of the union
addresses in records of 4,000 characters, repeated and streamed from a parquet file; each record is judged alone, so repeating gains
nothing. Tokens are Zipf-distributed, V = 8,192, 4.12 bytes of text per token (what our tokenizer has at this size), memory-mapped
as uint16, of sixteen owners. Both are written before the clock starts. Two threads.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from corpora import sotu
from figures import ROOT, record

from valuation import measure_information, text_quality
from valuation.surprisal import write_surprisal

VOCAB, BYTES_PER_TOKEN, THREADS = 8192, 4.12, 2


def main(megabytes):
    """Two figures for all of it; the parts stand in the note."""
    rng = np.random.default_rng(0)
    count = int(megabytes * 1e6 / BYTES_PER_TOKEN)
    # A folder that git ignores: a gigabyte and a half of scratch files beside the code gets committed one day.
    scratch = ROOT / ".dataworth-accept"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        tokens = written_tokens(Path(folder) / "tokens.bin", count, rng)
        texts = written_texts(Path(folder) / "texts.parquet", megabytes * 1e6)
        offsets = np.append(np.arange(0, count, 970), count)
        fold, owner = (rng.integers(0, n, len(offsets) - 1) for n in (2, 16))
        marks = [(time.monotonic(), time.process_time())]
        bits = write_surprisal(Path(folder), tokens, offsets, fold, VOCAB, threads=THREADS)
        marks.append((time.monotonic(), time.process_time()))
        measure_information(
            tokens, offsets, bytes_N=np.diff(offsets) * 4, fold_N=fold, owner_N=owner, num_owners=16, vocab_size=VOCAB, bits_T=bits
        )  # fmt: skip
        marks.append((time.monotonic(), time.process_time()))
        seen = 0
        for batch in pq.ParquetFile(texts).iter_batches(batch_size=4096):
            found = text_quality(pl.Series(batch.column(0)), threads=THREADS)
            seen += len(found.score_N)
        marks.append((time.monotonic(), time.process_time()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wall, cpu = (end - start for start, end in zip(marks[0], marks[-1], strict=True))
    parts = ", ".join(
        f"{name} {b[0] - a[0]:.0f} s wall and {b[1] - a[1]:.0f} CPU s"
        for name, a, b in zip(("surprisal", "entropy", "quality"), marks, marks[1:], strict=False)
    )
    speed = megabytes / wall
    note = f"{count} tokens, {seen} texts: {parts}; {megabytes / cpu:.1f} MB per CPU second"
    print(speed, peak / 1e9, note)  # noqa: T201
    if megabytes < 1000:
        return
    figure = {"packages": ("numpy", "polars", "zstandard"), "kind": "requirement", "seeds": [0], "n": 1, "spread": "one run", "peer": None, "peer_name": "none",
              "peer_version": "none", "ratio": None, "command": f"python tests/benchmarks/bench_surprisal.py {megabytes:.0f}", "note": note}  # fmt: skip
    record(
        "bench.jsonl", "valuation.owners.surprisal_speed", what="MB of text per wall second: surprisal, entropy and quality, 2 threads",
        unit="MB/s", ours=speed, better="higher", bar=">= 40", holds=speed >= 40, **figure,
    )  # fmt: skip
    record(
        "bench.jsonl", "valuation.owners.surprisal_memory", what="peak resident memory, mapped pages of tokens and array included", unit="byte",
        ours=peak, better="lower", bar="<= 2e9", holds=peak <= 2e9, **figure,
    )  # fmt: skip


def written_tokens(path, count, rng):
    """A memory map of so many tokens."""
    share = 1 / (np.arange(VOCAB) + 2.7)
    bounds = np.cumsum(share / share.sum())
    with path.open("wb") as file:
        for at in range(0, count, 1 << 22):
            draw = rng.random(min(1 << 22, count - at), dtype=np.float32)
            file.write(np.minimum(np.searchsorted(bounds, draw), VOCAB - 1).astype("<u2").tobytes())
    return np.memmap(path, dtype="<u2", mode="r")


def written_texts(path, size):
    """A parquet file of `size` bytes of text."""
    texts = [text[at : at + 4000] for _, _, text in sotu(16) for at in range(0, len(text), 4000)]
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    once = sum(len(text.encode()) for text in texts)
    with pq.ParquetWriter(path, table.schema) as writer:
        for at in range(0, int(size), once):
            share = min(1.0, (size - at) / once)
            writer.write_table(table.slice(0, round(share * len(texts))))
    return path


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1000)
