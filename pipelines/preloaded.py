"""The preloaded trainer of this process: `trainer.forkserver`, started with the first work that a graph run does.

A graph run starts the trainer seven times and more, and the imports of each start would cost three seconds. One server
per Dagster process that executes steps imports them once, while the corpus is still being read. Only the in-process
executor has one: under the multiprocess executor a step lives in a process of its own and starts at most a few runs.
"""

import atexit
import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pipelines.settings import child_environment, read_settings

ENTRIES = (
    "valuation.inrun",
    "valuation.influence.attribution",
    "valuation.judging",
    "valuation.proxy",
    "unlearning.audit",
    "unlearning.methods.npo",
    "pipelines.evaluate",
)
"""Modules of the runs' entries."""

PREFIX, SOCKET = "dataworth-", "trainer"
"""Of the folder that a server's socket has to itself, and the socket."""

YOUNG_S = 60.0
END_S = 10.0
"""How long the server may take to end before it is killed."""

_server: tuple[subprocess.Popen, Path] | None = None


def begin() -> None:
    """Start the server if this process should have one and has none; returns at once, the imports go on beside us."""
    global _server  # noqa: PLW0603 - one server per process is the point
    settings = read_settings()
    if settings.executor != "in_process" or not hasattr(os, "fork") or option():
        return
    # A socket's path must be short, a home's may not be.
    sweep(Path(tempfile.gettempdir()))
    address = Path(tempfile.mkdtemp(prefix=PREFIX)) / SOCKET
    process = subprocess.Popen(
        [
            sys.executable, "-m", "trainer.forkserver", "--socket", str(address), "--parent", str(os.getpid()),
            "--preload", *ENTRIES,
        ],
        env=child_environment(settings.threads), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if _server is None:
        atexit.register(end)
    _server = process, address


def option() -> list[str]:
    """The option of `pipelines.launch` that names the server; empty without a living one."""
    if _server is None or _server[0].poll() is not None or not _server[1].exists():
        return []
    return ["--server", str(_server[1])]


def end() -> None:
    """Stop the server; runs that it started are told to stop by the kernel."""
    global _server  # noqa: PLW0603
    if _server is not None:
        process, address = _server
        process.terminate()  # it removes its socket and the folder around it
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _remove(address)  # one that was told to end before it could listen, or was killed, did not
        _server = None


def sweep(folder: Path) -> None:
    """Remove the sockets of servers that were killed together with their parents: those of ours on which nobody listens.

    Asking the socket, not a process id, is right across containers that share the folder, and after an id was given anew. What is
    younger than a minute is left alone: its server may have made it and not listen yet.

    Args:
        folder: Where `tempfile` makes its folders.
    """
    for address in folder.glob(f"{PREFIX}*/{SOCKET}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            made = address.lstat()
            if (
                not stat.S_ISSOCK(made.st_mode)
                or made.st_uid != os.getuid()
                or time.time() - made.st_mtime < YOUNG_S
            ):
                continue
            asking.setblocking(False)  # noqa: FBT003 - a busy server must not hold us up
            if asking.connect_ex(str(address)) == errno.ECONNREFUSED:
                _remove(address)


def _remove(address: Path) -> None:
    """A socket, and its folder where nothing else is in it."""
    address.unlink(missing_ok=True)
    with suppress(OSError):
        address.parent.rmdir()
