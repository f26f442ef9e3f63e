"""Phase 5, checkpoint: step-N exists whole or not at all, also when it is written while training goes on.

    step-N.tmp/   every process writes its slices, each file synced
                  rank 0: SHA-256 of every file, manifest.json, fsync, rename to step-N, fsync of the folder
    then          windows.jsonl, and the oldest of more than keep_last checkpoints are removed, never the one just made

*In the background* the slices are copied to the CPU first (memory: once more this process's state), and the writing's
collectives run in a gloo group of their own: in the training's they would meet its collectives and abort the process.
A checkpoint counts only from its rename on; an error of the writing is raised at the next save, or at the end.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from provenance.canonical import sync_folder, write_atomic
from trainer.checkpoint import REPLACED, complete_steps
from trainer.errors import SaveError
from trainer.index import quiet
from trainer.manifest import MANIFEST_FILE, Manifest, file_entry, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer.mesh import Mesh


class Saver:
    """Writes the checkpoints of a run; one per process."""

    def __init__(self, directory: Path, mesh: Mesh, keep_last: int, group: Any = None) -> None:
        """Nothing is written yet.

        Args:
            directory: folder of the run.
            mesh: the processes.
            keep_last: newest checkpoints to keep, >= 1.
            group: gloo group of the same processes for writing in the background; unused with one process.
        """
        self.directory, self.mesh, self.keep_last, self.group = directory, mesh, keep_last, group
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, manifest: Manifest, tensors: Mapping[str, Tensor], *, then: Callable[[], None] | None = None
    ) -> Path:  # fmt: skip
        """Write step-N; every process calls this with its slices, and returns when it is complete.

        Args:
            manifest: what stands in manifest.json; its `files` are filled in here.
            tensors: logical name -> tensor or slice; `manifest.root` is their `state_root`.
            then: called by the first process once step-N is complete.

        Returns:
            The folder step-N, complete and durable.

        Raises:
            SaveError: the disk refused; the last good checkpoint stands.
        """
        self.wait()
        unfinished = self._begin(manifest)
        self._write(unfinished, dict(tensors), None)
        self.mesh.barrier()
        if self.mesh.rank == 0:
            self._complete(manifest, unfinished, then)
        self.mesh.barrier()
        return self.directory / f"step-{manifest.step}"

    def start(
        self, manifest: Manifest, tensors: Mapping[str, Tensor], *, then: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        """Like `save`, but returns when the slices are copied; `wait` says when step-N is complete.

        Raises:
            SaveError: the disk refused this checkpoint, or the one before.
        """
        self.wait()
        unfinished = self._begin(manifest)
        written = self._write_later(unfinished, tensors)

        def work() -> None:
            try:
                written()
                if self.mesh.rank == 0:
                    self._complete(manifest, unfinished, then)
            except BaseException as error:  # noqa: BLE001 - DCP's own is no Exception; raised again by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until no checkpoint is being written; with several processes, each knows of its own part.

        Raises:
            SaveError: the one that was being written is not complete, and will not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error if isinstance(error, SaveError) else _save_error(error)

    def _begin(self, manifest: Manifest) -> Path:
        unfinished = self.directory / f"step-{manifest.step}.tmp"
        if self.mesh.rank == 0:
            try:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise _save_error(error) from error
        self.mesh.barrier()
        return unfinished

    def _write(self, folder: Path, tensors: dict[str, Tensor], group: Any) -> None:
        """This process's slices, each file synced; returns when every process has written its own."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with quiet():
                dcp.save(
                    tensors,
                    storage_writer=dcp.FileSystemWriter(folder),
                    process_group=group,
                    no_dist=self.mesh.world_size == 1,
                )
        except (CheckpointException, OSError) as error:
            raise _save_error(error) from error

    def _write_later(self, folder: Path, tensors: Mapping[str, Tensor]) -> Callable[[], object]:
        """Copy the slices to the CPU; what is returned writes the copies."""
        if self.mesh.world_size == 1:
            copies = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()
            }
            return lambda: self._write(folder, copies, None)
        import torch.distributed.checkpoint as dcp

        assert self.group is not None, "a save in the background needs a group of its own"
        writer = dcp.FileSystemWriter(folder)
        future = dcp.async_save(dict(tensors), storage_writer=writer, process_group=self.group)
        return future.result  # type: ignore[union-attr]  # a Future, without a stager of our own

    def _complete(
        self, manifest: Manifest, unfinished: Path, then: Callable[[], None] | None
    ) -> None:
        """Rank 0: digests, manifest, rename; only now the checkpoint exists."""
        final = self.directory / f"step-{manifest.step}"
        try:
            files = {path.name: file_entry(path) for path in sorted(unfinished.iterdir())}
            write_atomic(unfinished / MANIFEST_FILE, sealed(replace(manifest, files=files)))
            before = final.with_name(f"{final.name}{REPLACED}")
            if final.exists():
                final.rename(before)
            unfinished.rename(final)
            sync_folder(self.directory)
            shutil.rmtree(before, ignore_errors=True)
            if then is not None:
                then()
            older = [path for _, path in complete_steps(self.directory) if path != final]
            for old in older[: max(0, len(older) + 1 - self.keep_last)]:
                _discard(old)
        except OSError as error:
            raise _save_error(error) from error


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that a crash in between leaves no half of it under its name."""
    doomed = folder.with_name(f"{folder.name}.old.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _save_error(error: BaseException) -> SaveError:
    """The disk's own words, out of whatever DCP wrapped them in."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
    said = {
        getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}" for cause in causes
    }
    text = "; ".join(sorted(" ".join(str(one).split())[:200] for one in said))
    return SaveError(f"the checkpoint could not be written ({text}); the last good one stands")
