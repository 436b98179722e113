"""A pool of persistent worker processes that run a function as the ranks of a process group.

Starting a process that imports torch costs seconds; forming a gloo group costs milliseconds.  So
the processes stay, and every call gets a fresh default group of exactly the ranks it asks for.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from ds_comm.testing.messages import Close, Closed, Failure, Formed, Go, Request, Success, Task
from ds_comm.testing.processes import Worker, Zygote

__all__ = ["RankError", "RankFailure", "RankPool"]

T = TypeVar("T")

_CLOSE_S = 10.0
# A crash is seen a little after the errors that it causes on its peers.
_CRASH_LEAD_S = 0.5


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank."""

    rank: int
    kind: Literal["raised", "crashed", "stuck"]
    """``stuck``: still running when the call was given up, for a hang or for another's failure."""
    summary: str
    """One line: type and message of the exception, or the exit status."""
    details: str
    """The traceback, or what the process last wrote and where it stood."""
    at_s: float
    exception: BaseException | None = None
    """The exception itself where it can be pickled."""
    skipped: str | None = None
    """Reason, when the function called ``pytest.skip``."""


class RankError(AssertionError):
    """A function failed on at least one rank; ``failures`` lists them, the cause first."""

    def __init__(self, title: str, failures: tuple[RankFailure, ...]) -> None:
        """Compose the message: the first failure in full, the others in a line each."""
        self.failures = failures
        first, others = failures[0], failures[1:]
        lines = [f"{title}: rank {first.rank} {first.kind}: {first.summary}", "", first.details]
        for other in others:
            lines.append(f"\nrank {other.rank} {other.kind}: {other.summary}")
            if other.kind == "stuck" and first.kind == "stuck":
                lines.append(other.details)
        super().__init__("\n".join(lines))


