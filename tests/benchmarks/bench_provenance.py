"""Trees, proofs, the sparse tree and the ledger, paired with merkletools and pymerkle in one run, beside the bare hash rate.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_provenance.py [--leaves 1000000] [--rounds 3]

merkletools 1.0.3 runs in this process, by turns with ours, over the same records (text for it, the same UTF-8 for ours).
pymerkle 7 (GPL) runs in `.venv-peers` (`make peers`) as a subprocess over a tenth of them, since it takes 15 s for a
million; both sides of that ratio are rates. A missing peer writes `holds: null` with the reason.

Speed is leaves or entries per CPU second of one core. `note` states the physical limit: the rate of bare `hashlib.sha256`
over the same number of leaves and nodes, measured in the same run; CPU seconds on a shared machine swing by half, ratios
inside one round by less. Memory is what the resident set grows by in a process of its own.
"""

import argparse
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from struct import iter_unpack

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set

from provenance import (  # noqa: E402 - after the path is set
    Ledger,
    MerkleTree,
    SigningKey,
    SparseTree,
    build_tree,
    leaf_hash,
    verify_absence,
    verify_inclusion,
)

SAMPLE = 2000
PEER = """
import json, sys, time
from importlib.metadata import version
from pymerkle import InmemoryTree
count = int(sys.argv[1])
records = [record_text.encode() for record_text in (f"record {i:012d} " + "x" * 80 for i in range(count))]
start = time.process_time()
tree = InmemoryTree(algorithm="sha256")
for record in records:
    tree.append_entry(record)
print(json.dumps({"rate": count / (time.process_time() - start), "version": version("pymerkle")}))
"""


def records(count, first=0):
    """Texts of 100 characters, all different."""
    return [f"record {i:012d} " + "x" * 80 for i in range(first, first + count)]


def timed(task, *arguments):
    """CPU seconds of a task and its result."""
    start = time.process_time()
    result = task(*arguments)
    return time.process_time() - start, result


def bare(data):
    """The physical limit in Python: one hash per leaf and one per node, and nothing else."""
    digest = hashlib.sha256
    for record in data:
        digest(record).digest()
    node = bytes(65)
    for _ in range(len(data) - 1):
        digest(node).digest()


