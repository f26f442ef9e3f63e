"""Things that go wrong in a process of a run, and a way to run `python -m trainer` with one of them.

A fault is "name@step/rank": it happens once, in the given process, when it has done so many steps (saves count by the
step they save). Children are forked, so that a job of two processes costs under a second; they join by the
environment, as torchrun's do, and end with their own exit codes.
"""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from torch import multiprocessing

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "trainer.loop"]


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner, name, at, act):
    """Replace a function by one that first does `act` when its count of calls reaches `at`."""
    real, calls = getattr(owner, name), [0]

    def faulty(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            act(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, faulty)


def _after(owner, name, at, act):
    """Like `_before`, but once the function has returned."""
    real, calls = getattr(owner, name), [0]

    def faulty(*args, **kwargs):
        result = real(*args, **kwargs)
        calls[0] += 1
        if calls[0] == at:
            act(*args, **kwargs)
        return result

    setattr(owner, name, faulty)


def _flip(optimizer, *_):
    """One bit of one weight of this process, in memory."""
    import torch

    from trainer.partition import local

    name = sorted(optimizer.parameters)[3]
    local(optimizer.parameters[name]).detach().view(torch.int32).view(-1)[0] ^= 1 << 18


def _raise(error):
    def act(*_, **__):
        raise error

    return act


def arm(name, at):
    """Make a fault happen in this process at a step (1 = the first)."""
    import torch.distributed.checkpoint as dcp

    from trainer import loop, saver, step, training, watch
    from trainer.objective import LanguageModelling
    from trainer.optim import AdamW

    watch.GRACE_S = 1.0  # a test's processes answer at once
    disk = OSError(28, "No space left on device")
    {
        "none": lambda: None,
        # one death per phase
        "partition": lambda: _before(loop, "apply_layout", at, _die),
        "local": lambda: _before(LanguageModelling, "loss", at, _die),
        "communicate": lambda: _before(step, "reduce_gradients", at, _die),
        "update": lambda: _after(AdamW, "step", at, _die),
        "writing": lambda: _before(dcp.FileSystemWriter, "write_data", at, _die),
        "written": lambda: _after(dcp.FileSystemWriter, "write_data", at, _die),
        "manifest": lambda: _before(saver, "write_atomic", at, _die),
        "renamed": lambda: _before(saver, "sync_folder", at, _die),
        "window": lambda: _before(training, "append_window", at, _die),
        "discard": lambda: _before(saver, "_discard", at, _die),
        "deleting": lambda: _before(saver.shutil, "rmtree", at, _die),
        # what is not a death
        "hang": lambda: _before(LanguageModelling, "batch", at, lambda *_: time.sleep(6)),
        "bug": lambda: _before(LanguageModelling, "batch", at, _raise(KeyError("a defect"))),
        "stop": lambda: _before(
            LanguageModelling, "batch", at, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        ),
        "flip": lambda: _after(AdamW, "step", at, _flip),
        "cut": lambda: _after(loop, "apply_layout", at, lambda model, *_: _flip_model(model)),
        "disk": lambda: _before(saver, "write_atomic", at, _raise(disk)),
        "slow": lambda: _before(LanguageModelling, "loss", at, lambda *_: time.sleep(1.0)),
        "slow-disk": lambda: _before(saver, "write_atomic", at, lambda *_: time.sleep(2.0)),
        "slow-net": lambda: _before(step, "reduce_gradients", at, lambda *_: time.sleep(1.0)),
        "lr": lambda: _wrong_rate(training, at),
    }[name]()  # fmt: skip


def _flip_model(model):
    import torch

    from trainer.partition import local

    local(model.norm.weight).detach().view(torch.int32).view(-1)[0] ^= 1 << 18


def _wrong_rate(training, at):
    """From a step on, a learning rate that is not the schedule's."""
    real = training.learning_rate
    training.learning_rate = lambda step, *rest: (
        real(step, *rest) * (300.0 if step + 1 == at else 1.0)
    )


def _program(rank, world, port, directory, fault, log):
    """`python -m trainer` in this process, as torchrun would start it."""
    import torch

    from trainer.__main__ import main

    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    name, _, place = fault.partition("@")
    at, _, who = place.partition("/")
    with Path(log).open("w") as errors, contextlib.redirect_stderr(errors):
        arm(name if rank == int(who or 0) else "none", int(at or 0))
        code = main(["--run", str(directory)])
    os._exit(code)  # as the end of a process, without what a test runner adds


def train_dying_once(run, directory):
    """An entry like `trainer.loop.train`; its second process is killed at step 7 of the run's first start."""
    from trainer.loop import train

    mark = directory.with_name("died")
    if os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch()
        arm("local", 7)
    return train(run, directory)


def train_slowly(run, directory):
    """An entry like `trainer.loop.train` that gives a test time to interfere."""
    from trainer.loop import train
    from trainer.objective import LanguageModelling

    real = LanguageModelling.batch
    LanguageModelling.batch = lambda *given: time.sleep(0.2) or real(*given)
    return train(run, directory)


def start_program(world, directory, fault="none"):
    """Start the processes of a run; returns them with the files that hold their standard error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    logs = [
        Path(directory).with_name(f"{Path(directory).name}.{rank}.err") for rank in range(world)
    ]
    processes = [
        context.Process(target=_program, args=(rank, world, port, directory, fault, logs[rank]))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, logs


def run_program(world, directory, fault="none", timeout_s=60):
    """Run to the end: exit codes and standard errors by rank; a process that hangs fails the test."""
    processes, logs = start_program(world, directory, fault)
    end = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
    assert not hanging, f"rank {hanging} hangs"
    errors = [log.read_text() if log.exists() else "" for log in logs]
    return [process.exitcode for process in processes], errors
