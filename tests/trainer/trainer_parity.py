"""One training, measured on any layout: what the parity tests compare, importable by their child processes."""

import dataclasses

import numpy as np
import torch

from trainer.checkpoint import load_into, model_state
from trainer.data import IGNORE, Batch
from trainer.layout import Layout
from trainer.manifest import Manifest
from trainer.mesh import init_mesh
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.optim import build_optimizer
from trainer.partition import apply_layout, full, local
from trainer.root import leaves_root, state_leaves, state_root
from trainer.saver import Saver
from trainer.spec import ModelSpec, OptimSpec
from trainer.step import train_step

VOCAB = 64
DENSE = ModelSpec(
    vocab_size=VOCAB, num_layers=4, dim=32, num_heads=8, num_kv_heads=8, ffn_dim=48, tied=False
)
KINDS = {
    "dense": DENSE,
    "gqa": dataclasses.replace(DENSE, num_kv_heads=2, qk_norm=True),
    "mqa": dataclasses.replace(DENSE, num_kv_heads=1),
    "moe": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        num_experts=8,
        experts_per_token=2,
        expert_dim=16,
        shared_expert_dim=8,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training: everything but the layout."""

    model: ModelSpec
    rows: int = 8
    length: int = 24
    packed: bool = True
    """Several documents in a row."""
    steps: int = 2
    seed: int = 0
    lr: float = 1e-2
    dtype: torch.dtype = torch.float64
    bfloat16: bool = False
    """Matrix products in bfloat16; needs float32 weights."""
    idle: bool = False
    """Every token visits the first two experts."""
    fault: str = "none"
    """What is broken on purpose, see `trainer_faults`."""


def fitting(case, layout):
    """The case with as many layers and rows as a layout needs."""
    layers = max(case.model.num_layers, layout.stages)
    rows = layout.batch_degree * layout.microbatches
    model = dataclasses.replace(case.model, num_layers=layers)
    return dataclasses.replace(case, model=model, rows=rows * -(-case.rows // rows))


class Rows:
    """A plan of random rows: documents of random lengths, and labels masked very unevenly."""

    def __init__(self, case):
        self.case = case

    def batch(self, step):
        """The global batch of a step, a function of (seed, step)."""
        case = self.case
        rng = np.random.default_rng([case.seed, step])
        shape = case.rows, case.length
        tokens = rng.integers(0, case.model.vocab_size, shape)
        starts = rng.random(shape) < (4 / case.length if case.packed else 0)
        starts[:, 0] = True
        documents = starts.cumsum(1) - 1
        columns = np.broadcast_to(np.arange(case.length), shape)
        positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), 1)
        labels = np.roll(tokens, -1, 1)
        labels[:, -1] = IGNORE
        labels[:, :-1][starts[:, 1:]] = IGNORE
        # Some rows keep a tenth of their labels, and one half of the columns fewer than the other.
        keep = rng.uniform(0.1, 1, (case.rows, 1)) * np.linspace(0.3, 1, case.length)
        labels[rng.random(shape) > keep] = IGNORE
        labels[0, : case.length // 2] = IGNORE
        return Batch(tokens, labels, positions, documents.astype(np.int64), ((),) * case.rows)


def start(case, layout):
    """Mesh, model, optimiser and objective of a case on a layout."""
    if case.fault != "none":
        from trainer_faults import FAULTS

        FAULTS[case.fault]()
    mesh = init_mesh(layout)
    model = Transformer(case.model)
    init_parameters(model, case.seed)
    if case.idle:
        for block in model.blocks.values():
            block.ffn.balance[:2] = 10.0
    model = apply_layout(model.to(case.dtype), mesh)
    optimizer = build_optimizer(model, OptimSpec(lr=case.lr, eps=1e-4))
    return mesh, model, optimizer, LanguageModelling(Rows(case), mesh.device, mesh)


def one_step(step, mesh, model, optimizer, objective, *, bfloat16=False):
    """Train one step."""
    batch = objective.batch(step, *mesh.batch_place)
    totals = mesh.sum(objective.counts(batch) * mesh.counts)
    return train_step(
        model, optimizer, objective, batch, totals, clip_norm=0.5, mesh=mesh,
        precision="bfloat16" if bfloat16 else "float32",
    )  # fmt: skip


def measure(case, layout):
    """Train; returns loss and norm per step, first gradients, last weights and moments (on rank 0, else None)."""
    mesh, model, optimizer, objective = start(case, layout)
    numbers, grads = [], {}
    for step in range(case.steps):
        report = one_step(step, mesh, model, optimizer, objective, bfloat16=case.bfloat16)
        numbers.append((report.loss, report.grad_norm, float(report.tokens)))
        if step == 0:
            grads = {f"grad {name}": full(p.grad).clone() for name, p in model.named_parameters()}
    state = {f"weight {name}": full(p.detach()).clone() for name, p in model.named_parameters()}
    state |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    state |= {f"optim {name}": full(t).clone() for name, t in optimizer.state().items()}
    mine = {name: tensor.numpy() for name, tensor in (grads | state).items()}
    everything = {name: item for part in mesh.gather(mine) for name, item in part.items()}
    return None if mesh.rank else (np.array(numbers), everything)


def _state(model, optimizer):
    return model_state(model) | {f"optim.{name}": t for name, t in optimizer.state().items()}


def save_state(case, layout, folder):
    """Train, then save weights and moments in `folder`."""
    mesh, model, optimizer, objective = start(case, layout)
    for step in range(case.steps):
        one_step(step, mesh, model, optimizer, objective)
    tensors = _state(model, optimizer)
    leaves = state_leaves(tensors, mesh)
    manifest = Manifest(
        run="r", run_digest="0" * 64, model_digest="0" * 64, corpus_version="none", tokens_digest="0" * 64,
        step=case.steps, root=leaves_root(leaves), tensors=len(leaves),
    )  # fmt: skip
    Saver(folder, mesh, keep_last=1).save(manifest, tensors)


def load_state(case, layout, folder):
    """Load weights and moments into a model of zeros; returns their root, and the loss of the next step."""
    mesh, model, optimizer, objective = start(case, layout)
    tensors = _state(model, optimizer)
    for tensor in tensors.values():
        local(tensor).zero_()  # a tensor that is not loaded must show
    load_into(folder, tensors, mesh)
    root = state_root(tensors, mesh)
    return root, one_step(case.steps, mesh, model, optimizer, objective).loss


def alone(case):
    """The same training by one process."""
    return measure(dataclasses.replace(case, fault="none"), Layout())


def errors(got, want):
    """Largest relative error of each group of numbers, each tensor against its own largest number."""
    (numbers, state), (expected_numbers, expected) = got, want
    assert state.keys() == expected.keys(), set(state) ^ set(expected)
    found = {
        name: float(np.abs(numbers / expected_numbers - 1)[:, k].max())
        for k, name in enumerate(("loss", "norm", "tokens"))
    }
    for name, tensor in state.items():
        other, group = expected[name], name.split()[0]
        assert tensor.shape == other.shape, name
        size = max(float(np.abs(other).max()), 1e-12)
        worst = float(np.abs(tensor.astype(float) - other.astype(float)).max()) / size
        found[group] = max(found.get(group, 0.0), worst)
    return found


def held(case, layout):
    """Numbers of weights, and of moments, that this process keeps after a step."""
    mesh, model, optimizer, objective = start(case, layout)
    one_step(0, mesh, model, optimizer, objective)
    moments = sum(local(t).numel() for t in optimizer.state().values())
    return sum(local(p).numel() for p in model.parameters()), moments
