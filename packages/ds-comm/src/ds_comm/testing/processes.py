"""The pool's handles of its processes: one zygote, and the workers forked from it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

from ds_comm.testing.messages import End, Fork

__all__ = ["Worker", "Zygote"]

_TAIL_CHARS = 4000
_STACKS_S = 3.0
_EXIT_S = 2.0


class Zygote:
    """The process that forks workers; see ``ds_comm.testing.zygote``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start it with the environment that all workers get; does not wait for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ds_comm.testing.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environ(environ),
            )
        self._control = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def fork(self, channel: socket.socket, log_fd: int) -> int:
        """Return the pid of a new worker that serves ``channel`` and writes into ``log_fd``."""
        try:
            self._control.send(Fork())
            for fd in (channel.fileno(), log_fd):
                send_handle(self._control, fd, self._process.pid)
            pid: int = self._control.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"the process that forks workers ended with status {self._process.wait()}; "
                "its own message is on stderr"
            ) from error
        return pid

    def end(self, pid: int, patience_s: float) -> int | None:
        """Return the exit status of a worker, killed if it does not end in ``patience_s``.

        None if this process itself is gone: the workers then end by themselves.
        """
        try:
            self._control.send(End(pid, patience_s))
            status: int = self._control.recv()
        except (EOFError, ConnectionError):
            return None
        return status

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class Worker:
    """One worker process, its channel, and the file that takes its output."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        """Fork it."""
        self._zygote = zygote
        self._log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self._position = 0
        self._ended = False
        self._status: int | None = None
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("wb") as log:
            self.pid = zygote.fork(theirs, log.fileno())
        self.channel = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether an idle worker still listens: it says nothing unasked, so news is its end."""
        return not self._ended and not self.channel.poll()

    def output(self, *, tail: bool = False) -> str:
        """Return what was written since the last call, or with ``tail`` only its end."""
        with self._log_path.open("rb") as log:
            log.seek(self._position)
            data = log.read()
        self._position += len(data)
        text = data.decode(errors="replace")
        return text[-_TAIL_CHARS:].rstrip() if tail else text

    def stacks(self) -> str:
        """Ask a busy worker where it stands; return that, after what else it has written."""
        before = self.output(tail=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        dump = ""
        while "_serve" not in dump and time.monotonic() < deadline:
            time.sleep(0.02)
            dump += self.output()
        return f"{before}\n{dump}".strip()

    def end(self, *, patience_s: float = _EXIT_S) -> int | None:
        """Make sure that the process is gone; return its exit status where it is known.

        An idle worker ends when its channel closes; a busy one is killed after ``patience_s``.
        """
        if not self._ended:
            self._ended = True
            self.channel.close()
            self._status = self._zygote.end(self.pid, patience_s)
        return self._status


def _environ(base: Mapping[str, str]) -> dict[str, str]:
    """Environment for workers: one thread each, loopback only, on the CPU unless asked."""
    environ = dict(base)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environ.pop(name, None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ[name] = "1"  # also what keeps the zygote single-threaded
    environ["PYTHONUNBUFFERED"] = "1"
    environ.setdefault("DS_ACCELERATOR", "cpu")
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return environ
