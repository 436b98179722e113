"""Bring the output of ranks to the launcher's own streams: whole lines, named, never blocking.

A *sink* is one destination (standard output and standard error are one when they lead to the same
terminal, pipe or file). A *feed* turns what one rank writes on one of its streams into text for a
sink. Both only hold bytes: the supervisor's loop does all reading and waiting, so a reader that
pauses (``| less``) can delay the ranks but never the handling of a signal or a failure.
"""

from __future__ import annotations

import os
import select

_PIPE_CHUNK = select.PIPE_BUF  # a pipe that polls writable takes this much without blocking
_FLUSH_BYTES = 1 << 16
_FULL_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_LINE_PAUSE_S = 0.05
_TAIL_BYTES = 1 << 15
_ERASE_LINE = b"\r\x1b[K"


class Sink:
    """One destination with a queue, which knows whose unfinished line is on it.

    Attributes:
        fd: File descriptor of the destination.
        problem: Why nothing can be written any more (its reader has gone), or ``""``.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.problem = ""
        self.is_terminal = os.isatty(fd)
        self._queue = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._line_owner: object = None
        self._line_is_progress = False

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Whether so much waits that the ranks should not be read for now."""
        return len(self._queue) >= _FULL_BYTES

    def write(self, owner: object, tag: bytes, text: bytes) -> None:
        """Queue text of one owner, each of its lines behind ``tag``.

        An unfinished line of another owner is ended first; on a terminal a progress bar is
        erased instead, because its owner will draw it again.
        """
        if self.problem:
            return
        if self._line_owner is not None and self._line_owner is not owner:
            erase = self.is_terminal and self._line_is_progress
            self._queue += _ERASE_LINE if erase else b"\n"
            self._line_owner = None
        start = 0
        if self._line_owner is None:
            self._line_is_progress = False
        else:  # the owner goes on with its line
            start = text.find(b"\n") + 1 or len(text)
            self._queue += text[:start]
        rest = text[start:]
        if rest:
            ended = rest.endswith(b"\n")
            body = rest[:-1] if ended else rest
            self._queue += tag + (body.replace(b"\n", b"\n" + tag) if tag else body)
            self._queue += b"\n" if ended else b""
        last_line = text[text.rfind(b"\n") + 1 :]
        self._line_owner = owner if last_line else None
        self._line_is_progress |= b"\r" in last_line

    def wait(self) -> None:
        """Wait until the destination takes something."""
        self._poll.poll()

    def flush_some(self) -> None:
        """Write what the destination takes without blocking; call it when it polls writable."""
        written = 0
        try:
            while written < _FLUSH_BYTES and written < len(self._queue) and self._poll.poll(0):
                written += os.write(self.fd, self._queue[written : written + _PIPE_CHUNK])
        except BlockingIOError:  # the descriptor was made non-blocking by somebody else
            pass
        except OSError as error:  # its reader is gone, the terminal was closed, the disk is full
            self.problem = error.strerror or str(error)
            self._queue.clear()
        del self._queue[:written]


class Feed:
    """One stream of one rank on its way to a sink.

    A *live* feed passes everything on at once, except that the start of a line waits up to 50 ms
    for its end, so that lines of other ranks do not cut it in two; text behind a carriage return
    (a progress bar) never waits. Any other feed passes on whole lines, each as a terminal would
    show it in the end: of a line redrawn with carriage returns only the last state.

    Attributes:
        rank: Whose stream it is.
        sink: Where it goes.
        muted: Whether it is kept from the sink (a log still gets them).
        tail: The last bytes of the stream, for the report of a failure.
    """

    def __init__(
        self, sink: Sink, *, rank: int, tag: bytes, live: bool, log: RankLog | None
    ) -> None:
        self.rank = rank
        self.sink = sink
        self.muted = False
        self.tail = bytearray()
        self._tag = tag
        self._live = live
        self._log = log
        self._line = bytearray()
        self._line_since_s = 0.0

    def take(self, data: bytes, now_s: float) -> None:
        """Accept bytes that the rank wrote, read at the monotonic time ``now_s``."""
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        if self._log is not None:
            self._log.write(data)
        if not self._line:
            self._line_since_s = now_s
        # What waits holds no newline: looking only at the new bytes keeps a long wait cheap.
        newline = data.rfind(b"\n")
        self._line += data
        if newline >= 0:
            self._emit(len(self._line) - len(data) + newline + 1)
            self._line_since_s = now_s
        if not self._live and len(self._line) > _LINE_BYTES:
            del self._line[: self._line.rfind(b"\r") + 1]  # states that were drawn over
        if self._live and b"\r" in self._line or len(self._line) > _LINE_BYTES:
            self._emit(len(self._line))

    def due_s(self) -> float | None:
        """Return the monotonic time at which :meth:`tick` should be called, if any."""
        return self._line_since_s + _LINE_PAUSE_S if self._live and self._line else None

    def tick(self, now_s: float) -> None:
        """Pass on the start of a line that has waited long enough."""
        due_s = self.due_s()
        if due_s is not None and now_s >= due_s:
            self._emit(len(self._line))

    def finish(self) -> None:
        """Pass on what is left; the stream has ended."""
        if self._line:
            if not self._live:
                self._line += b"\n"
            self._emit(len(self._line))

    def _emit(self, end: int) -> None:
        text = bytes(self._line[:end])
        del self._line[:end]
        if not self.muted:
            shown = text if self._live else b"".join(final_state(line) for line in _lines(text))
            self.sink.write(self.rank, self._tag, shown)


class RankLog:
    """The log file of one rank: both of its streams, byte for byte, in order of arrival.

    Attributes:
        path: Where it is.
        problem: Why writing stopped, or ``""``: a full disk ends the log, not the job.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view and not self.problem:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.problem = error.strerror or str(error)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Console:
    """The launcher's own standard output and error.

    Attributes:
        out: Sink of standard output.
        err: Sink of standard error; the same object when both lead to one file, and then each
            rank gets one channel for both, which keeps the order in which it wrote.
    """

    def __init__(self) -> None:
        first, second = os.fstat(1), os.fstat(2)
        same = (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
        self.out = Sink(1)
        self.err = self.out if same else Sink(2)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The distinct sinks."""
        return (self.out,) if self.out is self.err else (self.out, self.err)

    def say(self, text: str) -> None:
        """Queue lines of the launcher itself for standard error."""
        self.err.write(self, b"", text.encode("utf-8", "surrogateescape"))

    def flush(self) -> None:
        """Write all that waits, however long its readers take."""
        for sink in self.sinks:
            while sink.pending:
                sink.wait()
                sink.flush_some()


def _lines(text: bytes) -> list[bytes]:
    """Split after each newline (``bytes.splitlines`` would also split at carriage returns)."""
    parts = text.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def final_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line once it has been redrawn at carriage returns."""
    if b"\r" not in line:
        return line
    body = line.rstrip(b"\r\n")
    end = b"\n" if line.endswith(b"\n") else b""
    return body.rpartition(b"\r")[2] + end
