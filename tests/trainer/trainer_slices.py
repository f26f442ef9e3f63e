"""A small net that several layouts slice, and steps of Muon on it, for the children of multi-process tests."""

import torch
from torch import nn

from trainer.optim import build_optimizer
from trainer.spec import OptimSpec

SPEC = OptimSpec(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9)


def set_gradients(named, step):
    """Gradients that depend on name and step only."""
    for number, (_, parameter) in enumerate(sorted(named)):
        generator = torch.Generator().manual_seed(1000 * step + number)
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(
            parameter.dtype
        )


class Layer(nn.Module):
    """One block's worth of matrices, uneven on purpose, and a stack of experts."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 14, bias=False)
        self.down = nn.Linear(14, 10, bias=False)
        self.norm = nn.Parameter(torch.ones(10))
        self.experts = nn.Parameter(torch.zeros(4, 6, 10))

    def forward(self, x):
        """Anything that uses every parameter."""
        weight = self.experts.flatten(0, 1)
        return self.down(self.up(x * self.norm)).sum() + (x @ weight.T).sum()


class Net(nn.Module):
    """Names as in the transformer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 10)
        self.blocks = nn.ModuleList([Layer()])
        for number, (_, parameter) in enumerate(sorted(self.named_parameters())):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.data = drawn


def muon_steps(net, rounds=3):
    """Weights after some steps of Muon with made-up gradients, whole."""
    from torch.distributed.tensor import DTensor

    optimizer = build_optimizer(net, SPEC)
    whole = Net()
    for step in range(rounds):
        set_gradients(whole.named_parameters(), step)
        grads = {name: p.grad for name, p in whole.named_parameters()}
        for name, parameter in net.named_parameters():
            grad = grads[name]
            if isinstance(parameter, DTensor):
                grad = _cut_like(grad, parameter)
            parameter.grad = grad
        optimizer.step()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in net.named_parameters()
    }


def _cut_like(whole, parameter):
    """A tensor cut as a parameter is; FSDP over TP is cut by torch's own redistribution."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, parameter.placements)


def sliced_steps(layout):
    """`muon_steps` of a net that a layout slices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = Net()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (4,))
        fully_shard(net.blocks[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net.blocks[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net.blocks[0], mesh["tp"], plan)
        experts = distribute_tensor(net.blocks[0].experts.data, mesh["tp"], [Shard(0)])
        net.blocks[0].experts = nn.Parameter(experts)
        if layout == "fsdp over tp":
            cut = lambda p: Shard(1 if p.dim() == 3 else 0)  # noqa: E731 - as fully_shard wants it
            fully_shard(net.blocks[0], mesh=mesh["fsdp"], shard_placement_fn=cut)
    return muon_steps(net)