def theirs(texts):
    """Merkletools as its manual shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = importlib.import_module("merkletools").MerkleTools(hash_type="sha256")
    tree.add_leaf(texts, do_hash=True)
    tree.make_tree()
    return tree


def record(name, what, **figure):
    """One line of bench.jsonl."""
    common = {"kind": "requirement", "seeds": [], "command": "make bench"}
    figures.record(
        "bench.jsonl",
        f"provenance.{name}",
        packages=("cryptography",),
        what=what,
        **(common | figure),
    )


def spread(values):
    """Smallest and largest."""
    return f"{min(values):.3g}..{max(values):.3g}"


def tree_speed(count, rounds):
    """Building against merkletools, then against pymerkle."""
    texts = records(count)
    data = [text.encode() for text in texts]
    have = find_spec("merkletools") is not None
    mine, peer, limit = [], [], []
    for number in range(rounds):
        tasks = [(mine, MerkleTree.from_data, data), (limit, bare, data)] + (
            [(peer, theirs, texts)] if have else []
        )
        for times, task, given in tasks if number % 2 == 0 else tasks[::-1]:
            seconds, made = timed(task, given)
            del made
            times.append(count / seconds)
    ratios = [a / b for a, b in zip(mine, peer, strict=True)] if have else []
    share = [a / b for a, b in zip(mine, limit, strict=True)]
    ratio = statistics.median(ratios) if ratios else None
    note = (
        f"{count} records of 100 bytes; bare hashlib {statistics.median(limit):.0f} leaves/s, ours reach {statistics.median(share):.2f} of it"
        + ("" if have else "; merkletools is not installed")
    )
    record(
        "tree.build", "RFC 9162 tree over records against merkletools' tree", unit="leaves/CPU s", ours=statistics.median(mine),
        peer=statistics.median(peer) if have else None, peer_name="merkletools", peer_version="1.0.3", ratio=ratio, better="higher",
        n=rounds, spread=spread(ratios or mine), bar="ratio >= 1.0", holds=None if ratio is None else ratio >= 1.0, note=note,
    )  # fmt: skip
    against_pymerkle(count // 10, max(rounds, 5))
    proofs(MerkleTree.from_data(data), data, theirs(texts) if have else None)


def against_pymerkle(count, rounds):
    """The same against pymerkle 7 in its own environment."""
    python = ROOT / ".venv-peers" / "bin" / "python"
    data = [text.encode() for text in records(count)]
    mine, peer, version, reason = [], [], "", ""
    for _ in range(rounds):
        done = (
            subprocess.run(
                [python, "-c", PEER, str(count)], capture_output=True, text=True, check=False
            )
            if python.exists()
            else None
        )
        if done is None or done.returncode:
            reason = (
                "pymerkle is not installed: make peers"
                if done is None
                else done.stderr.strip()[-120:]
            )
            break
        answer = json.loads(done.stdout)
        version = answer["version"]
        peer.append(answer["rate"])
        mine.append(count / timed(MerkleTree.from_data, data)[0])
    ratios = [a / b for a, b in zip(mine, peer, strict=True)]
    ratio = statistics.median(ratios) if ratios else None
    record(
        "tree.pymerkle", "RFC 9162 tree over records against pymerkle's in-memory tree", unit="leaves/CPU s",
        ours=statistics.median(mine) if mine else None, peer=statistics.median(peer) if peer else None, peer_name="pymerkle",
        peer_version=version, ratio=ratio, better="higher", n=len(ratios), spread=spread(ratios) if ratios else "",
        bar="ratio >= 8", holds=None if ratio is None else ratio >= 8, note=reason or f"{count} records of 100 bytes",
    )  # fmt: skip


def proofs(tree, data, peer):
    """Making and checking inclusion proofs, spread over the whole tree."""
    step = max(1, tree.size // SAMPLE)
    places = list(range(0, tree.size, step))
    gc.collect()
    gc.freeze()  # a full collection over the records of both trees would be counted as the time of a few proofs
    root = tree.root()
    making, paths = timed(lambda: [tree.inclusion_path(index) for index in places])
    leaves = [leaf_hash(data[index]) for index in places]
    checks = lambda: [  # noqa: E731 - timed as a whole
        verify_inclusion(leaf, index, tree.size, path, root)
        for leaf, index, path in zip(leaves, places, paths, strict=True)
    ]
    checking, _ = timed(checks)
    theirs_us = [None, None]
    if peer is not None:
        seconds, found = timed(lambda: [peer.get_proof(index) for index in places])
        target, top = [peer.get_leaf(index) for index in places], peer.get_merkle_root()
        check, _ = timed(
            lambda: [peer.validate_proof(p, t, top) for p, t in zip(found, target, strict=True)]
        )
        theirs_us = [seconds / len(places) * 1e6, check / len(places) * 1e6]
    for name, what, seconds, other, bar in (
        ("proof.make", "making an inclusion proof", making, theirs_us[0], 60),
        ("proof.verify", "checking an inclusion proof", checking, theirs_us[1], 40),
    ):
        mine = seconds / len(places) * 1e6
        record(
            name, what, unit="CPU us", ours=mine, peer=other, peer_name="merkletools", peer_version="1.0.3",
            ratio=mine / other if other else None, better="lower", n=len(places), spread="mean of all", bar=f"ours <= {bar}",
            holds=mine <= bar, note=f"{tree.size} leaves, {len(paths[0])} hashes",
        )  # fmt: skip


def processes(count, rounds):
    """Two processes hash a half each into one tree, against one process; the records lie in one buffer."""
    data = memoryview("".join(records(count)).encode())
    width = len(data) // count

    def leaves(first, end):
        return (row for (row,) in iter_unpack(f"{width}s", data[first * width : end * width]))

    speedups, paths, limits = [], [], []
    for number in range(rounds):
        limits.append(bare_speedup(4 * count))  # about as long as the trees take
        for used in (1, 2) if number % 2 == 0 else (2, 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall, cpu = time.perf_counter(), time.process_time()
            tree = build_tree(leaves, count, used)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            worker = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if used == 1:
                alone, alone_cpu, root = wall, cpu, tree.root()
            else:
                shared, shared_cpu, joined = wall, max(cpu, worker), tree.root()
            del tree
        assert root == joined
        speedups.append(alone / shared)
        paths.append(alone_cpu / shared_cpu)
    ratio, limit = statistics.median(speedups), statistics.median(limits)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    free = cores >= 2 and load < cores - 0.5
    # Near-linear in what the machine gives: two "cores" of a virtual machine are often one core and a half.
    near = ratio >= 0.9 * limit
    record(
        "tree.processes", "two processes hash half of the leaves each into one tree, against one process", unit="x wall time",
        ours=ratio, peer=1.0, peer_name="one process", peer_version="", ratio=ratio, better="higher", n=rounds, spread=spread(speedups),
        bar="ratio >= 0.9 x bare hashing's in the same run", holds=near if near or free else None,
        note=f"{count} leaves, {cores} cores, load {load:.1f}" + ("" if free else ": other work ran, a miss says nothing")
        + f"; CPU seconds of one process over those of the busier of two: {statistics.median(paths):.2f} ({spread(paths)})"
        + f"; bare hashing alone against two processes, wall time: {limit:.2f} ({spread(limits)})",
    )  # fmt: skip


def bare_speedup(count):
    """Wall time of so many bare hashes in one process over that in two, which share nothing: what the machine allows."""

    def hashes(share):
        for _ in range(share):
            hashlib.sha256(bytes(100)).digest()

    start = time.perf_counter()
    hashes(count)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    fork = multiprocessing.get_context("fork")
    halves = [fork.Process(target=hashes, args=(count // 2,)) for _ in range(2)]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    return alone / (time.perf_counter() - start)


def memory(count):
    """What the resident set of a fresh process grows by while a tree is built from a stream."""
    grown = _in_child(count)
    record(
        "tree.memory", "memory that a tree over a stream of records takes", unit="MB", ours=grown, peer=None, peer_name="", peer_version="",
        ratio=None, better="lower", n=1, spread="", bar="ours <= 120", holds=grown <= 120, note=f"{count} leaves, 64 MB of them hashes",
    )  # fmt: skip


def _in_child(count):
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(grown_by_tree, count).result()


def grown_by_tree(count):
    """MB between before and after; runs in a process of its own."""
    MerkleTree.from_data(f"warm {number}".encode() for number in range(1000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tree = MerkleTree.from_data(b"record %d" % number for number in range(count))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert tree.size == count
    return (after - before) / 1024 * 1.048576


def sparse(count, rounds):
    """Building the sparse tree, proving absence, checking it."""
    keys = [hashlib.sha256(b"key %d" % number).digest() for number in range(count)]
    seconds, limit = [], []
    for _ in range(rounds):
        limit.append(timed(bare, keys)[0])
        took, tree = timed(SparseTree, keys)
        seconds.append(took)
        if len(seconds) < rounds:
            del tree
    took = min(seconds)  # other work on the machine only ever adds
    record(
        "sparse.build", "sparse Merkle tree over random keys", unit="CPU s", ours=took, peer=min(limit),
        peer_name="bare hashlib, one hash per leaf and node", peer_version="", ratio=took / min(limit), better="lower",
        n=rounds, spread=spread(seconds), bar="ours <= 4", holds=took <= 4, note=f"{count} keys, fastest of {rounds} rounds",
    )  # fmt: skip
    asked = [hashlib.sha256(b"absent %d" % number).digest() for number in range(SAMPLE)]
    making, found = timed(lambda: [tree.prove(key) for key in asked])
    root = tree.root
    checking, _ = timed(
        lambda: [verify_absence(root, key, proof) for key, proof in zip(asked, found, strict=True)]
    )
    record(
        "sparse.absence", "making and checking a proof of absence", unit="CPU us", ours=(making + checking) / SAMPLE * 1e6, peer=None,
        peer_name="", peer_version="", ratio=None, better="lower", n=SAMPLE, spread="mean of all", bar="none", holds=None,
        note=f"{count} keys: {making / SAMPLE * 1e6:.0f} us to make, {checking / SAMPLE * 1e6:.0f} us to check",
    )  # fmt: skip


def ledger(count, rounds):
    """Group commit and single durable appends, and how often each syncs."""
    body = {"run": "train-0123", "first_step": 400, "last_step": 449, "shards": [1, 2, 3]}
    rates, cpu, singles, syncs = [], [], [], 0
    real = os.fsync
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            log = Ledger.open(Path(folder), "example.com/demo", SigningKey.demo())
            used = time.process_time()
            start = time.perf_counter()
            for _ in range(count // 100):
                log.append_many([("windows", body)] * 100, "2025-01-31T12:00:00Z")
            rates.append(count / (time.perf_counter() - start))
            cpu.append((time.process_time() - used) / count * 1e6)
            calls = []
            os.fsync = lambda descriptor, calls=calls: (calls.append(1), real(descriptor))
            start = time.perf_counter()
            for _ in range(100):
                log.append("windows", body, "2025-01-31T12:00:00Z")
            singles.append((time.perf_counter() - start) / 100 * 1e3)
            os.fsync = real
            syncs = len(calls) / 100
            assert log.verify(log.vkey).size == count + 100
    record(
        "ledger.group", "entries appended durably, a hundred to a signature and an fsync", unit="entries/s wall", ours=statistics.median(rates),
        peer=None, peer_name="", peer_version="", ratio=None, better="higher", n=rounds, spread=spread(rates), bar="ours >= 2000",
        holds=statistics.median(rates) >= 2000, note=f"{count} entries, {statistics.median(cpu):.0f} CPU us each, load {os.getloadavg()[0]:.1f}; verified afterwards",
    )  # fmt: skip
    record(
        "ledger.single", "fsyncs of one durable append", unit="fsyncs", ours=syncs, peer=None, peer_name="", peer_version="", ratio=None,
        better="lower", n=100 * rounds, spread="exact count", bar="ours = 1", holds=syncs == 1,
        note=f"{statistics.median(singles):.2f} ms wall an append in a log of {count} entries",
    )  # fmt: skip


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(
        description="Provenance against merkletools, pymerkle and bare hashlib."
    )
    parser.add_argument("--leaves", type=int, default=1_000_000)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    memory(given.leaves)
    tree_speed(given.leaves, given.rounds)
    processes(given.leaves, max(given.rounds, 5))
    sparse(given.leaves, given.rounds)
    ledger(given.entries, given.rounds)


if __name__ == "__main__":
    main()
