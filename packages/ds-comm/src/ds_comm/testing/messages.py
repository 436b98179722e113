"""What the pool says to its workers and its zygote, and back; one pickled object per message.

[Note: conversation of one call]

    pool -> worker   Task       form a process group
    worker -> pool   Formed | Failure
    pool -> worker   Go         load the function, call it
    worker -> pool   Success | Failure
    pool -> worker   Close      leave the process group
    worker -> pool   Closed     ready for the next task

``Go`` is sent when all ranks have formed the group: a rank that failed and hung up while another
still connects to it would leave that one waiting.  Groups are left only on ``Close``, so a rank
that returns early cannot cut a connection that a slower rank still reads from.  A rank that
failed is closed at once: its sockets go away and the peers that wait for it in a collective get
an error instead of a hang.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Close",
    "Closed",
    "End",
    "Failure",
    "Fork",
    "Formed",
    "Go",
    "Reply",
    "Request",
    "Success",
    "Task",
]


@dataclass(frozen=True)
class Task:
    """One call of one function on one rank."""

    rank: int
    world_size: int
    module: str
    """Name under which the function's module is known to the caller (for pickled classes)."""
    path: str
    """Source file of the module."""
    qualname: str
    payload: bytes
    """Pickled ``(args, kwargs)``; read after the module is loaded, since it may use its classes."""
    store_path: str
    """File of the rendezvous store, unique to this call."""
    master_port: int
    """A port that was free a moment ago, for functions that open a store of their own."""
    timeout_s: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Formed:
    """The process group stands."""


@dataclass(frozen=True)
class Go:
    """Every rank has formed the group: call the function."""


@dataclass(frozen=True)
class Close:
    """Leave the process group of the last task."""


@dataclass(frozen=True)
class Success:
    """The function returned."""

    payload: bytes
    """Pickled result."""


@dataclass(frozen=True)
class Failure:
    """The function raised, or its result could not be sent."""

    traceback: str
    summary: str
    """Last line of the traceback: type and message."""
    at_s: float
    """``time.monotonic()`` of the failure; one clock for all processes of a machine."""
    exception: bytes | None
    """Pickled exception where it survives a round trip."""
    skipped: str | None = None
    """Reason, when the function called ``pytest.skip``."""


@dataclass(frozen=True)
class Closed:
    """The worker has left its group and is idle."""


@dataclass(frozen=True)
class Fork:
    """Start a worker; two file descriptors follow: its channel and its log.  Reply: its pid."""


@dataclass(frozen=True)
class End:
    """Collect a worker, killing it if it is still there.  Reply: its exit status as in Popen."""

    pid: int
    patience_s: float
    """Seconds to wait for it to end by itself."""


Request = Task | Go | Close
Reply = Formed | Success | Failure | Closed
