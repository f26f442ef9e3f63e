"""One run while it goes: its state, its steps, its checkpoints, and what it leaves behind (`trainer.loop` starts it)."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from trainer import checkpoint
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
from trainer.journal import (
    EXIT_FILE,
    RESULT_FILE,
    append_window,
    restore_windows,
    window_line,
    write_exit,
    write_result,
)
from trainer.manifest import check_run, manifest_of, verify
from trainer.metrics import PROGRESS_FILE, ProgressWriter, read_lines
from trainer.microbatch import take_batch
from trainer.objective import Accountable, Objective
from trainer.optim import Stateful, learning_rate
from trainer.phases import failed_phase, write_phases
from trainer.root import leaves_root, state_leaves, state_root
from trainer.spec import RunSpec, run_digest
from trainer.step import StepReport, train_step
from trainer.timings import Timings
from trainer.watch import Watch, check_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from trainer.mesh import Mesh
    from trainer.model import Transformer
    from trainer.saver import Saver
    from trainer.stop import StopFlag


@dataclass(slots=True)
class Training:
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
            optim = leaves_root({key: leaf for key, leaf in leaves.items() if key[:6] == "optim."})
            window = window_line(
                self.window_start + 1, self.done, records, before, self.root, optim
            )
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
