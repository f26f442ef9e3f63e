"""The trainer's step against a nanoGPT-style loop and Hugging Face's Trainer, and against the machine's matrix products.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_peers.py [--steps 24] [--only NAME]

All work by turns in one process, one step each: ours is `trainer.loop.fit` as it is (documents, digests, records, norm,
clipping, progress), on documents of exactly one row, so that all have the same tokens, labels and causal attention.

The peers: a loop in the manner of nanoGPT's train.py (rows from a memory map, autocast, `clip_grad_norm_`, fused AdamW,
also where nanoGPT itself would take the slower one, learning rate by cosine, loss read every ten steps) over the same
model class, so that nothing but the loop differs and 1 is what to expect; and `transformers.Trainer` with fused
AdamW and no saving, over `LlamaForCausalLM` with our initial weights, exported. The losses of the first batch must
agree, or nothing is measured. Without transformers and accelerate (`pip install -e '.[dev]'`) that peer is left out.

`trainer.step.nanogpt`, `trainer.step.transformers` and the same with `.bfloat16`: tokens per CPU second; ratio:
median over turns of neighbouring steps, which a change of the machine's speed meets alike; spread: 10th to 90th
percentile of these ratios.
`trainer.peak.float32`, `trainer.peak.bfloat16`: FLOP of a step (`flops_per_token`, causality not halved) over its CPU
seconds, as a share of the best of 20 products of 512 x 512 matrices measured in the turn after; 27M parameters, T = 256.
`trainer.input.share`: CPU seconds from a step's number to its tensors, on packed documents of 20 to 400 tokens, over those
of a step of ours.
`trainer.ddp.wall`: steps per second of two processes (dp_replicate = 2) over those of one with two threads, on the wall
clock, runs by turns. Threads that spin while they wait cost up to three times the CPU seconds where others want the
cores, and would flatter us: the baseline is the faster of spinning and passive waiting, and where the load exceeds the
cores the figure decides nothing (holds: null).
`trainer.start.first_step`: CPU seconds of `python -m trainer` for a run of one step, imports and checkpoint included.

One JSON line per figure is kept in bench.jsonl. Timings are printed and kept; they never decide a test.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import figures  # noqa: E402 - after the path is set

from trainer import Layout  # noqa: E402
from trainer.convert import export_model  # noqa: E402
from trainer.data import BatchPlan, TokenStore, write_tokens  # noqa: E402
from trainer.likelihood import cross_entropy_sum  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.model import Transformer, init_parameters  # noqa: E402
from trainer.objective import LanguageModelling  # noqa: E402
from trainer.presets import PRESETS, flops_per_token  # noqa: E402
from trainer.spec import BatchSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run  # noqa: E402

WARM_UP = 2  # turns that aren't counted
LENGTH = 256
PEER_BATCH, PEAK_BATCH = BatchSpec(rows=8, length=LENGTH), BatchSpec(rows=4, length=LENGTH)
VOCAB = PRESETS["6M"].vocab_size
OPTIM = OptimSpec(lr=1e-3, warmup_steps=2)


class Turns:
    """Contenders that do one step each in a fixed order, on one thread at a time; keeps each one's CPU seconds."""

    def __init__(self, names):
        self.seconds = {name: [] for name in names}
        self.next = dict(zip(names, [*names[1:], names[0]], strict=True))
        self.baton = {name: threading.Semaphore(0) for name in names}
        self.started = {}
        self.failed = None

    def tick(self, name):
        """Called by a contender between two of its steps: notes the one before and waits for its turn."""
        if name in self.started:
            self.seconds[name].append(time.process_time() - self.started[name])
        self.baton[self.next[name]].release()
        self.baton[name].acquire()
        if self.failed is not None:
            raise SystemExit(1)
        self.started[name] = time.process_time()

    def run(self, contenders):
        """Run all to their ends, the first in this thread; name -> CPU seconds per step after the warm-up."""

        def work(name):
            try:
                self.baton[name].acquire()
                contenders[name](lambda: self.tick(name))
            except BaseException as error:
                self.failed = error
                raise
            finally:
                self.baton[self.next[name]].release()

        first, *rest = contenders
        threads = [threading.Thread(target=work, args=(name,)) for name in rest]
        for thread in threads:
            thread.start()
        self.baton[first].release()
        work(first)
        for thread in threads:
            # What is left of the others runs out, one after the other.
            for baton in self.baton.values():
                baton.release()
            thread.join()
        assert self.failed is None
        return {name: np.array(found[WARM_UP:]) for name, found in self.seconds.items()}


