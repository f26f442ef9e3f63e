"""Speed and memory of the surprisal array over synthetic text of a given size; quality on a sample of real text.

Usage: `python bench_surprisal.py MEGABYTES` (1000 for the figure; smaller for a look). Tokens are Zipf-distributed, V = 8,192,
4.12 bytes of text per token (what our tokenizer has at this size), memory-mapped as uint16. The corpus is written before the clock starts.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import ROOT, record

from valuation.surprisal import record_bits, write_surprisal

VOCAB, BYTES_PER_TOKEN = 8192, 4.12


def main(megabytes):
    """Two figures, of the array alone; quality is timed beside and named in the note."""
    rng = np.random.default_rng(0)
    count = int(megabytes * 1e6 / BYTES_PER_TOKEN)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        path = Path(folder) / "tokens.bin"
        share = 1 / (np.arange(VOCAB) + 2.7)
        bounds = np.cumsum(share / share.sum())
        with path.open("wb") as file:
            for at in range(0, count, 1 << 22):
                draw = rng.random(min(1 << 22, count - at), dtype=np.float32)
                file.write(
                    np.minimum(np.searchsorted(bounds, draw), VOCAB - 1).astype("<u2").tobytes()
                )
        tokens = np.memmap(path, dtype="<u2", mode="r")
        offsets = np.append(np.arange(0, count, 500), count)
        fold = rng.integers(0, 2, len(offsets) - 1)
        start, used = time.monotonic(), time.process_time()
        bits = write_surprisal(Path(folder), tokens, offsets, fold, VOCAB, threads=2)
        record_bits(bits, offsets)
        wall, cpu = time.monotonic() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    quality = quality_speed()
    common = {"packages": ("numpy",), "kind": "requirement", "seeds": [0], "n": 1, "spread": "one run", "peer": None, "peer_name": "none",
              "peer_version": "none", "ratio": None, "command": f"python tests/benchmarks/bench_surprisal.py {megabytes}"}  # fmt: skip
    note = (
        f"surprisal array only, {count} tokens: {wall:.0f} s wall, {cpu:.0f} CPU s; text_quality alone does {quality:.1f} MB per CPU second, "
        "so the bar for both together is not met"
    )
    speed = megabytes / wall
    print(speed, megabytes / cpu, peak / 1e9, quality)  # noqa: T201
    if megabytes < 1000:
        return
    record(
        "bench.jsonl", "valuation.owners.surprisal_speed", what="MB of text per wall second, surprisal of every token, 2 threads",
        unit="MB/s", ours=speed, better="higher", bar=">= 40", holds=speed >= 40 and quality >= 40, note=note, **common,
    )  # fmt: skip
    record(
        "bench.jsonl", "valuation.owners.surprisal_memory", what="peak resident memory, mapped pages of tokens and array included", unit="byte",
        ours=peak, better="lower", bar="<= 2e9", holds=peak <= 2e9, note=note, **common,
    )  # fmt: skip


def quality_speed():
    """MB of text per CPU second of `text_quality`, on the project's own documents."""
    from valuation import text_quality

    texts = [path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in str(path)]
    texts = [text[at : at + 2000] for text in texts for at in range(0, len(text), 2000)] * 4
    used = time.process_time()
    text_quality(texts)
    return sum(map(len, texts)) / 1e6 / (time.process_time() - used)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1000)
