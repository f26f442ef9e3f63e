r"""Start runs of one process from a process that has imported everything already.

Importing torch and its checkpoint code takes about three seconds; a small run trains for less than one. The server
imports once and forks: a run then starts in hundredths of a second, in a process of its own with its own log, and
does to the bit what `python -m trainer --run DIR/run.json` does.

    python -m trainer.forkserver --socket PATH --parent PID [--preload MODULE ...]

    client -> server   "DIR/run.json\\n", and with it the descriptor of the log
    run -> client      "PID\\n" when it starts, "EXITCODE\\n" when it ends; end of file without a code: it was killed

A run holds the connection, so whichever side dies, the other sees it end: a run whose client is gone gets SIGTERM,
checkpoints and leaves. The server runs nothing of torch itself, since thread pools and their locks do not survive a
fork (the one thread that its imports start is jemalloc's, which knows forks). POSIX only; where there is no server a run starts the ordinary way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.parent import die_with

if TYPE_CHECKING:
    from collections.abc import Sequence

PRELOAD = ("trainer.loop", "torch.distributed.checkpoint")
"""What every run needs."""
_LINE = 65_536  # longer than any path


class ForkedRun:
    """A run that the server started; has the part of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, address: Path, run_file: Path, log: int) -> None:
        """Ask for a run and wait until it is there.

        Args:
            address: the server's socket.
            run_file: absolute path of `run.json`.
            log: descriptor that receives the run's output.

        Raises:
            OSError: no server listens there, or it died.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        said = b""
        try:
            self._socket.connect(str(address))
            socket.send_fds(self._socket, [f"{run_file}\n".encode()], [log])
            while b"\n" not in said:
                received = self._socket.recv(64)
                if not received:
                    raise ConnectionResetError(f"the fork server at {address} ended")
                said += received
        except OSError:
            self._socket.close()
            raise
        first, self._answer = said.split(b"\n", 1)
        self.pid = int(first)
        self.returncode: int | None = None
        self._socket.settimeout(0.0)

    def poll(self) -> int | None:
        """The exit code, or None while the run goes on; -9 for one that was killed."""
        while self.returncode is None:
            try:
                received = self._socket.recv(64)
            except BlockingIOError:
                return None
            self._answer += received
            if not received:
                self.returncode = int(self._answer or b"-9")
                self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the run; one that has ended is left alone."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve(address: Path, preload: Sequence[str] = ()) -> None:
    """Import, then fork a process per request until a signal ends the server.

    Args:
        address: socket to make; clients may connect while the imports are still going on.
        preload: further modules to import, such as the entries that runs will name.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen()
        for module in (*PRELOAD, *preload):
            import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the client has the code
        while True:
            connection, _ = listener.accept()
            with connection:
                message, descriptors, _, _ = socket.recv_fds(connection, _LINE, 1)
                if not message.endswith(b"\n") or not descriptors:
                    continue  # a client that died while it asked
                server = os.getpid()
                if os.fork() == 0:
                    listener.close()
                    _become_run(connection, Path(message.decode().strip()), descriptors[0], server)
                os.close(descriptors[0])


def _become_run(connection: socket.socket, run_file: Path, log: int, server: int) -> None:
    """The forked half: the run from its first line to its exit code; never returns."""
    from trainer.__main__ import main

    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(server, signal.SIGTERM)
        for number in (1, 2):
            os.dup2(log, number)
        connection.sendall(f"{os.getpid()}\n".encode())
        threading.Thread(target=_leave_with_client, args=(connection,), daemon=True).start()
        code = main(["--run", str(run_file)])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        with contextlib.suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        os._exit(code)


def _leave_with_client(connection: socket.socket) -> None:
    """Ask this process to stop once its client is gone: the client sends nothing more, so any end of the wait is that."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Entry of the server process."""
    parser = argparse.ArgumentParser(prog="python -m trainer.forkserver", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="socket to listen on")
    parser.add_argument("--parent", type=int, required=True, help="process whose end ends this one")
    parser.add_argument("--preload", nargs="*", default=(), metavar="MODULE")
    given = parser.parse_args()
    die_with(given.parent, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the runs; the parent ends us
    signal.signal(signal.SIGTERM, partial(_leave, os.getpid(), given.socket))
    serve(given.socket, given.preload)


def _leave(server: int, address: Path, *_: object) -> None:
    """Tidy up and end, also after the parent was killed, which then can't; a run that has just been forked only ends.

    Not by an exception: one that is raised while a module is imported may be caught there, and the server would stay.
    """
    if os.getpid() == server:
        address.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            address.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
