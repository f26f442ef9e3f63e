"""Speed and memory of an audit: probes per second against a loop over single prompts, and peak memory in copies of the model.

The loop is what published code does at its simplest: one prompt at a time, demonstrations and all, one forward pass each. Ours reads the
demonstrations once and scores all questions in batches (`unlearning.decoding`). Both give the same scores; the ratio is of CPU seconds,
in turns, in one process. Memory is that of a whole audit with every secondary attack (small budgets: activations belong to the questions,
copies to the method) on a model of 25 million parameters.

Usage: `python bench_audit.py [speed|memory]`
"""

import dataclasses
import json
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from figures import ROOT, record
from metering import metered

from trainer.loop import train
from trainer.model import Transformer, init_parameters, num_parameters
from unlearning.audit import audit
from unlearning.decoding import Prefix
from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import PILOT, SMOKE
from unlearning.repertoire import FULL
from unlearning.scoring import score_spans

PACKAGES = ("torch", "numpy")
ROUNDS, QUESTIONS, LINES = 5, 256, 8
LINE, SECRET = 12, 6


def speed():
    """Probes per CPU second: shared prefix and batches, batches alone, one prompt at a time."""
    shape = PILOT.model(187)
    model = Transformer(shape)
    init_parameters(model, 0)
    model.eval()
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 187, LINES * LINE).tolist()
    asked = [(rng.integers(0, 187, LINE).tolist(), LINE - SECRET) for _ in range(QUESTIONS)]
    whole = [[*prefix, *tokens] for tokens, _ in asked]
    first = [len(prefix) + at for _, at in asked]
    ways = {
        "shared prefix": lambda: Prefix(model, prefix).scores(asked),
        "batches": lambda: score_spans(model, whole, first),
        "one at a time": lambda: [score_spans(model, [s], [f]) for s, f in zip(whole, first, strict=True)],
    }  # fmt: skip
    spent = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, work in ways.items():
            start = time.process_time()
            found = work()
            spent[name].append(time.process_time() - start)
            if name == "one at a time":
                loop = np.array([one.loss_N[0] for one in found])
            elif name == "shared prefix":
                ours = found.loss_N
        assert np.allclose(ours, loop, atol=1e-4)  # the same scores, or the ratio means nothing
    rates = {name: QUESTIONS / np.array(seconds) for name, seconds in spent.items()}
    ratios = rates["shared prefix"] / rates["one at a time"]
    ratio = float(np.median(ratios))
    record(
        "bench.jsonl", "unlearning.audit.probes", what=f"probes per CPU second after {LINES} lines of demonstrations", unit="1/s",
        ours=float(np.median(rates["shared prefix"])), peer=float(np.median(rates["one at a time"])), peer_name="a loop, one prompt at a time",
        peer_version="none", ratio=ratio, better="higher", bar=">= 5", holds=ratio >= 5, n=ROUNDS, kind="requirement", seeds=[0],
        spread=[float(ratios.min()), float(ratios.max())], packages=PACKAGES, command="python tests/benchmarks/bench_audit.py",
        note=f"batches without a shared prefix: {float(np.median(rates['batches'])):.0f} probes/s; scores equal to 1e-4",
    )  # fmt: skip


SIZES = {
    "small": {"dim": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 64},
    "large": {"num_layers": 8, "dim": 512, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 1408},
}


def small_study(folder):
    """People of the memory figure."""
    counts = {"retained": 16, "forgotten": 8, "lookalike": 8}
    return prepare(Path(folder), dataclasses.replace(SMOKE, counts=counts, pages=0, steps=1))


def sized(study, size, run, **changes):
    """A run with a model of that size."""
    spec = study.run_spec(run, **changes)
    shape = dataclasses.replace(spec.config.model, **SIZES[size])
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, model=shape))


def train_all(folder):
    """Original, unlearned and gold of both sizes, a step each: memory does not depend on what they know."""
    study = small_study(folder)
    for size in SIZES:
        for seed, role in enumerate(("original", "unlearned", "gold")):
            directory = study.folder / f"{size}-{role}"
            directory.mkdir()
            train(sized(study, size, role, seed=seed), directory)


def audit_of(study, size):
    """The whole audit of a size; the attacks that it made."""
    repertoire = json.loads(json.dumps(dataclasses.asdict(FULL)))
    repertoire |= {"shots": [1, 4], "rates": ["0.0001"], "candidates": 9, "samples": [4]}
    extra = {
        "models": {role: f"../{size}-{role}" for role in ("original", "unlearned", "gold")}, "retained": {"file": "../retained.jsonl"},
        "sealed": {"file": "../forgotten.sealed", "key_file": "../key"}, "lookalikes": {"file": "../lookalikes.jsonl"},
        "tokenizer": "../tokenizer.json", "resamples": 100,
        "attacks": {"fine_tune_steps": [2], "fine_tune_rows": 4, "repertoire": repertoire},
    }  # fmt: skip
    directory = study.folder / f"{size}-audit"
    directory.mkdir()
    spec = sized(study, size, "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0)  # fmt: skip
    audit(spec, directory)
    lines = (directory / "progress.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["attack"] for line in lines})


def memory():
    """Peak memory of a whole audit, over the model's weights; a small audit before it sets up what libraries need."""
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        child = get_context("spawn").Process(target=train_all, args=(name,))
        child.start()
        child.join()
        study = small_study(name)
        audit_of(study, "small")
        with metered() as meter:
            attacks = audit_of(study, "large")
        size = num_parameters(Transformer(sized(study, "large", "size").config.model))
    copies = meter["grown_bytes"] / (4 * size)
    record(
        "bench.jsonl", "unlearning.audit.memory_copies", what="peak memory that an audit adds, in copies of the model's weights", unit="copies",
        ours=copies, peer=None, peer_name="none", peer_version="none", ratio=None, better="lower", bar="<= 3", holds=copies <= 3, n=1,
        kind="requirement", seeds=[0], spread="one run", packages=PACKAGES, command="python tests/benchmarks/bench_audit.py",
        note=f"{size / 1e6:.1f} million parameters, {meter['grown_bytes'] / 1e6:.0f} MB; attacks: {', '.join(attacks)}",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for function in (speed, memory):
        if len(sys.argv) < 2 or sys.argv[1] == function.__name__:
            function()
