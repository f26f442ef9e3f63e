"""Speed and memory of an audit: probes per second against a loop over single prompts, and peak memory in copies of the model.

The loop is what published code does at its simplest: one prompt at a time, demonstrations and all, one forward pass each. Ours reads the
demonstrations once and scores all questions in batches (`unlearning.decoding`). Both give the same scores; the ratio is of CPU seconds,
in turns, in one process. Questions without a common beginning are measured too (`alone`): what is left to gain there is the cost of one call, and for
long ones most of the time is the model's own arithmetic, which the figure's note measures. `gradients` holds one backward pass over many people
against a loop of backward passes. Memory is that of a whole audit with every secondary attack (small budgets: activations belong to the questions,
copies to the method) on a model of 25 million parameters.

Usage: `python bench_audit.py [speed|alone|gradients|memory|engineering]`
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
from torch.nn import functional

from trainer.loop import train
from trainer.model import Transformer, init_parameters, num_parameters
from unlearning.association import Person, gradient_ties
from unlearning.audit import audit
from unlearning.decoding import Prefix
from unlearning.pilot.models import prepare
from unlearning.pilot.people import make_people, write_tokenizer
from unlearning.pilot.profiles import PILOT, SMOKE
from unlearning.probes import FileTokenizer, trained_probes
from unlearning.repertoire import FULL
from unlearning.scoring import score_spans

PACKAGES = ("torch", "numpy")
ROUNDS, QUESTIONS, LINES = 5, 256, 8
LINE, SECRET = 12, 6


def speed():
    """Probes per CPU second: shared prefix and batches, batches alone, one prompt at a time."""
    model = pilot_model()
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
    spent, found = in_turns(ways)
    loop = [one.loss_N[0] for one in found["one at a time"]]
    assert np.allclose(found["shared prefix"].loss_N, loop, atol=1e-4)  # or the ratio means nothing
    rates = {name: QUESTIONS / seconds for name, seconds in spent.items()}
    ratios = rates["shared prefix"] / rates["one at a time"]
    ratio = float(np.median(ratios))
    record(
        "bench.jsonl", "unlearning.audit.probes", what=f"probes per CPU second after {LINES} lines of demonstrations", unit="1/s",
        ours=float(np.median(rates["shared prefix"])), peer=float(np.median(rates["one at a time"])), peer_name="a loop, one prompt at a time",
        peer_version="none", ratio=ratio, better="higher", bar=">= 5", holds=ratio >= 5, n=ROUNDS, kind="requirement", seeds=[0],
        spread=[float(ratios.min()), float(ratios.max())], packages=PACKAGES, command="python tests/benchmarks/bench_audit.py",
        note=f"batches without a shared prefix: {float(np.median(rates['batches'])):.0f} probes/s; scores equal to 1e-4",
    )  # fmt: skip


def pilot_model():
    """An untrained model of the pilot's shape: speed does not depend on what it knows."""
    model = Transformer(PILOT.model(187))
    init_parameters(model, 0)
    return model.eval()


def in_turns(ways):
    """CPU seconds of each way in ROUNDS rounds, and what it gave last."""
    spent, found = {name: [] for name in ways}, {}
    for _ in range(ROUNDS):
        for name, work in ways.items():
            start = time.process_time()
            found[name] = work()
            spent[name].append(time.process_time() - start)
    return {name: np.array(seconds) for name, seconds in spent.items()}, found


