"""A watching process that ends the ranks when the launcher itself is killed.

SIGKILL (or the kernel's out-of-memory killer) leaves a launcher no time to clean up. The keeper
is a fork of it, in a session of its own, that reads a pipe which only the launcher holds open:
the pipe's end without the word ``done`` means that the launcher died, and the keeper ends what the
job started, data-loader workers included (a parent-death signal would reach the ranks alone).

Every rank writes its pid into the pipe between fork and exec, so there is no moment at which a
rank exists that the keeper cannot learn of.
"""

from __future__ import annotations

import os
import signal

from ds_launch.processes import end_processes

_GRACE_S = 3.0
_DONE = b"done"
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Keeper:
    """The launcher's side of the keeper.

    Attributes:
        register_fd: Where each rank writes its pid and a newline; closed by exec.
    """

    def __init__(self, pid: int, register_fd: int) -> None:
        self._pid = pid
        self.register_fd = register_fd

    @classmethod
    def start(cls, run_id: str) -> Keeper:
        """Fork the keeper of the job with this mark. The caller must have a single thread."""
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid:
            os.close(read_fd)
            return cls(pid, write_fd)
        try:
            os.close(write_fd)
            _watch(read_fd, run_id)
        finally:
            os._exit(0)

    def dismiss(self) -> None:
        """Say that the job is over and wait for the keeper to end."""
        try:
            os.write(self.register_fd, _DONE)
        except BrokenPipeError:  # somebody killed the keeper; nothing depends on it any more
            pass
        os.close(self.register_fd)
        os.waitpid(self._pid, 0)


def _watch(read_fd: int, run_id: str) -> None:
    """Wait for the end of the pipe; end the job unless it was dismissed."""
    os.setsid()
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    # Readers of the launcher's output must not wait for this process.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    received = b""
    while chunk := os.read(read_fd, 4096):
        received += chunk
    if not received.endswith(_DONE):
        end_processes([int(pid) for pid in received.split()], run_id, grace_s=_GRACE_S)
