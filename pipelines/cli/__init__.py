"""`dataworth`: the command line. Errors are one paragraph that says what to do; `--debug` shows the traceback."""

from pipelines.cli.app import main

__all__ = ["main"]
