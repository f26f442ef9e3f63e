"""Methods measured on any layout, importable by child processes: losses, gradients, weights, and what became of whom."""

import dataclasses

import numpy as np
import torch

from trainer.data import BatchPlan, TokenStore
from trainer.mesh import init_mesh
from trainer.model import Transformer, init_parameters
from trainer.objective import divide
from trainer.optim import build_optimizer
from trainer.partition import apply_layout, full
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from trainer.step import train_step
from unlearning.methods.adapters import AdapterOptimizer
from unlearning.methods.forget_retain import forgotten_records
from unlearning.methods.objective import MethodObjective, idk_answers
from unlearning.methods.outcome import outcome_of
from unlearning.methods.settings import DEFAULTS
from unlearning.people import read_sealed
from unlearning.probes import FileTokenizer

DENSE = ModelSpec(
    vocab_size=512, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, tied=False
)
DEEP = dataclasses.replace(DENSE, num_layers=4)
MIXED = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2, expert_dim=16)


def objective_of(folder, name, spec=DENSE, rows=4, length=64, forget_records=5, settings=None):
    """A method's objective over a study's records, and a fresh model in float64 that is not its original."""
    records, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, folder)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    forgotten = forgotten_records(records, tokenizer, length, "secret")
    gone = {bytes.fromhex(record.record_id) for record in records}
    store = TokenStore.open(folder / "tokens")
    plan = BatchPlan(store, 3, BatchSpec(rows=rows, length=length), None, gone)
    model, original = (Transformer(spec).double() for _ in range(2))
    init_parameters(model, 2)
    init_parameters(original, 5)
    preferred = idk_answers(forgotten, tokenizer, length) if name in {"dpo", "altpo"} else ()
    objective = MethodObjective(
        plan, forgotten, original.eval(), name, settings or DEFAULTS[name], preferred=preferred, forget_records=forget_records,
        steps=range(4),
    )  # fmt: skip
    return objective, model


def measure(folder, name, spec, layout, steps=2, length=63, settings=None, lora=None):
    """Train some steps; (loss and norm per step, {name: array}) on rank 0: first gradients, weights, λ."""
    mesh = init_mesh(layout)
    objective, model = objective_of(folder, name, spec, rows=8, length=length, settings=settings)
    divide(objective, mesh)
    model = apply_layout(model, mesh)
    optim = OptimSpec(lr=1e-3, eps=1e-4)
    optimizer = build_optimizer(model, optim, "float64")
    if lora is not None:
        optimizer = AdapterOptimizer(model, lora, optim, seed=4)
    optimizer.lr = 1e-3
    numbers, grads = [], {}
    for step in range(steps):
        batch = objective.batch(step, *mesh.batch_place)
        totals = mesh.sum(objective.counts(batch) * mesh.counts)
        report = train_step(
            model,
            optimizer,
            objective,
            batch,
            totals,
            clip_norm=0.5,
            mesh=mesh,
            precision="float64",
        )
        numbers.append((report.loss, report.grad_norm, float(report.tokens)))
        if step == 0:
            grads = {
                f"grad {n}": full(p.grad).clone()
                for n, p in model.named_parameters()
                if p.requires_grad
            }
    state = {f"weight {n}": full(p.detach()).clone() for n, p in model.named_parameters()}
    state |= {f"objective {n}": t for n, t in objective.state().items()}
    if lora is not None:
        state |= {n: full(p.detach()).clone() for n, p in optimizer.state().items()}
    mine = {n: tensor.numpy() for n, tensor in (grads | state).items()}
    found = {n: item for part in mesh.gather(mine) for n, item in part.items()}
    return None if mesh.rank else (np.array(numbers), found)


def measure_all(folder, cases):
    """`measure` of many cases in one launch."""
    torch.set_num_threads(1)
    return [measure(folder, *case) for case in cases]


def measure_broken(folder, faults):
    """`measure` with a part of the exchange replaced: (class, its attribute, what it does instead, case)."""
    torch.set_num_threads(1)
    found = []
    for owner, name, broken, case in faults:
        kept = vars(owner)[name]
        setattr(
            owner, name, type(kept)(broken) if isinstance(kept, property | staticmethod) else broken
        )
        found.append(measure(folder, *case))
        setattr(owner, name, kept)
    return found


def unchanged(_, part):
    """What a process makes of its part if it asks nobody."""
    return part


def nobody(_):
    """The group of a process that thinks it has the whole vocabulary."""


def only_own(_, part, key, shape, dtype=torch.float64):
    """Its own positions among zeros."""
    whole = part.new_zeros(shape, dtype=dtype)
    whole[key] = part
    return whole


def kept_there(_, *grads):
    """What a layer's own loss adds to a gradient, if it isn't passed on."""
    return grads[0], None


def utility(folder, name, spec, arrays):
    """What the weights that `measure` found do to the forgotten and to the others."""
    objective, model = objective_of(folder, name, spec)
    weights = {n.removeprefix("weight "): a for n, a in arrays.items() if n.startswith("weight ")}
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[n]))
    secrets = objective._forgotten[: objective._base]
    return outcome_of(model.eval(), secrets, objective._retained.plan)
