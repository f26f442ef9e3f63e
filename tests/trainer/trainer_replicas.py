"""What the processes of a test of replicas do: a module of its own, so that forked children can import it."""

import torch
from torch import distributed as dist

from trainer.errors import DataError, DesyncError
from trainer.mesh import Mesh
from trainer.root import state_root
from trainer.watch import agreed, check_replicas, slice_digests


def hybrid(flip):
    """Four processes as 2 replicas x 2 slices, one tensor cut, one whole, one on a stage of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cut = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Replicate(), Shard(0)])
    alone = distribute_tensor(torch.arange(4.0), mesh["shard"], [Shard(0)])
    state = {"cut": cut, "whole": torch.ones(2), f"stage{rank % 2}": torch.zeros(1), "alone": alone}
    if rank == flip[0]:
        tensor = state[flip[1]]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.view(torch.int32).view(-1)[0] ^= 1
    said = ""
    try:
        check_replicas(state, Mesh(rank, world), "step 3")
    except DesyncError as error:
        said = str(error)
    del state["alone"]
    return said, state_root(state, Mesh(rank, world)), len(slice_digests({"cut": cut}, world))


def refused(guilty):
    """`agreed` with an action that some ranks refuse."""
    mesh = Mesh(dist.get_rank(), dist.get_world_size())

    def action():
        if mesh.rank in guilty:
            raise DataError(f"bad on {mesh.rank}")
        return mesh.rank

    try:
        return agreed(mesh, action)
    except DataError as error:
        return str(error)


def reload(run, folder, layout):
    """Load a checkpoint into a zeroed state of a layout; returns the root of what is then there."""
    from trainer.checkpoint import load_into, model_state
    from trainer.inputs import initial_model
    from trainer.mesh import init_mesh
    from trainer.optim import build_optimizer
    from trainer.partition import apply_layout, local

    mesh = init_mesh(layout)
    model = apply_layout(initial_model(run, folder.parent), mesh)
    moments = build_optimizer(model, run.config.optim).state()
    state = model_state(model) | {f"optim.{name}": tensor for name, tensor in moments.items()}
    for tensor in state.values():
        local(tensor).zero_()  # a tensor that is missed shows
    load_into(folder, state, mesh)
    return state_root(state, mesh)
