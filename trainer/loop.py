"""The loop: from run.json to a checkpoint, through the five phases, whatever interrupts it.

    partition once, then per step: local forward/backward -> communicate -> update; every k steps: checkpoint

A step is a pure function of (state, step), so a run that was stopped or killed goes on from its newest complete
checkpoint and ends with the same bits as one that was never interrupted (same layout, same number of threads). It
finds that checkpoint by itself, from the folder and nothing else.

Objectives come from outside: `fit(run, directory, objective=...)` minimises any `trainer.objective.Objective`, starting
from the run's seed or from a checkpoint whose root the run names.

Numbering: step s, counted from 1, trains on `batch(s - 1)` and leads to the state of step-s.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from trainer.elastic import fitting_layout
from trainer.guard import SpikeGuard
from trainer.inputs import batch_plan, initial_model, open_store
from trainer.journal import (
    lock_folder,
)
from trainer.mesh import Mesh, init_mesh, launched_world
from trainer.model import Transformer, num_parameters
from trainer.objective import LanguageModelling, Objective, divide
from trainer.optim import Stateful, build_optimizer
from trainer.partition import apply_layout
from trainer.prefetch import Prefetcher
from trainer.saver import Saver
from trainer.stop import StopFlag
from trainer.training import Training
from trainer.watch import Watch, agreed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.spec import RunSpec


def train(run: RunSpec, directory: Path) -> int:
    """The default entry: next-token training of the run's tokens.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        An exit code, see `fit`.
    """
    return fit(run, directory)


def fit(
    run: RunSpec,
    directory: Path,
    *,
    objective: Objective | None = None,
    model_hook: Callable[[Transformer], None] | None = None,
    optimizer_of: Callable[[Transformer], Stateful] | None = None,
) -> int:
    """Train until the run's last step, or until told to stop.

    Args:
        run: the run.
        directory: its folder; progress, windows, phases, checkpoints and result are written there.
        objective: what to minimise; None = next-token cross entropy over the run's tokens.
        model_hook: called with the whole model before it is spread over processes (freeze, add adapters).
        optimizer_of: makes the optimiser of the spread model; None = that of the run's specification.

    Returns:
        EXIT_DONE; EXIT_RESUME after SIGTERM or SIGINT, with a checkpoint of the last step; EXIT_NUMERICAL if loss or
        gradient stopped being finite, with the last good checkpoint in place.

    Raises:
        SpecError: layout and launcher differ, or the layout divides what the objective can't.
        DataError: tokens or excluded records are not the committed ones.
        CheckpointError: a checkpoint to start from or to go on from is altered or of another run.
        InterruptedRunError: a process is lost, replicas differ or the disk refused; the last good checkpoint stands.
    """
    start, config = perf_counter(), run.config
    layout = fitting_layout(run.layout, launched_world(), config.min_processes)
    mesh = init_mesh(layout, config.timeout_s)
    with ExitStack() as held:
        held.callback(mesh.close)
        watch = held.enter_context(Watch(mesh, config.timeout_s))
        lock = agreed(mesh, lambda: lock_folder(directory) if mesh.rank == 0 else None)
        if lock is not None:
            held.callback(os.close, lock)
        objective, model = agreed(mesh, lambda: _inputs(run, directory, mesh, objective, held))
        if model_hook is not None:
            model_hook(model)
        size = num_parameters(model)  # a stage has fewer
        model = apply_layout(model, mesh)
        if optimizer_of is None:
            optimizer_of = partial(build_optimizer, spec=config.optim, precision=config.precision)
        training = Training(
            run, directory, mesh, objective, model, size, watch,
            saver=Saver(directory, mesh, config.keep_last, mesh.side),
            optimizer=optimizer_of(model),
            guard=SpikeGuard(config.guard, mesh) if config.guard else None,
        )  # fmt: skip
        with training.blame():
            training.recover()
            training.partition_s = perf_counter() - start
            with StopFlag() as stop, training.progress():
                return training.go(stop)


def _inputs(
    run: RunSpec, directory: Path, mesh: Mesh, objective: Objective | None, held: ExitStack
) -> tuple[Objective, Transformer]:
    """What the run trains, and on what; every digest recomputed."""
    if objective is None:
        plan = batch_plan(run, directory)
        prefetcher = Prefetcher(plan, run.steps)
        held.callback(prefetcher.close)
        objective = LanguageModelling(plan, mesh.device, mesh, prefetcher)
    else:
        divide(objective, mesh)
        open_store(run, directory)  # the run's tokens are checked whatever the objective reads
    return objective, initial_model(run, directory)
