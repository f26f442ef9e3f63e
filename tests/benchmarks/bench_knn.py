"""KNN-Shapley against pyDVL: the same values, and CPU seconds; then a million records within 8 GB.

Usage: `python bench_knn.py` (against pyDVL) or `python bench_knn.py large` (once: a million records).
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import ROOT, record

from valuation.knn import knn_shapley

PEERS = ROOT / ".venv-pydvl" / "bin" / "python"
ROUNDS = 3
PEER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np
from sklearn.neighbors import KNeighborsClassifier
from pydvl.valuation import Dataset, KNNShapleyValuation
import pydvl
data = np.load(sys.argv[1])
model, train, test = KNeighborsClassifier(5), Dataset(data["x"], data["y"]), Dataset(data["q"], data["c"])
start = time.process_time()
result = KNNShapleyValuation(model, test, progress=False).fit(train).result
seconds = time.process_time() - start
values = np.empty(len(data["x"])); values[result.indices] = result.values
np.save(sys.argv[2], values)
print(json.dumps({"seconds": seconds, "version": pydvl.__version__}))
"""


def peer():
    """Ratio of CPU seconds and the largest difference at n = 5,000, T = 200, D = 64, K = 5."""
    rng = np.random.default_rng(0)
    x, q = rng.normal(size=(5000, 64)), rng.normal(size=(200, 64))
    y, c = rng.integers(0, 10, 5000), rng.integers(0, 10, 200)
    ratios, ours, theirs, worst = [], [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "in.npz", Path(folder) / "out.npy"
        np.savez(given, x=x, y=y, q=q, c=c)
        for _ in range(ROUNDS):
            start = time.process_time()
            found = knn_shapley(x, y, q, c, 5)
            ours.append(time.process_time() - start)
            run = subprocess.run(
                [PEERS, "-c", PEER, given, made], capture_output=True, text=True, check=True
            )
            told = json.loads(run.stdout.splitlines()[-1])
            theirs.append(told["seconds"])
            ratios.append(theirs[-1] / ours[-1])
            worst = max(worst, float(np.abs(np.load(made) - found.values_N).max()))
    common = {"packages": ("numpy",), "kind": "requirement", "seeds": [0], "n": ROUNDS, "peer_name": "pydvl",
              "peer_version": told["version"], "command": "python tests/benchmarks/bench_knn.py"}  # fmt: skip
    ratio = float(np.median(ratios))
    record(
        "bench.jsonl", "valuation.owners.knn_time", what="CPU seconds of exact KNN-Shapley, n=5000, T=200, D=64, K=5; ratio = peer / ours",
        unit="s", ours=float(np.median(ours)), peer=float(np.median(theirs)), ratio=ratio, better="higher",
        spread=[min(ratios), max(ratios)], bar="ratio >= 20", holds=ratio >= 20, note="", **common,
    )  # fmt: skip
    record(
        "bench.jsonl", "valuation.owners.knn_equal", what="largest difference to the peer's values", unit="utility", ours=worst, peer=None,
        ratio=None, better="lower", spread="largest of all rounds", bar="<= 1e-10", holds=worst <= 1e-10, note="", **common,
    )  # fmt: skip


def large():
    """A million records of 384 float32 features, 100 queries: peak memory of the process."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1_000_000, 384), dtype=np.float32)
    q = rng.standard_normal((100, 384), dtype=np.float32)
    start = time.process_time()
    found = knn_shapley(
        x, rng.integers(0, 10, len(x)), q, rng.integers(0, 10, len(q)), 10, memory_bytes=1 << 30
    )
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    error = abs(found.values_N.sum() - found.utility)
    record(
        "bench.jsonl", "valuation.owners.knn_memory", packages=("numpy",), kind="requirement", seeds=[0], n=1, spread="one run",
        what="peak memory, n = 1,000,000 x 100 queries x 384 dims, float32", unit="byte", ours=peak, peer=None, peer_name="none", peer_version="none",
        ratio=None, better="lower", bar="<= 8e9", holds=bool(peak <= 8e9 and error < 1e-9),
        note=f"{seconds:.0f} CPU s; |sum of values - v(all)| = {error:.1e}", command="python tests/benchmarks/bench_knn.py large",
    )  # fmt: skip


if __name__ == "__main__":
    large() if sys.argv[1:] == ["large"] else peer()
