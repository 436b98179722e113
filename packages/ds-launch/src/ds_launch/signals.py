"""Signals as data in the supervisor's loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job; they are passed on to the ranks first."""

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are only passed on."""

_WATCHED = (*STOPPING, *FORWARDED, signal.SIGCHLD, signal.SIGWINCH, signal.SIGTSTP)


@contextmanager
def signal_pipe() -> Iterator[int]:
    """Yield a descriptor on which every watched signal arrives as one byte, its number.

    A signal that the launcher was started with ignored (``nohup``, a shell's background job)
    stays ignored. Handlers are put back at the end.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    before = {signum: signal.getsignal(signum) for signum in _WATCHED}
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN or signum == signal.SIGCHLD:
                signal.signal(signum, _only_wake)
        yield read_fd
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read_fd)
        os.close(write_fd)


def read_signals(read_fd: int) -> bytes:
    """Return the numbers of the signals that arrived since the last call, in order."""
    try:
        return os.read(read_fd, 4096)
    except BlockingIOError:
        return b""


def signal_name(signum: int) -> str:
    """Return ``SIGTERM`` and the like; real-time signals without a name as ``signal 40``."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the number has already been written to the pipe."""