def products(model, tokens):
    """The matrix products of a forward pass over so many tokens and nothing else; without the head and attention's scores."""
    weights = [p for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith(("embed", "head"))]  # fmt: skip
    states = {width: torch.randn(1024, width) for width in {w.shape[1] for w in weights}}

    def run():
        with torch.inference_mode():
            for _ in range(-(-tokens // 1024)):
                for weight in weights:
                    states[weight.shape[1]] @ weight.T

    return run


def alone():
    """Probes per CPU second without a common beginning: the pilot's own questions, and long prompts."""
    model, rng = pilot_model(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        path = Path(name) / "tokenizer.json"
        people = make_people(PILOT.counts, np.random.default_rng(PILOT.seed))
        write_tokenizer(path, (r.text for records in people.values() for r in records))
        probes = trained_probes(people["forgotten"], FileTokenizer(path))
    asked = [([*p.prompt_tokens, *p.secret_tokens], len(p.prompt_tokens)) for p in probes]
    long = LINES * LINE + LINE
    prompts = [(rng.integers(0, 187, long).tolist(), long - SECRET) for _ in range(QUESTIONS)]
    for name, what, questions, kind in (
        ("probes_alone", "the pilot's direct questions", asked, "requirement"),
        ("probes_long", f"prompts of {long} tokens", prompts, "hypothesis"),
    ):
        sequences, first = map(list, zip(*questions, strict=True))
        tokens = sum(map(len, sequences))
        spent, found = in_turns({
            "batches": lambda s=sequences, f=first: score_spans(model, s, f),
            "loop": lambda s=sequences, f=first: [score_spans(model, [a], [b]) for a, b in zip(s, f, strict=True)],
            "products": products(model, tokens),
        })  # fmt: skip
        assert np.allclose(found["batches"].loss_N, [one.loss_N[0] for one in found["loop"]], atol=1e-4)  # fmt: skip
        ratios = spent["loop"] / spent["batches"]
        ratio, bound = float(np.median(ratios)), float(np.median(spent["loop"] / spent["products"]))
        rates = {way: len(sequences) / float(np.median(seconds)) for way, seconds in spent.items()}
        record(
            "bench.jsonl", f"unlearning.audit.{name}", what=f"probes per CPU second without a common beginning: {what}", unit="1/s", ours=rates["batches"],
            peer=rates["loop"], peer_name="a loop, one prompt at a time", peer_version="none", ratio=ratio, better="higher", bar=">= 5", holds=ratio >= 5,
            n=ROUNDS, kind=kind, seeds=[0], spread=[float(ratios.min()), float(ratios.max())], packages=PACKAGES, command="python tests/benchmarks/bench_audit.py",
            note=f"{tokens / len(sequences):.1f} tokens a probe; the matrix products alone would be {bound:.1f} times as fast as the loop",
        )  # fmt: skip


def gradients():
    """Ties by gradient of 8 targets and 64 others: one backward pass over many people against a pass for each."""
    model, rng = pilot_model(), np.random.default_rng(0)
    people = [
        Person(str(n), tuple(tuple(rng.integers(0, 187, LINE).tolist()) for _ in range(4)), frozenset())
        for n in range(72)
    ]  # fmt: skip
    targets, others = people[:8], people[8:]
    weights = list(model.parameters())

    def loop():
        found = []
        for person in people:
            tokens_BT = torch.tensor(person.documents)
            loss = functional.cross_entropy(
                model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten()
            )
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
        grads = torch.stack(found)
        return (grads[:8] @ grads[8:].T).double().numpy()

    spent, found = in_turns({"one pass": lambda: gradient_ties(model, targets, others)[0], "loop": loop})  # fmt: skip
    assert np.allclose(found["one pass"], found["loop"], rtol=1e-3, atol=1e-5)
    ratios = spent["loop"] / spent["one pass"]
    ratio = float(np.median(ratios))
    rates = {way: len(people) / float(np.median(seconds)) for way, seconds in spent.items()}
    record(
        "bench.jsonl", "unlearning.audit.gradients", what="people per CPU second of gradient association, 8 targets and 64 others of four records", unit="1/s",
        ours=rates["one pass"], peer=rates["loop"], peer_name="a backward pass per person", peer_version="none", ratio=ratio, better="higher", bar=">= 2",
        holds=ratio >= 2, n=ROUNDS, kind="hypothesis", seeds=[0], spread=[float(ratios.min()), float(ratios.max())], packages=PACKAGES,
        command="python tests/benchmarks/bench_audit.py", note="0.2 million parameters; dot products equal to 1e-3",
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


def audit_of(study, size, engineering):
    """The whole audit of a size, perhaps with the engineer's part; the attacks that it made."""
    repertoire = json.loads(json.dumps(dataclasses.asdict(FULL)))
    repertoire |= {"shots": [1, 4], "rates": ["0.0001"], "candidates": 9, "samples": [4]}
    extra = {
        "models": {role: f"../{size}-{role}" for role in ("original", "unlearned", "gold")}, "retained": {"file": "../retained.jsonl"},
        "sealed": {"file": "../forgotten.sealed", "key_file": "../key"}, "lookalikes": {"file": "../lookalikes.jsonl"},
        "tokenizer": "../tokenizer.json", "resamples": 100,
        "attacks": {"fine_tune_steps": [2], "fine_tune_rows": 4, "repertoire": repertoire},
    }  # fmt: skip
    if engineering:
        extra["engineering"] = {"targets": 2, "others": 8, "max_steps": 2}
    directory = study.folder / f"{size}-audit"
    directory.mkdir()
    spec = sized(study, size, "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0)  # fmt: skip
    audit(spec, directory)
    lines = (directory / "progress.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["attack"] for line in lines})


def engineering():
    """Memory with the engineer's part."""
    memory("memory_engineering", "an audit with the engineer's part", engineering=True)


def memory(figure="memory_copies", what="an audit", *, engineering=False):
    """Peak memory of a whole audit, over the model's weights; a small audit before it sets up what libraries need."""
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        child = get_context("spawn").Process(target=train_all, args=(name,))
        child.start()
        child.join()
        study = small_study(name)
        audit_of(study, "small", engineering)
        with metered() as meter:
            attacks = audit_of(study, "large", engineering)
        size = num_parameters(Transformer(sized(study, "large", "size").config.model))
    copies = meter["grown_bytes"] / (4 * size)
    record(
        "bench.jsonl", f"unlearning.audit.{figure}", what=f"peak memory that {what} adds, in copies of the model's weights", unit="copies",
        ours=copies, peer=None, peer_name="none", peer_version="none", ratio=None, better="lower", bar="<= 3", holds=copies <= 3, n=1,
        kind="requirement", seeds=[0], spread="one run", packages=PACKAGES, command="python tests/benchmarks/bench_audit.py",
        note=f"{size / 1e6:.1f} million parameters, {meter['grown_bytes'] / 1e6:.0f} MB; attacks: {', '.join(attacks)}",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for function in (speed, alone, gradients, memory, engineering):
        if len(sys.argv) < 2 or sys.argv[1] == function.__name__:
            function()
