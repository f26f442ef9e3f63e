"""Figures that others can check: one JSON line per name in `bench.jsonl` and `accept.jsonl`, the latest kept.

Every line names the command that recomputes it, the commit, the hardware, versions, seeds, n and spread.
"""

import json
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def git(*arguments):
    """Output of a git command, or an empty text outside of a repository."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def dirty():
    """Whether anything but the figures themselves differs from the commit: the first line of a study changes the file of the second."""
    own = (f":(top,exclude)tests/benchmarks/{file}.jsonl" for file in ("bench", "accept"))
    return bool(git("status", "--porcelain", "--", ":/", *own))


def hardware():
    """Processor and cores, in words."""
    import os

    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        if info.exists()
        else []
    )
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU"
    )


def record(file, name, *, packages=(), **figure):
    """Write a figure's line in place of the last one of that name, and print it.

    Args:
        file: `bench.jsonl` or `accept.jsonl`.
        name: begins with the area, such as `trainer.`.
        packages: packages whose versions the figure depends on.
        figure: what, unit, kind, bar, holds, n, spread, seeds, command, note and the numbers.
    """
    path = HERE / file
    line = {
        "name": name, "commit": git("rev-parse", "--short=12", "HEAD") or "none", "dirty": dirty(),
        "hardware": hardware(), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {package: version(package) for package in packages} | {"python": platform.python_version()}, **figure,
    }  # fmt: skip
    kept = [
        text
        for text in (path.read_text().splitlines() if path.exists() else [])
        if json.loads(text)["name"] != name
    ]
    path.write_text("".join(text + "\n" for text in [*kept, json.dumps(line, sort_keys=True)]))
    print(name, json.dumps(figure, sort_keys=True))  # noqa: T201 - this program's output
