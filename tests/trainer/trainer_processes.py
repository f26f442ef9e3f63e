"""Runs of several gloo processes inside a test, by forkserver: seconds less than torchrun for the same claim."""

import time
import traceback

import torch
from torch import distributed as dist
from torch import multiprocessing

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "trainer.loop"]


def _work(rank, world, file, function, arguments, results):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
        answer = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise
    results.put((rank, True, answer))


def run_processes(world, file, function, *arguments):
    """Call `function(*arguments)` in `world` processes of one group; returns the answers by rank.

    `file` is a path that does not exist yet; `function` is importable by the children.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(rank, world, file, function, arguments, results))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers = {}
    try:
        while len(answers) < world:
            if results.empty():
                # A child may die before it can say so; the others would wait for it in a collective.
                ended = [process.exitcode for process in processes if process.exitcode]
                assert not ended, f"a child ended with {ended[0]} and no answer"
                time.sleep(0.005)
                continue
            rank, good, answer = results.get()
            assert good, answer
            answers[rank] = answer
    except AssertionError:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return [answers[rank] for rank in range(world)]


def fit_run(run, directory):
    """`trainer.loop.fit` with a module-level name, for the children."""
    from trainer.loop import fit

    return fit(run, directory)
