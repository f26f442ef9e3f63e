"""Where retrainings run: processes of this machine, or a Ray cluster, by one call.

    in_workers(function, jobs, at_once, backend) → results in the order in which they end

| backend | workers | a worker that is killed |
| --- | --- | --- |
| `processes` | joblib's, on this machine | its jobs are done anew in fresh workers, three times in all |
| `ray` | tasks of one CPU, on all nodes of the cluster | Ray starts the task anew, wherever there is room, three times in all |

After the third loss of a worker a `ProxyError` names the job; what the others finished is in the bank, so the next call does only the
rest. An error that `function` raises isn't repeated: it would be raised again. Every training uses one thread, starts from its own
seed and writes its own file, so the bits don't depend on backend, number of workers, order or losses.

A cluster's nodes need this package installed and must see the folders of tokens and bank under the same paths; tokens are checked by
digest on every node. The cluster is the one that the program is connected to, else that of `RAY_ADDRESS`, else the one that this
machine belongs to; none is started here (a cluster of its own would send Ray's usage statistics, which nobody asked for).

When the parent dies, joblib's workers follow it within a second and Ray ends the tasks of the driver itself.

Source: joblib (loky) and Ray's documentation on task fault tolerance.
"""

from __future__ import annotations

import os
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from valuation.errors import ProxyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Backend = Literal["processes", "ray"]
BACKENDS = ("processes", "ray")
IDLE_WORKER_TIMEOUT_S = 60
# How often a job may be begun: a machine that kills every worker must not be asked for ever.
MAX_STARTS = 3
Job = TypeVar("Job")
Done = TypeVar("Done")


def in_workers(
    function: Callable[[Job], Done], jobs: Sequence[Job], at_once: int, backend: str = "processes"
) -> Iterator[Done]:
    """Do every job and yield results in the order in which they end.

    Args:
        function: what a worker does; importable by name, it and the jobs travel by pickle.
        jobs: one training each, longest first.
        at_once: most jobs at the same time, >= 1; on this machine, one works in this process.
        backend: `processes` or `ray`.

    Returns:
        Results, each once.

    Raises:
        ProxyError: an unknown backend, no Ray, or a job whose worker was killed three times.
    """
    if backend not in BACKENDS:
        raise ProxyError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if backend == "ray":
        return _on_ray(function, jobs, at_once)
    if at_once == 1 or len(jobs) < 2:
        return map(function, jobs)
    return _on_joblib(function, jobs, at_once)


def _on_joblib(
    function: Callable[[Job], Done], jobs: Sequence[Job], at_once: int
) -> Iterator[Done]:
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    todo = dict(enumerate(jobs))
    for start in range(1, MAX_STARTS + 1):
        with joblib.parallel_config(
            backend="loky", inner_max_num_threads=1, idle_worker_timeout=IDLE_WORKER_TIMEOUT_S,
        ):  # fmt: skip
            parallel = joblib.Parallel(
                # At least two: joblib would do a single job in this process, which a killed job must not take along.
                n_jobs=max(2, min(at_once, len(todo))),
                return_as="generator_unordered",
                pre_dispatch="all",
            )
            calls = [joblib.delayed(_followed)(os.getpid(), function, n, todo[n]) for n in todo]
            try:
                for number, done in parallel(calls):
                    del todo[number]
                    yield done
            except TerminatedWorkerError as error:
                # Which job's worker died isn't known: all that are left are begun again.
                if start == MAX_STARTS:
                    raise ProxyError(
                        f"workers: expected {len(todo)} more jobs to end, got a killed worker {start} times (memory?); "
                        "what ended is kept, call again with fewer at once"
                    ) from error
                continue
        return


def _followed(
    parent: int, function: Callable[[Job], Done], number: int, job: Job
) -> tuple[int, Done]:
    follow_parent(parent)
    return number, function(job)


def _on_ray(function: Callable[[Job], Done], jobs: Sequence[Job], at_once: int) -> Iterator[Done]:
    try:
        import ray
    except ImportError as error:
        raise ProxyError(
            "backend: expected the package ray for a cluster, got none; install dataworth[ray], or use processes"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ProxyError(
                "backend: expected a Ray cluster, got none; start one (ray start --head) or set RAY_ADDRESS"
            ) from error
    task = ray.remote(num_cpus=1, max_retries=MAX_STARTS - 1)(function)
    waiting = list(enumerate(jobs))
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                running[task.remote(job)] = number
            ended, _ = ray.wait(list(running), num_returns=1)
            number = running.pop(ended[0])
            try:
                done = ray.get(ended[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:  # a killed worker, a lost node
                raise ProxyError(
                    f"job {number} of {len(jobs)}: expected a result, got {type(error).__name__} after {MAX_STARTS} starts; "
                    "what ended is kept, call again"
                ) from error
            yield done
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


class one_thread:  # noqa: N801 - reads as a statement
    """One thread for torch inside; the order of sums, and so the bank, doesn't depend on the number of workers."""

    def __enter__(self) -> None:
        """Remember the number of threads."""
        import torch

        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        """Put it back."""
        import torch

        torch.set_num_threads(self._threads)


@lru_cache(maxsize=1)  # one watcher per process
def follow_parent(parent: int) -> None:
    """Let a worker end with the process that started it, also when that was killed without a word."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)  # bank files are written atomically: nothing can be half done

    threading.Thread(target=watch, daemon=True).start()