def corpus(folder, shortest=LENGTH, longest=LENGTH, count=400, seed=0):
    """Random documents of so many tokens; returns the folder's digest."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    records = (
        (i, (i + 1).to_bytes(32, "big"), "owner", [*rng.integers(0, VOCAB - 1, n - 1).tolist(), VOCAB - 1])
        for i, n in enumerate(lengths.tolist())
    )  # fmt: skip
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="none", vocab_size=VOCAB, end_of_text=VOCAB - 1, records=records
    )  # fmt: skip


class Ticking(LanguageModelling):
    """Next-token training that takes turns at every forward pass."""

    def __init__(self, plan, tick):
        super().__init__(plan)
        self.tick = tick

    def loss(self, *arguments):
        """The loss, when it is our turn."""
        self.tick()
        return super().loss(*arguments)


class Case:
    """One corpus, model, batch and precision that all contenders share."""

    def __init__(self, home, model, batch, precision, steps):
        self.home, self.spec, self.batch, self.precision, self.steps = (
            home, PRESETS[model], batch, precision, steps,
        )  # fmt: skip
        self.tokens = batch.rows * batch.length
        if not (home / "tokens").exists():
            corpus(home / "tokens")
        self.plan = BatchPlan(TokenStore.open(home / "tokens"), 0, batch)

    def autocast(self):
        """As all contenders use it: matrix products in bfloat16, weights in float32."""
        wanted = self.precision == "bfloat16"
        return torch.autocast("cpu", torch.bfloat16) if wanted else contextlib.nullcontext()

    def model(self):
        """Our model with the run's initial weights."""
        model = Transformer(self.spec)
        init_parameters(model, 0)
        return model

    def ours(self, tick):
        """The trainer's own loop."""
        name = f"ours-{self.precision}-{self.spec.dim}"
        config = RunConfig(
            model=self.spec, batch=self.batch, optim=OPTIM, checkpoint_every=10**6, precision=self.precision
        )  # fmt: skip
        store = TokenStore.open(self.home / "tokens")
        run = RunSpec(
            run=name, config=config, tokens=str(self.home / "tokens"), tokens_digest=store.digest,
            steps=self.steps + 1, versions=no_versions(),
        )  # fmt: skip
        save_run(run, self.home / name)
        assert fit(run, self.home / name, objective=Ticking(self.plan, tick)) == 0

    def rows(self):
        """The batches as one array of rows, as a memory map on disk, for the peers."""
        path = self.home / f"rows-{self.batch.rows}.npy"
        if not path.exists():
            rows = [self.plan.batch(step).tokens_BT for step in range(self.steps + 1)]
            np.save(path, np.concatenate(rows))
        return np.load(path, mmap_mode="r")

    def nanogpt(self, tick):
        """The loop of nanoGPT's train.py over our model class."""
        model, data = self.model(), self.rows()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, fused=True)
        for step in range(self.steps + 1):
            tick()
            for group in optimizer.param_groups:
                group["lr"] = OPTIM.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))
            first = step * self.batch.rows
            x = torch.from_numpy(data[first : first + self.batch.rows].copy())
            y = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
            with self.autocast():
                loss = torch.nn.functional.cross_entropy(
                    model(x).flatten(0, 1), y.flatten(), ignore_index=-100
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                loss.item()

    def transformers(self, tick):
        """Hugging Face's Trainer over LlamaForCausalLM with our initial weights."""
        import transformers

        transformers.logging.set_verbosity_error()
        folder = self.home / f"hf-{self.spec.dim}"
        if not folder.exists():
            export_model(self.model(), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.check_same_loss(model)
        rows = [torch.from_numpy(row.copy()) for row in self.rows()]

        class Callback(transformers.TrainerCallback):
            """Takes turns."""

            def on_step_begin(self, *_, **__):
                """Wait for the turn."""
                tick()

        arguments = transformers.TrainingArguments(
            output_dir=str(self.home / "hf-out"), max_steps=self.steps + 1, per_device_train_batch_size=self.batch.rows,
            learning_rate=OPTIM.lr, weight_decay=OPTIM.weight_decay, adam_beta2=OPTIM.betas[1],
            max_grad_norm=OPTIM.clip_norm, optim="adamw_torch_fused", lr_scheduler_type="cosine", use_cpu=True,
            bf16=self.precision == "bfloat16", report_to="none", save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        with contextlib.redirect_stdout(sys.stderr):
            transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Callback]).train()

    @torch.no_grad()
    def check_same_loss(self, theirs):
        """The first batch has one loss, whoever computes it."""
        tokens, labels, *where = self.plan.batch(0).tensors()
        ours = cross_entropy_sum(self.model()(tokens, *where), labels) / (labels >= 0).sum()
        other = theirs(input_ids=tokens, labels=tokens).loss
        assert abs(ours - other) < 1e-5, f"losses {ours.item()} and {other.item()} differ"

    def products(self, tick):
        """Products of 512 x 512 matrices; the best second of each turn goes to `self.best`."""
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        a, b = (torch.randn(512, 512).to(dtype) for _ in range(2))
        self.best = []
        for _ in range(self.steps + 1):
            tick()
            found = []
            for _ in range(20):
                start = time.process_time()
                for _ in range(4):
                    a @ b
                found.append((time.process_time() - start) / 4)
            self.best.append(2 * 512**3 / min(found))


def record(name, what, **figure):
    """One line of bench.jsonl."""
    packages = ("torch", "transformers") if "transformers" in name else ("torch",)
    figures.record(
        "bench.jsonl", name, packages=packages, what=what, kind="requirement", seeds=[0], command="make bench", **figure
    )  # fmt: skip


def against_peers(home, precision, steps):
    """Our step by turns with those of the peers that are installed; returns our seconds."""
    case = Case(home, "6M", PEER_BATCH, precision, steps)
    contenders = {"ours": case.ours, "nanogpt": case.nanogpt}
    if find_spec("transformers") and find_spec("accelerate"):
        contenders["transformers"] = case.transformers
    else:
        print("transformers or accelerate is not installed: that peer is left out")  # noqa: T201 - its output
    seconds = Turns(list(contenders)).run(contenders)
    for peer in list(contenders)[1:]:
        n = min(len(seconds["ours"]), len(seconds[peer]))
        ours, theirs = (float(np.median(seconds[which][:n])) for which in ("ours", peer))
        each = seconds[peer][:n] / seconds["ours"][:n]
        ratio = float(np.median(each))
        version = torch.__version__ if peer == "nanogpt" else __import__(peer).__version__
        record(
            f"trainer.step.{peer}" + (".bfloat16" if precision == "bfloat16" else ""),
            f"training step of trainer.loop.fit against {'a nanoGPT-style loop' if peer == 'nanogpt' else 'transformers.Trainer'}",
            unit="tokens/CPU s", ours=case.tokens / ours, peer=case.tokens / theirs, peer_name=peer, peer_version=version,
            ratio=ratio, better="higher", n=n, spread="{:.3f}..{:.3f}".format(*np.quantile(each, [0.1, 0.9])),
            bar="ratio >= 1.0", holds=ratio >= 1.0,
            note=f"6M preset, {PEER_BATCH.rows} x {LENGTH} tokens, {precision}, one step each by turns",
        )  # fmt: skip
    return float(np.median(seconds["ours"]))


def input_share(home, step_seconds):
    """What a step's batch costs, against the step."""
    corpus(home / "packed", 20, 400, count=3000)
    objective = LanguageModelling(BatchPlan(TokenStore.open(home / "packed"), 0, PEER_BATCH))
    found = []
    for step in range(200):
        start = time.process_time()
        objective.counts(objective.batch(step, 0, 1))
        objective.records(step)
        found.append(time.process_time() - start)
    share = float(np.median(found)) / step_seconds
    record(
        "trainer.input.share", "CPU seconds of a batch over those of a training step of the 6M model in bfloat16",
        unit="share", ours=share, better="lower", n=len(found),
        spread="{:.4f}..{:.4f}".format(*(np.quantile(found, [0.1, 0.9]) / step_seconds)), bar="ours <= 0.02",
        holds=share <= 0.02, note=f"{PEER_BATCH.rows} x {LENGTH} tokens, {np.median(found) * 1e3:.2f} ms a batch",
    )  # fmt: skip


def two_processes(home, rounds, steps=12):
    """Two processes against two threads, on the wall clock."""
    case = Case(home, "6M", PEER_BATCH, "float32", steps)
    config = RunConfig(model=case.spec, batch=case.batch, optim=OPTIM, checkpoint_every=10**6)
    found = {"ddp": [], "spinning": [], "passive": []}
    single = ("-m", "trainer", "--run")
    pair = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")
    kinds = (
        ("ddp", Layout(dp_replicate=2), pair, {"OMP_NUM_THREADS": "1"}),
        ("spinning", Layout(), single, {"OMP_NUM_THREADS": "2"}),
        ("passive", Layout(), single, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}),
    )  # fmt: skip
    loads = []
    for number in range(rounds):
        for name, layout, start, environment in kinds:
            run = RunSpec(
                run=f"{name}-{number}", config=config, layout=layout, tokens=str(home / "tokens"),
                tokens_digest=case.plan.store.digest, steps=steps, versions=no_versions(),
            )  # fmt: skip
            save_run(run, home / run.run)
            command = [sys.executable, *start, str(home / run.run / "run.json")]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **environment})
            lines = (home / run.run / "progress.jsonl").read_text().splitlines()
            times = [float(json.loads(line)["time"]) for line in lines]
            found[name].append(float(np.median(np.diff(times)[WARM_UP:])))
            loads.append(os.getloadavg()[0])
    threads = [min(pair) for pair in zip(found["spinning"], found["passive"], strict=True)]
    # Our own two processes or threads are a load of 2; with more, somebody else has the cores too.
    quiet = max(loads) <= (os.cpu_count() or 1) + 0.5
    ratios = sorted(t / d for d, t in zip(found["ddp"], threads, strict=True))
    ratio = statistics.median(ratios)
    record(
        "trainer.ddp.wall", "two processes of data parallelism against one with two threads, 6M model",
        unit="steps/s", ours=1 / statistics.median(found["ddp"]), peer=1 / statistics.median(threads),
        peer_name="two threads", peer_version=torch.__version__, ratio=ratio, better="higher", n=rounds,
        spread=f"{ratios[0]:.3f}..{ratios[-1]:.3f}", bar="ratio >= 0.95", holds=ratio >= 0.95 if quiet else None,
        note=f"wall clock; load average up to {max(loads):.1f} on {os.cpu_count()} cores",
    )  # fmt: skip


