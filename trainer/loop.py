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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from trainer import checkpoint
from trainer.elastic import fitting_layout
from trainer.entries import Facts
from trainer.errors import (
    EXIT_DONE,
    EXIT_NUMERICAL,
    EXIT_RESUME,
    AlteredCheckpointError,
    NumericalError,
    TrainerError,
)
from trainer.guard import SpikeGuard, append_event, restore_events
from trainer.inputs import batch_plan, initial_model, open_store
from trainer.journal import (
    EXIT_FILE,
    RESULT_FILE,
    append_window,
    lock_folder,
    restore_windows,
    window_line,
    write_exit,
    write_result,
)
from trainer.manifest import check_run, manifest_of, verify
from trainer.mesh import Mesh, init_mesh, launched_world
from trainer.metrics import PROGRESS_FILE, ProgressWriter, read_lines
from trainer.microbatch import take_batch
from trainer.model import Transformer, num_parameters
from trainer.objective import Accountable, LanguageModelling, Objective
from trainer.optim import Stateful, build_optimizer, learning_rate
from trainer.partition import apply_layout, refuse_division
from trainer.phases import failed_phase, write_phases
from trainer.prefetch import Prefetcher
from trainer.root import leaves_root, state_leaves, state_root
from trainer.saver import Saver
from trainer.spec import RunSpec, run_digest
from trainer.step import StepReport, train_step
from trainer.stop import StopFlag
from trainer.timings import Timings
from trainer.watch import Watch, agreed, check_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


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
        SpecError: layout and launcher differ, or the layout divides what only the default objective can divide.
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
        training = _Training(
            run, directory, mesh, objective, model, size, watch,
            saver=Saver(directory, mesh, config.keep_last, mesh.side),
            optimizer=build_optimizer(model, config.optim, config.precision),
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
        refuse_division(run.layout)
        open_store(run, directory)  # the run's tokens are checked whatever the objective reads
    return objective, initial_model(run, directory)


@dataclass(slots=True)
class _Training:
    """The state of a run while it goes; one per process."""

    run: RunSpec
    directory: Path
    mesh: Mesh
    objective: Objective
    model: Transformer
    num_parameters: int
    """Of the whole model."""
    watch: Watch
    saver: Saver
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
    timings: Timings | None = None
    partition_s: float = 0.0
    """Seconds until the first step."""
    start: tuple[int, str] = (0, "")
    """Step and root that this process began with."""
    compared: int = 0
    """How often replicas were found equal."""

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
        found, window, state = checkpoint.newest(self.directory), {}, self.state()
        if found is not None:
            manifest = verify(found, self.mesh)
            check_run(found, manifest, self.run)
            checkpoint.load_into(found, state, self.mesh)
            self.done, window = manifest.step, manifest.window
        self.root = state_root(state, self.mesh)
        if found is not None and self.root != manifest.root:
            raise AlteredCheckpointError(
                f"{found.name}: expected root {manifest.root}, its tensors have {self.root}"
            )
        self.window_start, self.start = self.done, (self.done, self.root)
        self.compare(state)
        self.timings = Timings(self.directory, self.mesh, self.done)
        if self.leads:
            restore_windows(self.directory, self.done, window)
            restore_events(self.directory, self.done)

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """See that replicas hold the same bits."""
        check_replicas(tensors, self.mesh, f"step {self.done}")
        self.compared += 1

    @contextmanager
    def blame(self) -> Iterator[None]:
        """Whatever ends the run stands in phases.json, under the phase it belongs to."""
        try:
            yield
        except TrainerError as error:
            if self.leads:
                self._write_phases(error)
            raise

    def progress(self) -> Any:
        """The progress file, open as long as the loop goes."""
        from contextlib import nullcontext

        if not self.leads:
            return nullcontext()
        self.writer = ProgressWriter(self.directory / PROGRESS_FILE, self.done)
        return self.writer

    def go(self, stop: StopFlag) -> int:
        """All remaining steps."""
        every = self.run.config.checkpoint_every
        stopping = False
        while self.done < self.run.steps and not stopping:
            try:
                stopping = self.one_step(stop)
            except NumericalError as error:
                return self._leave(EXIT_NUMERICAL, f"step {self.done + 1}: {error}", error)
            if self.done % every == 0 and self.done < self.run.steps and not stopping:
                self.save(background=self.run.config.asynchronous)
        self.saver.wait()
        self.mesh.barrier()
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

    def one_step(self, stop: StopFlag) -> bool:
        """One step; returns whether any process was told to stop."""
        assert self.timings is not None
        config, before = self.run.config, perf_counter()
        batch, counts_K = take_batch(
            self.objective, self.done, *self.mesh.batch_place, config.batch.accumulation
        )
        counts_K = counts_K * self.mesh.counts
        fetched = perf_counter()
        self.watch.meet()
        # The stop flag travels with the counts, so that all processes leave after the same step; so do the times
        # of the step before.
        told = [float(stop.raised), *self.timings.outgoing()]
        extra = torch.tensor(told, dtype=torch.float64, device=counts_K.device)
        sums = self.mesh.sum(torch.cat([counts_K.double(), extra]))
        totals, told = sums[: len(counts_K)], sums[len(counts_K) :].tolist()
        self.timings.incoming(told[1:])
        self.optimizer.lr = learning_rate(self.done, config.optim, self.run.steps)
        prepared = perf_counter()
        report = train_step(
            self.model,
            self.optimizer,
            self.objective,
            batch,
            totals,
            clip_norm=config.optim.clip_norm,
            mesh=self.mesh,
            precision=config.precision,
            accept=self.guard.accept if self.guard else None,
        )
        if self.guard and not report.updated:
            self._handle_spike(self.guard, report)
        if self.leads:
            self._note(report)
        self.done += 1
        self.timings.note(
            self.done,
            input=fetched - before,
            local=report.local_s,
            communicate=prepared - fetched + report.communicate_s,
            update=report.update_s,
        )
        if config.compare_every and self.done % config.compare_every == 0:
            self.compare(checkpoint.model_state(self.model))
        return told[0] > 0

    def _handle_spike(self, guard: SpikeGuard, report: StepReport) -> None:
        """Undo more than the update if the run says so, and write down what was done."""
        found = None
        if guard.spec.action == "rollback":
            self.saver.wait()
            self.mesh.barrier()
            found = checkpoint.newest(self.directory)
        if found is not None:
            spikes = guard.num_spikes
            checkpoint.load_into(found, self.state(), self.mesh)
            guard.forget_undone(spikes)
        if self.leads:
            restored = found.name if found else "none"
            line = guard.event(self.done + 1, report.loss, report.grad_norm, restored)
            append_event(self.directory, line)

    def save(self, *, background: bool = False) -> None:
        """Checkpoint and close the window; in the background it is complete at the next save, or at the end."""
        assert self.timings is not None
        self.timings.flush()
        begun, tensors = perf_counter(), self.state()
        self.compare(tensors)
        leaves = state_leaves(tensors, self.mesh)
        before, self.root = self.root, leaves_root(leaves)
        window: dict[str, Any] = {}
        if self.done > self.window_start:
            records = self.records if isinstance(self.objective, Accountable) else None
            window = window_line(self.window_start + 1, self.done, records, before, self.root)
        manifest = manifest_of(self.run, self.done, self.root, len(leaves), window)
        write = self.saver.start if background else self.saver.save
        write(
            manifest, tensors, then=lambda: append_window(self.directory, window) if window else None
        )  # fmt: skip
        self.window_start, self.records = self.done, set()
        self.timings.note(self.done, checkpoint=perf_counter() - begun)
        self.timings.flush()

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

    def _write_phases(self, error: TrainerError | None = None) -> None:
        layout = self.mesh.layout
        facts = Facts(
            layout=layout,
            parameters=self.num_parameters,
            done=self.done,
            start_step=self.start[0],
            start_root=self.start[1] or "none",
            root=self.root or "none",
            partition_s=self.partition_s,
            compared=self.compared,
            failure=(failed_phase(error, self.done), str(error)) if error else ("", ""),
        )
        write_phases(self.directory, self.run, facts)

    def _leave(self, code: int, reason: str, error: TrainerError | None = None) -> int:
        self.saver.wait()
        self.mesh.barrier()
        if self.leads:
            self._write_phases(error)
            write_exit(self.directory, code, reason)
        self.mesh.barrier()
        return code
