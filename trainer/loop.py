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

import fcntl
import os
import signal
import threading
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import torch

from trainer import checkpoint
from trainer.errors import (
    EXIT_DONE,
    EXIT_NUMERICAL,
    EXIT_RESUME,
    CheckpointError,
    NumericalError,
    SpecError,
)
from trainer.guard import SpikeGuard, append_event, restore_events
from trainer.inputs import batch_plan, initial_model, open_store
from trainer.journal import (
    EXIT_FILE,
    RESULT_FILE,
    append_window,
    restore_windows,
    window_line,
    write_exit,
    write_result,
)
from trainer.mesh import Mesh, init_mesh
from trainer.metrics import ProgressWriter, read_lines
from trainer.microbatch import take_batch
from trainer.model import Transformer, num_parameters
from trainer.objective import Accountable, LanguageModelling, Objective
from trainer.optim import Stateful, build_optimizer, learning_rate
from trainer.partition import apply_layout
from trainer.phases import Costs, write_phases
from trainer.prefetch import Prefetcher
from trainer.root import state_root
from trainer.spec import RunSpec, run_digest
from trainer.step import StepReport, train_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PROGRESS_FILE = "progress.jsonl"


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
) -> int:
    """Train until the run's last step, or until told to stop.

    Args:
        run: the run.
        directory: its folder; progress, windows, phases, checkpoints and result are written there.
        objective: what to minimise; None = next-token cross entropy over the run's tokens.
        model_hook: called with the whole model before it is spread over processes (freeze, add adapters).

    Returns:
        EXIT_DONE; EXIT_RESUME after SIGTERM or SIGINT, with a checkpoint of the last step; EXIT_NUMERICAL if loss or
        gradient stopped being finite, with the last good checkpoint in place.

    Raises:
        SpecError: layout and launcher differ.
        DataError: tokens or excluded records are not the committed ones.
        CheckpointError: a checkpoint to start from or to go on from is altered or of another run.
    """
    start = perf_counter()
    mesh = init_mesh(run.layout)
    lock, prefetcher = _lock(directory) if mesh.rank == 0 else None, None
    try:
        if objective is None:
            plan = batch_plan(run, directory)
            prefetcher = Prefetcher(plan, run.steps)
            objective = LanguageModelling(plan, mesh.device, prefetcher)
        else:
            open_store(run, directory)  # the run's tokens are checked whatever the objective reads
        model = initial_model(run, directory)
        if model_hook is not None:
            model_hook(model)
        model = apply_layout(model, mesh, run.layout)
        config = run.config
        optimizer = build_optimizer(model, config.optim, config.precision)
        guard = SpikeGuard(config.guard, mesh) if config.guard else None
        training = _Training(run, directory, mesh, objective, model, optimizer, guard)
        training.recover()
        training.seconds["partition"] = perf_counter() - start
        with _StopFlag() as stop, training.progress():
            return training.go(stop)
    finally:
        if prefetcher is not None:
            prefetcher.close()
        if lock is not None:
            os.close(lock)
        mesh.close()


