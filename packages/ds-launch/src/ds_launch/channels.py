"""Channels from a rank to the launcher: pipes, or a pseudo-terminal for what draws on one."""

from __future__ import annotations

import fcntl
import os
import termios
from typing import NamedTuple

_OUTPUT_FLAGS = 1  # index into the list of termios.tcgetattr
_WINSIZE_BYTES = 8  # struct winsize: four unsigned shorts


class Channel(NamedTuple):
    """A one-way channel.

    Attributes:
        read_fd: The launcher's end.
        write_fd: The rank's end, closed here once the rank has started.
        is_terminal: Whether the rank sees a terminal.
    """

    read_fd: int
    write_fd: int
    is_terminal: bool


def open_channel(terminal_fd: int | None) -> Channel:
    """Return a pipe, or a pseudo-terminal as wide and high as the terminal ``terminal_fd``.

    Progress bars and colours look at the stream they write to; behind a pipe they would fall back
    to their poorest form. The pseudo-terminal passes bytes on unchanged (no output processing).
    """
    if terminal_fd is None:
        read_fd, write_fd = os.pipe()
        return Channel(read_fd, write_fd, False)
    read_fd, write_fd = os.openpty()
    attributes = termios.tcgetattr(write_fd)
    attributes[_OUTPUT_FLAGS] &= ~termios.OPOST
    termios.tcsetattr(write_fd, termios.TCSANOW, attributes)
    copy_window_size(terminal_fd, read_fd)
    return Channel(read_fd, write_fd, True)


def copy_window_size(source_fd: int, target_fd: int) -> None:
    """Give the pseudo-terminal ``target_fd`` the size of the terminal ``source_fd``."""
    size = fcntl.ioctl(source_fd, termios.TIOCGWINSZ, bytes(_WINSIZE_BYTES))
    fcntl.ioctl(target_fd, termios.TIOCSWINSZ, size)


def read_channel(read_fd: int, size_bytes: int) -> bytes:
    """Read from a channel that polls readable; ``b""`` means that it has ended."""
    try:
        return os.read(read_fd, size_bytes)
    except OSError:  # EIO: nobody holds the other end of the pseudo-terminal any more
        return b""
