"""What a step of each method costs: CPU seconds over those of a training step on as many rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_unlearning.py [--rounds 5] [--steps 6]

*The same batch* is the same number of tokens through the model: eight retained rows and eight rows of forgotten records (with the answers that
are preferred over them, where a method wants some) against a training batch of sixteen rows, packed from the same store. Both steps are `trainer.step.train_step`
with the trainer's AdamW, and both make their batch inside the clock. A method's step and a training step follow each other, so that a busy
neighbour disturbs both; a round is the sum over its steps, the figure the median of the rounds' ratios.

What is cached of the original is made before the first step and isn't counted: a run makes it once. For all methods that is the pushed tokens'
log-probabilities (`undial` logits, `adaptive_rmu` and `rau` states). `kl`, `rmu`, `adaptive_rmu` and `rau` compare every retained row with the original too: its states at
the retained tokens of all steps, each record's once however often it stands in a row. These four are a figure of their own, and what making their states
took is printed and noted beside it, in training steps: CPU seconds of `unlearning.methods.reference` over those of a training step, per step of the run.
"""

import argparse
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set
from bench_trainer import corpus  # noqa: E402

from trainer.data import BatchPlan, TokenStore  # noqa: E402
from trainer.mesh import Mesh  # noqa: E402
from trainer.microbatch import take_batch  # noqa: E402
from trainer.model import Transformer, init_parameters, num_parameters  # noqa: E402
from trainer.objective import LanguageModelling  # noqa: E402
from trainer.optim import build_optimizer  # noqa: E402
from trainer.spec import BatchSpec, ModelSpec, OptimSpec  # noqa: E402
from trainer.step import train_step  # noqa: E402
from unlearning.methods import METHODS  # noqa: E402
from unlearning.methods.forget_retain import Forgotten  # noqa: E402
from unlearning.methods.objective import MethodObjective  # noqa: E402
from unlearning.methods.settings import settings_of  # noqa: E402

ROWS, LENGTH, WARM_UP = 16, 128, 2
RECORD, SECRET = 32, 8
"""Tokens of a forgotten record, and how many of them are pushed."""
SECOND = {"retain_kl", "retain_hidden"}
"""Needs that ask the original about retained rows."""


def asks_of(method):
    """Whether a method asks the original about retained rows."""
    return bool(import_module(f"unlearning.methods.{method}").NEEDS & SECOND)


def forgotten(count, seed):
    """Records of RECORD tokens that fill their rows, so that a step has as many as its training step."""
    rng = np.random.default_rng(seed)
    return [
        Forgotten(tuple(rng.integers(0, 2047, RECORD).tolist()), RECORD - SECRET)
        for _ in range(count)
    ]


class Side:
    """A model, its optimiser and what it minimises."""

    def __init__(self, objective):
        self.objective, self.step, self.spent = objective, 0, 0.0
        self.model = Transformer(ModelSpec())
        init_parameters(self.model, 0)
        self.optimizer = build_optimizer(self.model, OptimSpec(lr=1e-4))

    def go(self):
        """One step; its CPU seconds are added."""
        start = time.process_time()
        batch, totals_K = take_batch(self.objective, self.step, 0, 1, 1)
        train_step(self.model, self.optimizer, self.objective, batch, totals_K, clip_norm=1.0)
        self.spent += time.process_time() - start
        self.step += 1
        return batch


def method_side(method, store, steps):
    """A method on half of the rows, and enough records for the other half; and CPU seconds of what its retain term was given beforehand."""
    needs = import_module(f"unlearning.methods.{method}").NEEDS
    plan = BatchPlan(store, 0, BatchSpec(rows=ROWS // 2, length=LENGTH))
    answers = bool(needs & {"idk", "alternates"})
    records = ROWS // 2 * LENGTH // RECORD // (2 if answers else 1)
    original = Transformer(ModelSpec())
    init_parameters(original, 0)
    objective = MethodObjective(
        plan, forgotten(2 * records, 1), original.eval(), method, settings_of(method, {}),
        preferred=forgotten(2 * records, 2) if answers else (), forget_records=records, steps=range(steps),
    )  # fmt: skip
    start = time.process_time()
    objective.divide(Mesh())
    return Side(objective), time.process_time() - start


def ratios_of(method, store, rounds, steps):
    """Ratio of each round, after steps that count nothing; and that of what was made before, to as many training steps."""
    taken = WARM_UP + rounds * steps
    ours, before = method_side(method, store, taken)
    theirs = Side(LanguageModelling(BatchPlan(store, 0, BatchSpec(rows=ROWS, length=LENGTH))))
    for _ in range(WARM_UP):
        assert len(ours.go().tokens_BT) == len(theirs.go()[0]) == ROWS
    found, spent = [], 0.0
    for _ in range(rounds):
        ours.spent = theirs.spent = 0.0
        for step in range(steps):
            for side in (ours, theirs) if step % 2 else (theirs, ours):
                side.go()
        found.append(ours.spent / theirs.spent)
        spent += theirs.spent
    return found, before / taken / (spent / (rounds * steps))


def main():
    """Measure every method, record the slowest of each group."""
    parser = argparse.ArgumentParser(description="Cost of an unlearning step.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    groups, made = {"unlearning.step.cost": {}, "unlearning.step.cost_reference": {}}, {}
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder) / "tokens")
        store = TokenStore.open(Path(folder) / "tokens")
        for method in given.methods:
            asks = asks_of(method)
            found, before = ratios_of(method, store, given.rounds, given.steps)
            if asks:
                made[method] = round(before, 3)
            groups["unlearning.step.cost_reference" if asks else "unlearning.step.cost"][method] = (
                found
            )
            low, high = min(found), max(found)
            sys.stdout.write(
                f"{method}: {statistics.median(found):.3f} ({low:.3f} to {high:.3f}), before: {before:.3f}\n"
            )
            sys.stdout.flush()
    size = num_parameters(Transformer(ModelSpec()))
    for name, by_method in groups.items():
        asking = name == "unlearning.step.cost_reference"
        if set(by_method) != {method for method in METHODS if asks_of(method) == asking}:
            continue  # a look at some of a group is no figure
        medians = {method: statistics.median(found) for method, found in by_method.items()}
        slowest = max(medians, key=medians.__getitem__)
        ratio = medians[slowest]
        figures.record(
            "bench.jsonl", name, what="CPU seconds of an unlearning step over a training step on as many rows, the slowest method", unit="ratio",
            kind="requirement", ours=ratio, peer=1.0, peer_name="training step on as many rows", peer_version="none", ratio=ratio, better="lower",
            bar="ratio <= 1.1", holds=ratio <= 1.1, n=given.rounds, seeds=[0], spread=f"{min(by_method[slowest]):.3f}..{max(by_method[slowest]):.3f}",
            packages=("torch",), command="make bench", table=dict(sorted(medians.items(), key=lambda one: one[1])),
            note=f"slowest: {slowest}; {size} parameters, {ROWS} rows of {LENGTH}, half of them forgotten records of {RECORD} tokens, {SECRET} pushed; "
            f"{given.steps} steps a round; cached before the first step and not counted: what a method needs of the original at pushed tokens"
            + (f", and its states at retained tokens, which took, in training steps per step: {made}" if asking else ""),
        )  # fmt: skip


if __name__ == "__main__":
    main()
