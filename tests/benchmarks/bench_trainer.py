"""Speed of the trainer on this machine's CPU, paired with a bare loop over the same model.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_trainer.py [--rounds 5] [--steps 30]

`trainer.step.speed`: tokens/s of `trainer.loop.fit` (batches from the token store, labels inside documents, counts,
finite checks, progress file) over tokens/s of the shortest loop that trains the same model on ready-made batches with
`torch.optim.AdamW(fused=True)` and `clip_grad_norm_`. Both in CPU time of one thread, which a busy neighbour disturbs
least, median step of a round; the ratio is the median of the rounds' ratios. Checkpoints are left out: they are not part of a step.

`trainer.start.time`: CPU seconds of `python -m trainer --run` for five steps of a 0.1M model with two checkpoints, minus
CPU seconds of `python -c "import torch"`.

One JSON line per figure is kept in bench.jsonl. Timings are printed and kept; they never decide a test.
"""

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set

from trainer.data import BatchPlan, TokenStore, write_tokens  # noqa: E402 - after the path is set
from trainer.likelihood import cross_entropy_sum  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.model import Transformer, init_parameters, num_parameters  # noqa: E402
from trainer.objective import LanguageModelling  # noqa: E402
from trainer.spec import BatchSpec, ModelSpec, RunConfig, RunSpec, no_versions, save_run  # noqa: E402

WARM_UP = 5  # steps before the clock starts


def corpus(folder, vocab=2048, count=3000, seed=0):
    """Random documents of 20 to 400 tokens; returns the folder's digest."""
    rng = np.random.default_rng(seed)
    records = (
        (
            i,
            (i + 1).to_bytes(32, "big"),
            "owner",
            [*rng.integers(0, vocab - 1, int(rng.integers(20, 400))), vocab - 1],
        )
        for i in range(count)
    )
    return write_tokens(
        folder,
        corpus_version="none",
        tokenizer_digest="none",
        vocab_size=vocab,
        end_of_text=vocab - 1,
        records=records,
    )


def run_spec(home, digest, name, steps, model=None, batch=None, every=10**6):
    """A run over the benchmark's corpus."""
    config = RunConfig(
        model=model or ModelSpec(), batch=batch or BatchSpec(), checkpoint_every=every
    )
    run = RunSpec(
        run=name,
        config=config,
        tokens=str(home / "tokens"),
        tokens_digest=digest,
        steps=steps,
        versions=no_versions(),
    )
    save_run(run, home / name)
    return run


class Clocked(LanguageModelling):
    """Next-token training that notes the CPU time whenever a step asks for its batch."""

    def __init__(self, plan):
        super().__init__(plan)
        self.times = []

    def batch(self, step, rank, world):
        """The batch, after a look at the clock."""
        self.times.append(time.process_time())
        return super().batch(step, rank, world)


def ours(home, digest, plan, name, steps):
    """Tokens per CPU second of the trainer, median step after the warm-up."""
    run = run_spec(home, digest, name, steps + WARM_UP + 1)
    objective = Clocked(plan)
    assert fit(run, home / name, objective=objective) == 0
    return plan.spec.rows * plan.spec.length / float(np.median(np.diff(objective.times)[WARM_UP:]))


def bare(plan, steps):
    """Tokens per CPU second of the shortest loop over the same model and batches."""
    model = Transformer(ModelSpec())
    init_parameters(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    times = []
    for tokens, labels, positions, documents in [
        plan.batch(step).tensors() for step in range(steps + WARM_UP + 1)
    ]:
        times.append(time.process_time())
        loss = cross_entropy_sum(model(tokens, positions, documents), labels) / (labels >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return plan.spec.rows * plan.spec.length / float(np.median(np.diff(times)[WARM_UP:]))


def cpu(*command):
    """CPU seconds of a Python subprocess, its own and the kernel's for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def record(name, what, **figure):
    """One line of bench.jsonl."""
    figures.record(
        "bench.jsonl",
        name,
        packages=("torch",),
        what=what,
        kind="requirement",
        seeds=[0],
        command="make bench",
        **figure,
    )


def step_speed(home, digest, rounds, steps):
    """The paired speed of a training step."""
    plan = BatchPlan(TokenStore.open(home / "tokens"), 0)
    pairs = []
    for number in range(rounds):
        name = f"speed-{number}"
        both = [lambda name=name: ours(home, digest, plan, name, steps), lambda: bare(plan, steps)]
        order = (0, 1) if number % 2 == 0 else (1, 0)  # neither is always the second
        found = {which: both[which]() for which in order}
        pairs.append((found[0], found[1]))
        shutil.rmtree(home / name)
    ratios = sorted(a / b for a, b in pairs)
    ratio = statistics.median(ratios)
    record(
        "trainer.step.speed", "training step of trainer.loop.fit against a bare loop over the same model",
        unit="tokens/CPU s", ours=statistics.median(a for a, _ in pairs), peer=statistics.median(b for _, b in pairs),
        peer_name="bare torch loop", peer_version=torch.__version__, ratio=ratio, better="higher", n=rounds,
        spread=f"{ratios[0]:.3f}..{ratios[-1]:.3f}", bar="ratio >= 0.90", holds=ratio >= 0.90,
        note=f"{num_parameters(Transformer(ModelSpec()))} parameters, 16 x 128 tokens, {steps} steps a round",
    )  # fmt: skip


def start_time(home, digest, rounds):
    """Cost of a tiny run above importing torch."""
    small = ModelSpec(num_layers=2, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=64)
    batch = BatchSpec(rows=4, length=32)
    pairs = []
    for number in range(rounds):
        run_spec(home, digest, f"start-{number}", 5, small, batch, every=3)
        command = ("-m", "trainer", "--run", str(home / f"start-{number}" / "run.json"))
        pairs.append((cpu(*command), cpu("-c", "import torch")))
    extra = sorted(a - b for a, b in pairs)
    record(
        "trainer.start.time", "python -m trainer, 5 steps and 2 checkpoints of a 0.1M model, above import torch",
        unit="CPU s", ours=statistics.median(a for a, _ in pairs), peer=statistics.median(b for _, b in pairs),
        peer_name="import torch", peer_version=torch.__version__, ratio=statistics.median(a / b for a, b in pairs),
        better="lower", n=rounds, spread=f"{extra[0]:.2f}..{extra[-1]:.2f} s above", bar="none", holds=None,
        note=f"{statistics.median(extra):.2f} CPU s above import torch, most of it torch.distributed.checkpoint",
    )  # fmt: skip


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description="Speed of the trainer.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        digest = corpus(home / "tokens")
        step_speed(home, digest, given.rounds, given.steps)
        start_time(home, digest, given.rounds)


if __name__ == "__main__":
    main()
