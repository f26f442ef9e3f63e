"""What in-run credit costs and what it misses, against the same training without it.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_valuation_inrun.py [--rounds 3] [--steps 9] [--rows 32 16 8]

`valuation.inrun.cost`: CPU seconds of a credited step (trapezoid, target sample of one row of at most 128 tokens) over CPU seconds
of `trainer.step.train_step` on the same batch. Both step by turns in this process, so that a busy machine slows both;
the ratio of two neighbouring steps, median over steps and rounds. The model is that of the `default` size's released
model: 4 layers, width 128, vocabulary 2048; 32 rows of 128 tokens. `valuation.inrun.cost16` and `cost8` are the same of 16 and 8
rows: the smaller the batch, the more the target's row weighs. Notes: the target's columns, and the ratio with the target sample that
`valuation.inrun:train` takes by itself, a row per 8 rows of the batch.

`valuation.inrun.residual`: share of the true drop that a step's whole movement doesn't explain along the form,
sum |curvature| / sum |drop| over a run of 60 AdamW steps at the pilot's learning rate, for first order and trapezoid.

One JSON line per figure is kept in bench.jsonl. Timings are printed and kept; they never decide a test.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set
from bench_trainer import corpus  # noqa: E402

from trainer.data import BatchPlan, TokenStore  # noqa: E402
from trainer.model import Transformer, init_parameters, num_parameters  # noqa: E402
from trainer.objective import LanguageModelling  # noqa: E402
from trainer.optim import build_optimizer, learning_rate  # noqa: E402
from trainer.spec import BatchSpec, ModelSpec, OptimSpec  # noqa: E402
from trainer.step import train_step  # noqa: E402
from valuation.inrun import TARGET_SHARE, credited_steps, target_sample  # noqa: E402

MODEL = ModelSpec(
    vocab_size=2048, num_layers=4, dim=128, num_heads=4, num_kv_heads=2, ffn_dim=352, tied=True
)
BATCH, OPTIM = BatchSpec(rows=32, length=128), OptimSpec(lr=3e-3, warmup_steps=5)
WARM_UP = 2
COMMAND = "OMP_NUM_THREADS=1 python tests/benchmarks/bench_valuation_inrun.py"


def fresh():
    """The model with its seed's weights."""
    model = Transformer(MODEL)
    init_parameters(model, 1)
    return model


def plain_steps(plan, steps):
    """The trainer's own steps; one yield per step."""
    model = fresh()
    optimizer, objective = build_optimizer(model, OPTIM), LanguageModelling(plan)
    for step in range(steps):
        optimizer.lr = learning_rate(step, OPTIM, steps)
        batch = objective.batch(step, 0, 1)
        yield train_step(
            model, optimizer, objective, batch, objective.counts(batch), clip_norm=OPTIM.clip_norm
        )


def paired(folder, rows, steps, rounds, forms=("trapezoid",), target_rows=1):
    """Ratios of the CPU seconds of credited and plain steps, taken by turns, and a plain step's seconds."""
    plan = BatchPlan(
        TokenStore.open(folder / "tokens"), 0, BatchSpec(rows=rows, length=BATCH.length)
    )
    target = target_sample(TokenStore.open(folder / "target"), 0, target_rows, BATCH.length, 8)
    ratios, plain_s = [], []
    for _ in range(rounds):
        plain = plain_steps(plan, steps)
        credited = credited_steps(fresh(), plan, target, OPTIM, steps, forms=forms)
        for step in range(steps):
            spent = []
            for walk in (plain, credited):
                begun = time.process_time()
                next(walk)
                spent.append(time.process_time() - begun)
            if step >= WARM_UP:
                ratios.append(spent[1] / spent[0])
                plain_s.append(spent[0])
    return ratios, statistics.median(plain_s)


def main():
    """All figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 16, 8], choices=[32, 16, 8])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus(folder / "tokens")
        corpus(folder / "target", count=60, seed=1)
        sample = target_sample(TokenStore.open(folder / "target"), 0, 1, BATCH.length, 8)
        width = sample[0].tokens_BT.shape[1]
        for rows in arguments.rows:
            steps = arguments.steps * (32 // rows)
            ratios, plain_s = paired(folder, rows, steps, arguments.rounds)
            share = paired(folder, rows, steps, 1, target_rows=rows // TARGET_SHARE)[0]
            ratio, quarters = statistics.median(ratios), statistics.quantiles(ratios)
            figures.record(
                "bench.jsonl", f"valuation.inrun.cost{'' if rows == 32 else rows}", packages=("torch", "numpy"),
                what=f"CPU seconds of a step of {rows} rows with in-run credit over a plain training step", unit="ratio", kind="hypothesis" if rows == 8 else "requirement",
                bar="ratio <= 1.35", holds=ratio <= 1.35, value=round(ratio, 3), spread=[round(quarters[0], 3), round(quarters[2], 3)],
                n=len(ratios), seeds=[1], command=COMMAND, plain_s=round(plain_s, 4), parameters=num_parameters(fresh()),
                note=f"{rows} rows of 128, target sample of 1 row of {width} columns; with {rows // TARGET_SHARE} rows: {statistics.median(share):.2f}",
            )  # fmt: skip
        plan = BatchPlan(TokenStore.open(folder / "tokens"), 0, BatchSpec(rows=8, length=128))
        sample = target_sample(TokenStore.open(folder / "target"), 0, 8, BATCH.length, 8)
        books = [
            d.residual for d in credited_steps(fresh(), plan, sample, OPTIM, 60, forms=("trapezoid",))
        ]  # fmt: skip
        drop = np.abs([b.drop for b in books]).sum()
        missed = {
            name: round(float(np.abs([getattr(b, name) for b in books]).sum() / drop), 3)
            for name in ("curvature", "curvature_first")
        }
        own = sum(b.credit for b in books) / sum(b.drop for b in books)
        figures.record(
            "bench.jsonl", "valuation.inrun.residual", packages=("torch", "numpy"),
            what="share of the true drop that the movement along the trapezoid misses, over the first order's", unit="ratio",
            kind="hypothesis", bar="ratio <= 0.5", holds=missed["curvature"] <= missed["curvature_first"] / 2,
            value=round(missed["curvature"] / missed["curvature_first"], 3), n=60, seeds=[1], spread=[],
            command=COMMAND, note=f"sum |missed| / sum |drop|: trapezoid {missed['curvature']}, first {missed['curvature_first']}; "
            f"the records' own share of the drop, trapezoid: {own:.3f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
