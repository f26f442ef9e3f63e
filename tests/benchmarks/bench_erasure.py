"""Erasing 64 of 100,000 records from a corpus version, against nothing but rewriting the same Parquet files.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_erasure.py [--rounds 5]

Ours: `Versions.tombstone` (the next version, with its roots), `move_head`, `purge` (the rows out of the files of all versions). The baseline reads
each file that holds one of the records, leaves their rows out and writes the file again with the same settings and an fsync. CPU seconds of
one process with all its threads, both in turns on the same records; every round erases other records of a corpus that is one version longer.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set

from pipelines.storage import blocks  # noqa: E402
from pipelines.storage.home import Home  # noqa: E402
from pipelines.storage.keys import CorpusKeys  # noqa: E402
from pipelines.storage.records import SCHEMA  # noqa: E402
from pipelines.storage.versions import Versions  # noqa: E402

RECORDS, ERASED, WORDS = 100_000, 64, 110


def corpus():
    """Records of about 700 bytes of random words from a vocabulary of 20,000: 66 MB, one file, the hardest case: nothing is left alone."""
    rng = np.random.default_rng(0)
    words = np.array(
        ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 20_000)]
    )
    number = np.arange(RECORDS)
    digests = [bytes(row) for row in rng.integers(0, 256, (RECORDS, 32), dtype=np.uint8)]
    other = [bytes(row) for row in rng.integers(0, 256, (RECORDS, 32), dtype=np.uint8)]
    columns = {
        "record_id": digests, "fingerprint": other, "owner": [f"owner-{i % 20:02d}" for i in number], "source": ["text.jsonl"] * RECORDS,
        "position": number, "text": [" ".join(words[row]) for row in rng.integers(0, len(words), (RECORDS, WORDS))],
        "licence": ["CC0-1.0"] * RECORDS, "consent_train": [True] * RECORDS, "consent_display": [True] * RECORDS,
        "consent_resell": [True] * RECORDS, "date": [None] * RECORDS, "personal": [False] * RECORDS, "raw_digest": other,
    }  # fmt: skip
    return pl.DataFrame(columns, schema=SCHEMA)


def rewritten(folder, storage, gone, target):
    """Read every file with such a record, leave its rows out, write it; the number of files."""
    count = 0
    for stored in storage.blocks:
        ids = blocks.read_block(folder, stored, ["record_id"])
        if not ids["record_id"].is_in(gone).any():
            continue
        rows = blocks.read_block(folder, stored)
        with (target / f"{count}.parquet").open("wb") as file:
            rows.filter(~rows["record_id"].is_in(gone)).write_parquet(
                file, compression="zstd", statistics=False, row_group_size=blocks.SHARD_LEAVES
            )
            file.flush()
            os.fsync(file.fileno())
        count += 1
    return count


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description="Cost of erasing from a corpus version.")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rng, pairs = np.random.default_rng(1), []
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home").create()
        versions = Versions(home, CorpusKeys.demo())
        records = corpus()
        versions.move_head(versions.stage(records))
        order = rng.permutation(RECORDS)
        for number in range(given.rounds):
            gone = (
                records["record_id"]
                .gather(order[number * ERASED : (number + 1) * ERASED])
                .to_list()
            )
            head = versions.head()
            start = time.process_time()
            files = rewritten(home.blocks, versions.storage(head), gone, Path(folder))
            between = time.process_time()
            child = versions.tombstone(head, gone)
            versions.move_head(child)
            purged = versions.purge(gone)
            pairs.append((time.process_time() - between, between - start))
            assert purged.num_files == files  # no file with such a row is left
            sys.stdout.write(f"{pairs[-1][0]:.2f} s against {pairs[-1][1]:.2f} s, {files} files\n")
    ratios = sorted(a / b for a, b in pairs)
    ratio = statistics.median(ratios)
    figures.record(
        "bench.jsonl", "pipelines.erasure.purge", what=f"erasing {ERASED} of {RECORDS} records against rewriting the touched files", unit="CPU s",
        ours=statistics.median(a for a, _ in pairs), peer=statistics.median(b for _, b in pairs), peer_name="rewriting the same Parquet files",
        peer_version=pl.__version__, ratio=ratio, better="lower", n=given.rounds, spread=f"{ratios[0]:.2f}..{ratios[-1]:.2f}", bar="ratio <= 2",
        holds=ratio <= 2, kind="requirement", seeds=[0], packages=("polars",), command="make bench",
        note=f"{files} file with 66 MB of text; next version, HEAD, and the rows out of all versions",
    )  # fmt: skip


if __name__ == "__main__":
    main()
