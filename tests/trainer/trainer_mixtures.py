"""A mixture of experts and steps of it, for tests and their child processes."""

import dataclasses

import torch
from trainer_corpus import MIXTURE, MODEL, documents, record_id

from trainer.data import pack
from trainer.layout import Layout
from trainer.mesh import init_mesh, launched_world
from trainer.model import Transformer, init_parameters
from trainer.objective import LanguageModelling
from trainer.step import train_step

SPEC = dataclasses.replace(MODEL, **MIXTURE)


def mixture_model(spec=SPEC, dtype=torch.float64, scale=8):
    """A model whose routers are far from indifferent."""
    model = Transformer(spec)
    init_parameters(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return model.to(dtype)


def mixture_steps(steps, spec=SPEC):
    """Plain gradient steps in float64 on this process's rows; returns balance of every layer [L, E] and the losses."""
    mesh = init_mesh(Layout(dp_replicate=launched_world()))
    rank, world = mesh.rank, mesh.world_size
    docs = [(i, record_id(i), doc) for i, doc in enumerate(documents(12, seed=1, longest=30))]
    whole = pack(docs, 40)
    rows = len(whole.tokens_BT)
    batch = whole.rows(rows * rank // world, rows * (rank + 1) // world).tensors()
    model, objective = mixture_model(spec), LanguageModelling(None)
    totals = objective.counts(whole.tensors())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [
        train_step(model, optimizer, objective, batch, totals, mesh=mesh).loss for _ in range(steps)
    ]
    return torch.stack([block.ffn.balance for block in model.blocks.values()]).tolist(), losses