def _lock(directory: Path) -> int:
    """Hold the run's folder against a second writer until the descriptor is closed or the process dies."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SpecError(
            "the run is being worked on by another process; wait for it, or end it first"
        ) from error
    return descriptor


@dataclass(slots=True)
class _Training:
    """The state of a run while it goes; one per process."""

    run: RunSpec
    directory: Path
    mesh: Mesh
    objective: Objective
    model: Transformer
    optimizer: Stateful
    guard: SpikeGuard | None = None
    done: int = 0
    """Steps done."""
    root: str = ""
    """Logical root of the newest checkpoint, or of the initial state."""
    window_start: int = 0
    """Steps done when the current window began."""
    records: set[tuple[int, bytes]] = field(default_factory=set)
    """Records seen in the current window."""
    writer: ProgressWriter | None = None
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("partition", "local", "communicate", "update", "checkpoint"), 0.0
        ),
    )
    steps_here: int = 0
    """Steps done by this process, without those before a resume."""

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files."""
        return self.mesh.rank == 0

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and the guard's window under their logical names."""
        state = {f"optim.{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.guard:
            state |= {f"guard.{name}": tensor for name, tensor in self.guard.state().items()}
        return checkpoint.model_state(self.model) | state

    def recover(self) -> None:
        """Go on from the newest complete checkpoint of this run, if there is one."""
        if self.leads:
            checkpoint.clean(self.directory)
            for name in (EXIT_FILE, RESULT_FILE):
                (self.directory / name).unlink(missing_ok=True)
        self.mesh.barrier()
        found, window = checkpoint.newest(self.directory), {}
        if found is not None:
            state = self.state()
            manifest = checkpoint.load_into(found, state, self.mesh)
            if manifest.run_digest != run_digest(self.run) or manifest.step > self.run.steps:
                raise CheckpointError(
                    f"{found.name}: of another run ({manifest.run}); use an empty folder"
                )
            self.done, window = manifest.step, manifest.window
        self.root = state_root(self.state())
        if found is not None and self.root != manifest.root:
            raise CheckpointError(
                f"{found.name}: expected root {manifest.root}, its tensors have {self.root}"
            )
        self.window_start = self.done
        if self.leads:
            restore_windows(self.directory, self.done, window)
            restore_events(self.directory, self.done)

    def progress(self) -> Any:
        """The progress file, open as long as the loop goes."""
        from contextlib import nullcontext

        if not self.leads:
            return nullcontext()
        self.writer = ProgressWriter(self.directory / PROGRESS_FILE, self.done)
        return self.writer

    def go(self, stop: _StopFlag) -> int:
        """All remaining steps."""
        every = self.run.config.checkpoint_every
        stopping = False
        while self.done < self.run.steps and not stopping:
            try:
                stopping = self.one_step(stop)
            except NumericalError as error:
                return self._leave(EXIT_NUMERICAL, f"step {self.done + 1}: {error}")
            if self.done % every == 0 and self.done < self.run.steps and not stopping:
                self.save()
        if self.done > self.window_start or checkpoint.newest(self.directory) is None:
            self.save()
        if self.done < self.run.steps:
            return self._leave(
                EXIT_RESUME, f"stopped by a signal after step {self.done} of {self.run.steps}"
            )
        if self.leads:
            self.finish()
        self.mesh.barrier()
        return EXIT_DONE

    def one_step(self, stop: _StopFlag) -> bool:
        """One step; returns whether any process was told to stop."""
        config, before = self.run.config, perf_counter()
        batch, counts_K = take_batch(
            self.objective,
            self.done,
            self.mesh.rank,
            self.mesh.world_size,
            config.batch.accumulation,
        )
        # The stop flag travels with the counts, so that all processes leave after the same step.
        told = torch.tensor([float(stop.raised)], dtype=torch.float64, device=counts_K.device)
        totals = self.mesh.sum(torch.cat([counts_K.double(), told]))
        self.optimizer.lr = learning_rate(self.done, config.optim, self.run.steps)
        prepared = perf_counter()
        report = train_step(
            self.model,
            self.optimizer,
            self.objective,
            batch,
            totals[:-1],
            clip_norm=config.optim.clip_norm,
            mesh=self.mesh,
            precision=config.precision,
            accept=self.guard.accept if self.guard else None,
        )
        if self.guard and not report.updated:
            self._handle_spike(self.guard, report)
        self.seconds["local"] += prepared - before + report.local_s
        self.seconds["communicate"] += report.communicate_s
        self.seconds["update"] += report.update_s
        if self.leads:
            self._note(report)
        self.done += 1
        self.steps_here += 1
        return bool(totals[-1] > 0)

    def _handle_spike(self, guard: SpikeGuard, report: StepReport) -> None:
        """Undo more than the update if the run says so, and write down what was done."""
        found = checkpoint.newest(self.directory) if guard.spec.action == "rollback" else None
        if found is not None:
            spikes = guard.num_spikes
            checkpoint.load_into(found, self.state(), self.mesh)
            guard.forget_undone(spikes)
        if self.leads:
            restored = found.name if found else "none"
            line = guard.event(self.done + 1, report.loss, report.grad_norm, restored)
            append_event(self.directory, line)

    def save(self) -> None:
        """Checkpoint and close the window."""
        start = perf_counter()
        tensors = self.state()
        before, self.root = self.root, state_root(tensors)
        window: dict[str, Any] = {}
        if self.done > self.window_start:
            records = self.records if isinstance(self.objective, Accountable) else None
            window = window_line(self.window_start + 1, self.done, records, before, self.root)
        manifest = checkpoint.Manifest(
            self.run.run, run_digest(self.run), self.done, self.root, window=window
        )
        checkpoint.save(
            self.directory, manifest, tensors, mesh=self.mesh, keep_last=self.run.config.keep_last
        )
        if self.leads and window:
            append_window(self.directory, window)
        self.window_start, self.records = self.done, set()
        self.seconds["checkpoint"] += perf_counter() - start

    def finish(self) -> None:
        """Write phases.json and, last, result.json."""
        self._write_phases()
        lines = read_lines(self.directory / PROGRESS_FILE)
        write_result(
            self.directory,
            {
                "run": self.run.run,
                "kind": self.run.kind,
                "status": "done",
                "steps": self.done,
                "final_loss": float(lines[-1]["loss"]) if lines else "none",
                "checkpoint": f"step-{self.done}",
                "checkpoint_root": self.root,
                "run_digest": run_digest(self.run),
                "tokens_digest": self.run.tokens_digest,
                **({"spikes": self.guard.num_spikes} if self.guard else {}),
            },
        )

    def _note(self, report: StepReport) -> None:
        """Progress line and records of the step that was just done."""
        assert self.writer is not None
        if isinstance(self.objective, Accountable):
            self.records.update(self.objective.records(self.done))
        self.writer.write(
            self.done + 1,
            report.loss,
            report.tokens,
            lr=self.optimizer.lr,
            grad_norm=report.grad_norm,
        )

    def _write_phases(self) -> None:
        costs = Costs(self.seconds, self.steps_here, num_parameters(self.model))
        write_phases(self.directory, self.run, costs, done=self.done, root=self.root)

    def _leave(self, code: int, reason: str) -> int:
        if self.leads:
            self._write_phases()
            write_exit(self.directory, code, reason)
        self.mesh.barrier()
        return code


class _StopFlag:
    """SIGTERM and SIGINT ask the loop to stop after the current step; a context manager."""

    def __init__(self) -> None:
        self.raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Catch the signals; only a main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _raise(self, *_: object) -> None:
        self.raised = True
