"""`python -m trainer --run DIR/run.json`, alone or under torchrun: the one way a run is started.

Under torchrun write `torchrun ... -m trainer DIR/run.json` or `torchrun ... -m -- trainer --run DIR/run.json`:
torchrun takes a bare `--run` for an abbreviation of its own `--run-path` and refuses it.

It reads the run, imports its entry `module:function` and calls it with (run, directory); so packages above the
trainer bring their own losses, and the trainer imports none of them. The exit code is the entry's; input that is
refused gives one line and 3. An error without a class of its own (a bare ValueError) is a defect, not refused input,
and keeps its traceback.
"""

from __future__ import annotations

from trainer.parent import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()  # before torch is imported, which takes seconds

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainer.errors import EXIT_REFUSED, SpecError, TrainerError, exit_code
from trainer.mesh import environment_rank
from trainer.spec import load_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer.spec import RunSpec

    Entry = Callable[[RunSpec, Path], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a run.

    Args:
        arguments: command line without the program's name; None = that of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Start or go on with a run."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "path", type=Path, nargs="?", metavar="DIR/run.json", help="specification of the run"
    )
    where.add_argument("--run", type=Path, metavar="DIR/run.json", help="the same, as an option")
    given = parser.parse_args(arguments)
    path = (given.run or given.path).absolute()
    directory = path if path.is_dir() else path.parent
    try:
        run = load_run(path)
        return load_entry(run.entry)(run, directory)
    except (TrainerError, ValueError) as error:
        if type(error) is ValueError:
            raise
        code = exit_code(error) if isinstance(error, TrainerError) else EXIT_REFUSED
        if environment_rank() == getattr(error, "speaker", 0):
            _report(directory, code, f"{type(error).__name__}: {error}")
        return code


def load_entry(entry: str) -> Entry:
    """The function that a run names.

    Args:
        entry: "module:function".

    Returns:
        The function.

    Raises:
        SpecError: no such module or function.
    """
    module_name, _, name = entry.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the entry is there, something that it needs is not
        raise SpecError(f"entry: no module {module_name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(f"entry: no function {name!r} in module {module_name!r}")
    return cast("Entry", function)


def _report(directory: Path, code: int, reason: str) -> None:
    """One line for people, one file for the launcher."""
    from trainer.journal import write_exit

    line = " ".join(reason.split())
    sys.stderr.write(f"refused: {line}\n" if code == EXIT_REFUSED else f"stopped: {line}\n")
    if directory.is_dir():
        write_exit(directory, code, line)


if __name__ == "__main__":
    sys.exit(main())