class RankPool:
    """Persistent ranks; usable as a context manager, with or without pytest.

    Processes start on first use.  Not thread-safe: one call at a time.
    """

    def __init__(
        self,
        max_ranks: int = 4,
        *,
        environ: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        echo: bool = True,
    ) -> None:
        """Describe the pool; no process is started yet.

        Args:
            max_ranks: largest world size that may be asked for.
            environ: environment of the workers; the caller's at this moment if not given.
            grace_s: seconds that the other ranks get to finish after one has failed.
            echo: write the output of the ranks to ``sys.stdout``, each line with its rank.
        """
        self.max_ranks = max_ranks
        self._grace_s = grace_s
        self._echo = echo
        self._environ = dict(os.environ if environ is None else environ)
        self._zygote: Zygote | None = None
        self._workers: dict[int, Worker] = {}
        self._folder: Path | None = None
        self._calls = 0

    def __enter__(self) -> RankPool:
        """Return the pool itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the pool."""
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the live workers, by rank."""
        return tuple(self._workers[slot].pid for slot in sorted(self._workers))

    def run(
        self,
        world_size: int,
        function: Callable[..., T],
        *args: object,
        timeout: float = 120.0,
        **kwargs: object,
    ) -> list[T]:
        """Run ``function(*args, **kwargs)`` on ``world_size`` ranks of a fresh gloo group.

        Args:
            world_size: number of ranks, 1 to ``max_ranks``.
            function: found by its file and qualified name in the worker, so it must be reachable
                from module level (no lambda, no nested function).
            args: positional arguments, pickled once, the same on every rank.
            timeout: seconds for the whole call.
            kwargs: keyword arguments, pickled like ``args``.

        Returns:
            The results in rank order.

        Raises:
            RankError: a rank raised, crashed or did not finish in time.
            ValueError: the world size or the function cannot be used.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(
                f"world_size {world_size} is not possible: the pool holds 1 to "
                f"{self.max_ranks} ranks"
            )
        module, path, qualname = _locate(function)
        payload = pickle.dumps((args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        folder = self._start(world_size)
        self._calls += 1
        store = folder / f"store{self._calls}"
        port = _free_port()
        members = {rank: self._workers[rank] for rank in range(world_size)}
        call = _Call(members, self._grace_s)
        try:
            for rank in members:
                call.send(
                    rank,
                    Task(
                        rank=rank,
                        world_size=world_size,
                        module=module,
                        path=path,
                        qualname=qualname,
                        payload=payload,
                        store_path=str(store),
                        master_port=port,
                        timeout_s=timeout,
                        sys_path=tuple(sys.path),
                    ),
                )
            call.collect(timeout)
        finally:
            # Reached by Ctrl-C too: whoever has not said Closed is in an unknown state.
            for rank in call.unfinished:
                self._workers.pop(rank).end(patience_s=0.0)
            store.unlink(missing_ok=True)
            if self._echo:
                _echo(members)
        if call.failures:
            title = f"{qualname} on {world_size} rank{'s' if world_size > 1 else ''}"
            ordered = tuple(sorted(call.failures, key=_cause_first))
            raise RankError(title, ordered) from ordered[0].exception
        return [pickle.loads(call.results[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """End all workers; the pool can be used again afterwards."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, world_size: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ds-ranks-"))
        if self._zygote is not None and not self._zygote.alive:
            self.close()
            return self._start(world_size)
        if self._zygote is None:
            self._zygote = Zygote(self._environ)
        for slot in range(world_size):
            if slot in self._workers and not self._workers[slot].alive:
                self._workers.pop(slot).end()
            if slot not in self._workers:
                self._workers[slot] = Worker(self._zygote, self._folder)
        return self._folder


class _Call:
    """The pool's side of one call: who has answered what.

    See [Note: conversation of one call] in ``messages``.
    """

    def __init__(self, members: Mapping[int, Worker], grace_s: float) -> None:
        self.results: dict[int, bytes] = {}
        self.failures: list[RankFailure] = []
        self.unfinished = set(members)
        """Ranks that have not said ``Closed``."""
        self._running = set(members)
        self._forming = set(members)
        self._closing: set[int] = set()
        self._members = members
        self._grace_s = grace_s
        self._ranks = {worker.channel: rank for rank, worker in members.items()}

    def send(self, rank: int, message: Request) -> None:
        """Send to one rank; a dead one is noticed when its answer is awaited."""
        with contextlib.suppress(ConnectionError):
            self._members[rank].channel.send(message)

    def collect(self, timeout_s: float) -> None:
        """Wait until every rank has answered and left its group; give up on those that do not."""
        deadline = time.monotonic() + timeout_s
        while self._running:
            end = deadline
            if self.failures:
                end = min(deadline, self.failures[0].at_s + self._grace_s)
            if not self._receive(end):
                self._give_up(timeout_s)
        for rank in self.results:
            self._close(rank)
        deadline = time.monotonic() + _CLOSE_S
        while self._closing and self._receive(deadline):
            pass

    def _close(self, rank: int) -> None:
        self._closing.add(rank)
        self.send(rank, Close())

    def _receive(self, deadline: float) -> bool:
        """Handle what has arrived, waiting for the first; False when the deadline came first."""
        live = self._running | self._closing
        channels = [self._members[rank].channel for rank in live]
        ready = wait(channels, max(0.0, deadline - time.monotonic()))
        for channel in ready:
            assert isinstance(channel, Connection)
            rank = self._ranks[channel]
            try:
                message = channel.recv()
            except (EOFError, ConnectionError):
                self._crashed(rank)
                continue
            if isinstance(message, Success):
                self._running.discard(rank)
                self.results[rank] = message.payload
            elif isinstance(message, Formed):
                self._formed(rank)
            elif isinstance(message, Failure):
                self._running.discard(rank)
                self.failures.append(_raised(rank, message))
                # Peers may wait for this rank in a collective: let it hang up at once.
                self._close(rank)
            elif isinstance(message, Closed):
                self._closing.discard(rank)
                self.unfinished.discard(rank)
        return bool(ready)

    def _formed(self, rank: int) -> None:
        self._forming.discard(rank)
        if not self._forming:
            for member in self._members:
                self.send(member, Go())

    def _crashed(self, rank: int) -> None:
        worker = self._members[rank]
        was_running = rank in self._running
        self._running.discard(rank)
        self._closing.discard(rank)
        if was_running:
            self.failures.append(
                RankFailure(
                    rank=rank,
                    kind="crashed",
                    summary=_exit_text(worker.end()),
                    details=worker.output(tail=True) or "(it wrote nothing)",
                    at_s=time.monotonic() - _CRASH_LEAD_S,
                )
            )

    def _give_up(self, timeout_s: float) -> None:
        reason = f"still running when another rank had failed for {self._grace_s:g} s"
        if not self.failures:
            reason = f"still running after the time-out of {timeout_s:g} s"
        for rank in sorted(self._running):
            stacks = self._members[rank].stacks()
            self.failures.append(
                RankFailure(
                    rank, "stuck", reason, stacks or "(it does not say where)", time.monotonic()
                )
            )
        self._running.clear()


def _echo(members: Mapping[int, Worker]) -> None:
    for rank, worker in members.items():
        for line in worker.output().splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")


def _raised(rank: int, failure: Failure) -> RankFailure:
    exception = None if failure.exception is None else pickle.loads(failure.exception)
    return RankFailure(
        rank=rank,
        kind="raised",
        summary=failure.summary,
        details=failure.traceback,
        at_s=failure.at_s,
        exception=exception,
        skipped=failure.skipped,
    )


def _cause_first(failure: RankFailure) -> tuple[bool, float, int]:
    return (failure.kind == "stuck", failure.at_s, failure.rank)


def _exit_text(status: int | None) -> str:
    if status is None:
        return "its parent process was gone"
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _locate(function: Callable[..., object]) -> tuple[str, str, str]:
    """Return (module name, source file, qualified name) by which a worker finds the function."""
    qualname = function.__qualname__
    source = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if "<" in qualname or source is None:
        raise ValueError(
            f"{function.__module__}.{qualname} cannot be found by a worker: "
            "define it at module level in a source file"
        )
    main = function.__module__ == "__main__"
    return "__ranks_main__" if main else function.__module__, os.path.realpath(source), qualname


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
