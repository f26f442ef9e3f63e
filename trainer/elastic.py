"""Going on with fewer processes: the layout for those that are left.

A run whose `config.min_processes` allows it may be started with fewer processes than its layout names: the batch is
cut by those that are there, the global batch, its order and the learning rate stay, and a checkpoint is read by any
layout. Only the order of sums changes, about 1e-7 a step in float32; so a run that must be bit-equal leaves
`min_processes` at 0.

Only copies of the model can be missing, because what every process holds alone (a stage, a slice of heads, experts)
is needed: the data dimensions shrink, the others must fit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trainer.errors import SpecError

if TYPE_CHECKING:
    from trainer.layout import Layout


def fitting_layout(layout: Layout, world: int, least: int) -> Layout:
    """The layout to train with.

    Args:
        layout: that of the run.
        world: processes that the launcher started.
        least: `config.min_processes`; 0 = the layout's own number.

    Returns:
        The layout itself if the numbers agree or nothing else is allowed (`init_mesh` then refuses), else the same
        degrees with fewer copies, or one copy of fewer slices where the processes left are no multiple of the slices.

    Raises:
        SpecError: fewer processes than the run allows, or too few for what a copy is divided into.
    """
    if world >= layout.world_size or not least:
        return layout
    if world < least:
        raise SpecError(
            f"config.min_processes: the run goes on with {least} process(es) or more, the launcher started {world}"
        )
    copy = layout.sp * layout.tp * layout.pp
    copies, rest = divmod(world, copy)
    if rest or not copies:
        raise SpecError(
            f"config.min_processes: {layout} needs a multiple of sp * tp * pp = {copy} processes, the launcher started {world}"
        )
    shard = layout.dp_shard if copies % layout.dp_shard == 0 else copies
    return dataclasses.replace(layout, dp_replicate=copies // shard, dp_shard=shard)
