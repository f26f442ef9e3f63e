"""Entries of trainer runs that do in a second what a training does in an hour: `module:function`, as in `run.json`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

RESUME = 75


def finish(run, directory: Path) -> int:
    """Report twenty steps, then be done."""
    with (directory / "progress.jsonl").open("a") as file:
        for step in range(1, 21):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "loss": 5.0 - step / 10,
                        "tokens_per_s": 1000.0,
                        "rss_bytes": 2**30,
                    }
                )
                + "\n"
            )
            file.flush()
            time.sleep(0.05)
    (directory / "result.json").write_text('{"status": "done"}')
    return 0


def ask_twice(run, directory: Path) -> int:
    """Ask to be resumed at the first two starts, finish at the third."""
    return finish(run, directory) if _start(directory) > 2 else RESUME


def ask_always(run, directory: Path) -> int:
    """Never get anywhere."""
    _start(directory)
    return RESUME


def ask_then_crash(run, directory: Path) -> int:
    """Ask to be resumed, leave a word about it, and fail at the second start without one."""
    if _start(directory) == 1:
        (directory / "exit.json").write_text(json.dumps({"code": RESUME}))
        return RESUME
    sys.stderr.write("the disk caught fire\n")
    return 1


def die_once(run, directory: Path) -> int:
    """Be killed at the first start, as by a machine without memory; finish at the second."""
    if _start(directory) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(run, directory)


def _start(directory: Path) -> int:
    """How often this run was started."""
    with (directory / "starts").open("a") as file:
        file.write("x")
    return len((directory / "starts").read_text())
