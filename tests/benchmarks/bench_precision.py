"""What a batch costs beside its step, what bfloat16 gains, and what an order of 10 million records weighs.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_precision.py [--rounds 4]

`trainer.input.share`: CPU time that making batches takes (packing, in the prefetcher's thread, and turning them into
tensors) over the CPU time of the whole step, in the loop's own parts, bfloat16, so the shorter step. `trainer.bfloat16.speed`:
tokens per CPU second of a step in bfloat16 over float32, the same model and batches, steps in turn. Both for a model of
28 million parameters at T = 256, one thread. `trainer.order.memory`: MiB that the order of 10 million records with
weights holds after epochs near and far, without the three input columns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set
from bench_trainer import corpus  # noqa: E402

from trainer.data import BatchPlan, TokenStore  # noqa: E402
from trainer.microbatch import take_batch  # noqa: E402
from trainer.model import Transformer, init_parameters, num_parameters  # noqa: E402
from trainer.objective import LanguageModelling  # noqa: E402
from trainer.optim import build_optimizer  # noqa: E402
from trainer.order import MICRO, Order  # noqa: E402
from trainer.prefetch import Prefetcher  # noqa: E402
from trainer.spec import BatchSpec, ModelSpec, OptimSpec  # noqa: E402
from trainer.step import train_step  # noqa: E402

LARGE = ModelSpec(num_layers=9, dim=512, num_heads=8, num_kv_heads=4, ffn_dim=1408)
BATCH = BatchSpec(rows=4, length=256)
COMMAND = "OMP_NUM_THREADS=1 python tests/benchmarks/bench_precision.py"


class TimedPlan(BatchPlan):
    """Adds up the CPU time of its thread."""

    seconds = 0.0

    def batch(self, step):
        """The batch, timed."""
        start = time.thread_time()
        batch = super().batch(step)
        self.seconds += time.thread_time() - start
        return batch


class TimedObjective(LanguageModelling):
    """Adds up the CPU time of taking a batch, in the thread that asks."""

    seconds = 0.0

    def batch(self, step, rank, world):
        """The tensors, timed."""
        start = time.thread_time()
        batch = super().batch(step, rank, world)
        self.seconds += time.thread_time() - start
        return batch


def record(name, what, **figure):
    """One line of bench.jsonl."""
    figures.record(
        "bench.jsonl", name, packages=("torch", "numpy"), what=what, seeds=[0], command=COMMAND, **figure
    )  # fmt: skip


def steps(store, rounds):
    """Per precision: CPU seconds of each step, and of its input, steps of both in turn."""
    sides = {}
    for precision in ("float32", "bfloat16"):
        model = Transformer(LARGE)
        init_parameters(model, 0)
        plan = TimedPlan(store, 0, BATCH)
        objective = TimedObjective(plan, prefetcher=Prefetcher(plan))
        sides[precision] = model, build_optimizer(model, OptimSpec()), plan, objective, []
    for step in range(rounds + 1):
        for precision, (model, optimizer, plan, objective, times) in sides.items():
            plan.seconds = objective.seconds = 0.0
            start = time.process_time()
            batch, counts = take_batch(objective, step, 0, 1, 1)
            train_step(
                model, optimizer, objective, batch, counts, clip_norm=1.0, precision=precision
            )
            times.append((time.process_time() - start, plan.seconds + objective.seconds))
    return {precision: side[-1][1:] for precision, side in sides.items()}  # the first warms up


def measure_steps(rounds):
    """The figures of one model."""
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder) / "tokens")
        found = steps(TokenStore.open(Path(folder) / "tokens"), rounds)
    tokens, parameters = BATCH.rows * BATCH.length, num_parameters(Transformer(LARGE))
    setting = f"{parameters} parameters, {BATCH.rows} x {BATCH.length} tokens, one thread"
    speed = {
        precision: [tokens / seconds for seconds, _ in pairs] for precision, pairs in found.items()
    }
    ratios = sorted(b / a for a, b in zip(speed["float32"], speed["bfloat16"], strict=True))
    ratio = statistics.median(ratios)
    record(
        "trainer.bfloat16.speed", "a training step in bfloat16 autocast against float32, the same model and batches",
        kind="hypothesis", unit="tokens/CPU s", ours=statistics.median(speed["bfloat16"]), peer=statistics.median(speed["float32"]),
        peer_name="the same step in float32", peer_version=torch.__version__, ratio=ratio, better="higher", n=rounds,
        spread=f"{ratios[0]:.2f}..{ratios[-1]:.2f}", bar="ratio >= 1.5", holds=ratio >= 1.5, note=setting,
    )  # fmt: skip
    shares = sorted(made / seconds for seconds, made in found["bfloat16"])
    share = statistics.median(shares)
    record(
        "trainer.input.share", "CPU time of making batches over that of the step, bfloat16",
        kind="requirement", unit="share", ours=share, better="lower", n=rounds, spread=f"{shares[0]:.4f}..{shares[-1]:.4f}",
        bar="share <= 0.02", holds=share <= 0.02, note=setting,
    )  # fmt: skip


def resident_mib():
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def measure_memory():
    """The order of many records with weights of their own."""
    size, rng = 10_000_000, np.random.default_rng(0)
    length_N, index_N = rng.integers(20, 400, size), np.arange(size)
    micro_N = rng.integers(0, 3 * MICRO, size)
    before, start = resident_mib(), time.process_time()
    order = Order(index_N, length_N, micro_N, size, 0)
    for epoch in (0, 1, 1000):
        order.at(int((epoch + 0.5) * order.mean_tokens))
    spent = time.process_time() - start
    held = resident_mib() - before
    record(
        "trainer.order.memory", "memory of the order of 10 million weighted records after three epochs",
        kind="hypothesis", unit="MiB", ours=held, better="lower", n=1, spread="none", bar="at most 1024 MiB", holds=held <= 1024,
        note=f"{spent:.1f} CPU s for the order and three epochs, one of them a thousand epochs ahead",
    )  # fmt: skip


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description="Input, precision and memory of the trainer.")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure_steps(given.rounds)
    measure_memory()


if __name__ == "__main__":
    main()
