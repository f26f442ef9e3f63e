"""One of our influence methods, measured as a peer is: `python own_influence.py METHOD JOB_FOLDER OUTPUT.npz`."""

import copy
import hashlib
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from metering import metered

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from trainer.model import Transformer  # noqa: E402
from trainer.shape import ModelSpec  # noqa: E402
from valuation.influence import baselines  # noqa: E402
from valuation.influence.pairing import Pass  # noqa: E402
from valuation.influence.scores import TokenSet  # noqa: E402

HOW = Pass(rows=32)
NOT_A_WORD = frozenset(
    i for i in range(128) if not (48 <= i <= 57 or 65 <= i <= 90 or 97 <= i <= 122)
)


class Job:
    """The shared input."""

    def __init__(self, folder):
        with np.load(folder / "input.npz") as file:
            self.arrays = {name: file[name] for name in file.files}
        self.folder = folder
        self.spec = ModelSpec(**json.loads((folder / "spec.json").read_text()))
        self.model = self.weights("final/")
        self.train, self.queries = self.tokens("train_NT"), self.tokens("query_QT")

    def tokens(self, name):
        """Rows as records with ids."""
        rows = self.arrays[name]
        ids = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(len(rows))]
        records = tuple(zip(range(len(rows)), ids, rows, strict=True))
        return TokenSet(records, rows.shape[1])

    def weights(self, prefix):
        """A model with the arrays that begin with a prefix."""
        model = Transformer(self.spec)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(self.arrays[prefix + name]))
        return model

    @property
    def checkpoints(self):
        """Steps that were kept."""
        return sorted({int(n.split("/")[0]) for n in self.arrays if n.split("/")[0].isdigit()})


def plain(name, **settings):
    """A method that takes the trained model."""

    def compute(job):
        module = import_module(f"valuation.influence.{name}")
        return module.scores(job.model, job.train, job.queries, how=HOW, **settings)

    return compute


def tracin(job):
    """Four checkpoints with their learning rates."""
    module = import_module("valuation.influence.tracin")
    models = [job.weights(f"{step}/weights/") for step in job.checkpoints]
    rates = [float(job.arrays[f"{step}/lr"]) for step in job.checkpoints]
    return module.scores(models, job.train, job.queries, weights=rates, how=HOW)


def trak(job):
    """One model."""
    return import_module("valuation.influence.trak").scores(
        [job.model], job.train, job.queries, how=HOW
    )


def less(job):
    """Four checkpoints with Adam's moments."""
    module = import_module("valuation.influence.less")
    kept = []
    for step in job.checkpoints:
        state = {
            n.split("/", 2)[2]: torch.from_numpy(a)
            for n, a in job.arrays.items()
            if n.startswith(f"{step}/optimizer/")
        }
        model = job.weights(f"{step}/weights/")
        names = [name for name, _ in model.named_parameters()]
        kept.append(
            module.AdamCheckpoint(
                model=model, lr=float(job.arrays[f"{step}/lr"]), first={n: state[f"{n}.exp_avg"] for n in names},
                second={n: state[f"{n}.exp_avg_sq"] for n in names}, count=step, betas=(0.9, 0.95), eps=1e-8,
            )
        )  # fmt: skip
    return module.scores(kept, job.train, job.queries, how=HOW)


def inrun(job):
    """Credit of every record in the training itself, for all queries together: one row."""
    from corpora import STATE
    from setting import BATCH, OPTIM

    from trainer.data import BatchPlan, TokenStore, pack
    from trainer.model import init_parameters
    from valuation.influence.baselines import random
    from valuation.inrun import credited_steps

    about = json.loads((job.folder / "folders.json").read_text())
    store = TokenStore.open(job.folder.parent / "train", about["digest"]["train"])
    assert STATE in job.folder.resolve().parents
    model = Transformer(job.spec)
    init_parameters(model, about["seed"])
    plan = BatchPlan(store, about["seed"], BATCH)
    target = [pack(job.queries.records, job.queries.length)]
    credit_N = np.zeros(store.size)
    for step in credited_steps(model, plan, target, OPTIM, max(job.checkpoints)):
        np.add.at(credit_N, step.segments.index_S, next(iter(step.credits_S.values())))
    blank = random(job.train, job.queries.take([0]), np.random.default_rng(0))
    return replace(blank, scores_QN=credit_N[None], method="inrun")


METHODS = {
    "dot": plain("dot"),
    "cosine": plain("dot", cosine=True),
    "ekfac": plain("ekfac"),
    "kfac": plain("kfac"),
    "ekfac_cg": plain("ekfac_cg", damping=0.1, steps=10),
    "fisher": plain("fisher"),
    "datainf": plain("datainf"),
    "logra": plain("logra"),
    "tracin": tracin,
    "trak": trak,
    "less": less,
    "bm25": lambda job: baselines.bm25(job.train, job.queries, terms=baselines.words(NOT_A_WORD)),
    "bm25_tokens": lambda job: baselines.bm25(job.train, job.queries, terms=baselines.ngrams(4)),
    "embedding": lambda job: baselines.embedding(job.model, job.train, job.queries, rows=32),
    "entropy": lambda job: baselines.entropy(job.train, job.queries, job.spec.vocab_size),
    "inrun": inrun,
    "random": lambda job: baselines.random(job.train, job.queries, np.random.default_rng(0)),
}


def float64_error(job):
    """Largest difference of the float64 dot products to those of one backward pass per record, over the largest."""
    from valuation.gradients import token_losses

    model = copy.deepcopy(job.model).double()
    module = import_module("valuation.influence.dot")
    found = module.scores(model, job.train, job.queries, how=HOW).scores_QN

    def alone(tokens):
        rows = []
        for place in range(len(tokens.records)):
            loss = token_losses(model, tokens.batch(range(place, place + 1))).sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            rows.append(torch.cat([g.flatten() for g in grads]))
        return torch.stack(rows)

    want = (alone(job.queries) @ alone(job.train).T).numpy()
    return float(np.abs(found - want).max() / np.abs(want).max())


if __name__ == "__main__":
    method, output = sys.argv[1], Path(sys.argv[3])
    torch.set_num_threads(1)
    job = Job(Path(sys.argv[2]))
    with metered() as meter:
        scores = METHODS[method](job)
    extra = {"float64_error": float64_error(job)} if method == "dot" else {}
    np.savez(output, scores_QN=scores.scores_QN, method=scores.method, **meter, **extra)
