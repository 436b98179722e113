"""How a job ended, its exit status, and what is said about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from ds_launch.output import final_state
from ds_launch.processes import Leftover
from ds_launch.signals import signal_name

_TAIL_LINES = 40
_TAIL_LINE_BYTES = 2000


class Failure(NamedTuple):
    """A rank that ended by itself with anything but success.

    Attributes:
        rank: Its global rank.
        pid: Its process number.
        status: Exit status, or minus the number of the signal that ended it.
        tail: The last bytes that it wrote on standard error (with standard output, where both go
            to one place); empty when it wrote to the launcher's own streams.
        log: Path of its log, or ``None``.
    """

    rank: int
    pid: int
    status: int
    tail: bytes
    log: str | None


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        num_ranks: Its ranks.
        failures: The failed ranks, the first failure first; empty when a signal came before.
        killed: Ranks that had to be killed because they outlived the grace.
        signum: Signal to the launcher that ended the job, if one did.
        output_problem: Why the job was ended for want of a place to write to, or ``""``.
        leftovers: Processes that ranks had left behind when the last of them exited.
        log_problems: Logs that could not be completed, with the reason.
    """

    num_ranks: int
    failures: tuple[Failure, ...] = ()
    killed: tuple[int, ...] = ()
    signum: int | None = None
    output_problem: str = ""
    leftovers: tuple[Leftover, ...] = ()
    log_problems: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """What ``ds run`` exits with: 0, the first failed rank's status, or 128 + a signal."""
        if self.failures:
            status = self.failures[0].status
            return status if status >= 0 else 128 - status
        if self.output_problem:
            return 128 + signal.SIGPIPE
        return 128 + self.signum if self.signum is not None else 0


def describe_status(status: int) -> str:
    """Say how a process ended: ``exit status 3``, ``signal SIGSEGV``."""
    if status >= 0:
        return f"exit status {status}"
    hint = " (often the kernel, for want of memory)" if -status == signal.SIGKILL else ""
    return f"signal {signal_name(-status).removeprefix('signal ')}{hint}"


def describe_outcome(outcome: Outcome) -> str:
    """Return the lines for the end of a job, ``""`` when there is nothing to say.

    The rank that failed first comes first, with the end of its own output.
    """
    parts = []
    if outcome.failures:
        parts.append(_describe_failures(outcome))
    if outcome.output_problem:
        parts.append(f"the job was ended: its output cannot be written ({outcome.output_problem})")
    if outcome.signum is not None:
        parts.append(f"ended by {signal_name(outcome.signum)}")
    if outcome.killed:
        parts.append(f"{_ranks(outcome.killed)} did not end when asked and had to be killed")
    if outcome.leftovers:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in outcome.leftovers)
        parts.append(f"ended what the ranks had left running: {names}")
    parts.extend(outcome.log_problems)
    return "".join(f"ds run: {part}\n" for part in parts)


def _describe_failures(outcome: Outcome) -> str:
    first, *others = outcome.failures
    text = ""
    if outcome.num_ranks > 1 and (lines := _last_lines(first.tail)):
        text += f"the last that rank {first.rank} wrote:\n{lines}ds run: "
    of = f" of {outcome.num_ranks}" if outcome.num_ranks > 1 else ""
    text += f"rank {first.rank}{of} failed: {describe_status(first.status)} (pid {first.pid})"
    if outcome.num_ranks > 1:
        text += "; the other ranks were ended"
    if others:
        also = ", ".join(f"rank {other.rank} ({describe_status(other.status)})" for other in others)
        text += f"; also failed: {also}"
    if first.log is not None:
        text += f"; its log: {first.log}"
    return text


def _last_lines(tail: bytes) -> str:
    """Return the last lines of a rank, indented, each as a terminal would show it."""
    shown = [final_state(line)[:_TAIL_LINE_BYTES] for line in tail.split(b"\n")]
    while shown and not shown[-1].strip():
        shown.pop()
    text = b"".join(b"    " + line + b"\n" for line in shown[-_TAIL_LINES:])
    return text.decode("utf-8", "surrogateescape")


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