def against_peak(home, precision, steps, bar):
    """Our step by turns with plain matrix products."""
    case = Case(home, "27M", PEAK_BATCH, precision, steps)
    seconds = Turns(["ours", "products"]).run({"ours": case.ours, "products": case.products})
    flop = flops_per_token(case.spec, LENGTH) * case.tokens
    n = len(seconds["ours"])
    peak = np.array(case.best[WARM_UP : WARM_UP + n])
    share = flop / seconds["ours"] / peak[:n]
    found = float(np.median(share))
    record(
        f"trainer.peak.{precision}", f"FLOP/s of a training step over those of 512 x 512 products, {precision}",
        unit="FLOP/CPU s", ours=float(np.median(flop / seconds["ours"])), peer=float(np.median(peak)),
        peer_name="torch matmul", peer_version=torch.__version__, ratio=found, better="higher", n=n,
        spread="{:.3f}..{:.3f}".format(*np.quantile(share, [0.1, 0.9])), bar=f"ratio >= {bar}", holds=found >= bar,
        note=f"27M preset, {PEAK_BATCH.rows} x {LENGTH} tokens, {case.tokens / float(np.median(seconds['ours'])):.0f} tokens/CPU s",
    )  # fmt: skip


def first_step(home, rounds):
    """CPU seconds from the start of the program to the end of a run of one step."""
    case = Case(home, "1M", BatchSpec(), "float32", 1)
    found, walls = [], []
    for number in range(rounds):
        run = RunSpec(
            run=f"first-{number}", config=RunConfig(), tokens=str(home / "tokens"), tokens_digest=case.plan.store.digest,
            steps=1, versions=no_versions(),
        )  # fmt: skip
        save_run(run, home / run.run)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "trainer", "--run", str(home / run.run / "run.json")]
        subprocess.run(command, check=True, cwd=ROOT)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    seconds = statistics.median(found)
    record(
        "trainer.start.first_step", "python -m trainer, a run of one step of the 1M model, from start to end",
        unit="CPU s", ours=seconds, better="lower", n=rounds, spread=f"{min(found):.2f}..{max(found):.2f}",
        bar="ours <= 6", holds=seconds <= 6,
        note=f"imports, checks, one step and its checkpoint; wall {min(walls):.1f}..{max(walls):.1f} s",
    )  # fmt: skip


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description="Speed of the trainer against its peers.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="", help="peers, peak, start or ddp")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for precision, bar in (("float32", 0.70), ("bfloat16", 0.45)):
            if given.only in ("", "peers"):
                seconds = against_peers(home, precision, given.steps)
            if given.only in ("", "peak"):
                against_peak(home, precision, given.steps, bar)
        if given.only in ("", "peers"):
            input_share(home, seconds)
        if given.only in ("", "ddp"):
            two_processes(home, 3)
        if given.only in ("", "start"):
            first_step(home, 5)


if __name__ == "__main__":
    main()
