"""Run the ranks of one machine to their end: one loop, one thread.

The loop waits for output of ranks, for room on the launcher's own streams, and for signals, of
which SIGCHLD is one. The first rank that fails, or a signal to the launcher, begins the *stop*:
every rank's process group is asked to end and, when the grace is over, killed. When all ranks have
exited, whatever else the job started is ended too.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_launch.channels import Channel, copy_window_size, open_channel, read_channel
from ds_launch.errors import LaunchError
from ds_launch.keeper import Keeper
from ds_launch.outcome import Failure, Outcome
from ds_launch.output import Console, Feed, RankLog, Sink
from ds_launch.plan import RUN_ID, RankPlan
from ds_launch.processes import Leftover, RankProcess, end_processes
from ds_launch.signals import FORWARDED, STOPPING, read_signals, signal_pipe

_READ_BYTES = 1 << 16
_FAILURE_GRACE_S = 3.0
_LEFTOVER_GRACE_S = 3.0
_LAST_OUTPUT_S = 0.5


class Settings(NamedTuple):
    """How a job is shown and stopped.

    Attributes:
        tags: ``auto`` (lines of every rank but the first are marked ``[rN]``), ``all`` or ``none``.
        log_dir: Existing folder for ``rankN.log``, or ``None``.
        grace_s: Seconds that ranks get to end by themselves after a signal to the launcher; after
            the failure of a rank, at most three of them.
    """

    tags: str
    log_dir: str | None
    grace_s: float


def run_job(
    plans: Sequence[RankPlan], environ: Mapping[str, str], settings: Settings, console: Console
) -> Outcome:
    """Start the ranks, wait for their end, leave nothing of them running.

    Must be called from a process with a single thread.

    Raises:
        LaunchError: A rank cannot be started, or a log cannot be written.
    """
    run_id = plans[0].variables[RUN_ID]
    keeper = Keeper.start(run_id)
    try:
        with signal_pipe() as signal_fd:
            job = _Job(plans, settings, console, signal_fd, run_id)
            try:
                job.start(plans, environ, keeper.register_fd)
                job.wait()
            finally:
                job.end()
            return job.outcome()
    finally:
        keeper.dismiss()


class _Job:
    """State of a running job."""

    def __init__(
        self,
        plans: Sequence[RankPlan],
        settings: Settings,
        console: Console,
        signal_fd: int,
        run_id: str,
    ) -> None:
        self._settings = settings
        self._console = console
        self._signal_fd = signal_fd
        self._run_id = run_id
        self._num_ranks = len(plans)
        self._direct = self._num_ranks == 1 and settings.log_dir is None and settings.tags != "all"
        self._ranks: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._feeds: dict[int, Feed] = {}  # open ones, by descriptor
        self._error_feeds: dict[int, Feed] = {}  # standard error, by rank
        self._terminal_fds: list[int] = []  # our ends of pseudo-terminals
        self._logs: dict[int, RankLog] = {}
        self._failures: list[tuple[RankProcess, int]] = []
        self._killed: list[int] = []
        self._leftovers: list[Leftover] = []
        self._stopping = False
        self._stop_requests = 0
        self._kill_at_s: float | None = None
        self._signum: int | None = None
        self._output_problem = ""

    # ---- start ----

    def start(
        self, plans: Sequence[RankPlan], environ: Mapping[str, str], register_fd: int
    ) -> None:
        """Start every rank."""
        for plan in plans:
            try:
                self._start_rank(plan, environ, register_fd)
            except OSError as error:
                raise LaunchError(f"rank {plan.rank} cannot be started: {error}") from error

    def _start_rank(self, plan: RankPlan, environ: Mapping[str, str], register_fd: int) -> None:
        if self._settings.log_dir is not None:
            path = os.path.join(self._settings.log_dir, f"rank{plan.rank}.log")
            self._logs[plan.rank] = RankLog(path)
        out = None if self._direct else self._open_feed(plan.rank, self._console.out)
        if self._console.err is self._console.out:
            err = out
        else:
            err = None if self._direct else self._open_feed(plan.rank, self._console.err)
        null = None if plan.rank == 0 else os.open(os.devnull, os.O_RDONLY)
        try:
            process = RankProcess.start(
                plan,
                environ=environ,
                stdin=null,
                stdout=out.write_fd if out else None,
                stderr=err.write_fd if err else None,
                register_fd=register_fd,
            )
        finally:
            for fd in {null, out and out.write_fd, err and err.write_fd} - {None}:
                assert fd is not None
                os.close(fd)
        self._ranks.append(process)
        self._running[plan.rank] = process

    def _open_feed(self, rank: int, sink: Sink) -> Channel:
        """Open a channel for one stream of a rank and feed it to ``sink``."""
        live = rank == 0 and self._settings.tags != "all"
        channel = open_channel(sink.fd if live and sink.is_terminal else None)
        if channel.is_terminal:
            self._terminal_fds.append(channel.read_fd)
        tagged = self._settings.tags == "all" or (self._settings.tags == "auto" and rank > 0)
        feed = Feed(
            sink,
            rank=rank,
            tag=b"[r%d] " % rank if tagged else b"",
            live=live,
            log=self._logs.get(rank),
        )
        self._feeds[channel.read_fd] = feed
        self._error_feeds[rank] = feed
        return channel

    # ---- the loop ----

    def wait(self) -> None:
        """Pass on output and signals until every rank has exited."""
        while self._running:
            self._turn(self._timeout_s())
            self._notice_exits()
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._kill()

    def _timeout_s(self) -> float | None:
        times = [due for feed in self._feeds.values() if (due := feed.due_s()) is not None]
        if self._kill_at_s is not None:
            times.append(self._kill_at_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _turn(self, timeout_s: float | None) -> bool:
        """Wait once and handle what is ready; return whether a rank's output was."""
        poll = select.poll()
        poll.register(self._signal_fd, select.POLLIN)
        for fd, feed in self._feeds.items():
            if not feed.sink.full:
                poll.register(fd, select.POLLIN)
        for sink in self._console.sinks:
            if sink.pending:
                poll.register(sink.fd, select.POLLOUT)
        # Rounded up, or a wait of less than a millisecond would spin.
        ready = dict(poll.poll(None if timeout_s is None else int(timeout_s * 1000) + 1))
        if self._signal_fd in ready:
            for signum in read_signals(self._signal_fd):
                self._take_signal(signum)
        now_s = time.monotonic()
        for fd in [fd for fd in self._feeds if fd in ready]:
            self._read(fd, now_s)
        for feed in self._feeds.values():
            feed.tick(now_s)
        for sink in self._console.sinks:
            if sink.fd in ready and sink.pending:
                sink.flush_some()
            if sink.problem and not self._output_problem:
                self._output_problem = sink.problem
                self._stop(signal.SIGTERM, _FAILURE_GRACE_S)
        return any(fd in ready for fd in self._feeds)

    def _read(self, fd: int, now_s: float) -> None:
        data = read_channel(fd, _READ_BYTES)
        if data:
            self._feeds[fd].take(data, now_s)
        else:
            self._close_feed(fd)

    def _close_feed(self, fd: int) -> None:
        self._feeds.pop(fd).finish()
        if fd in self._terminal_fds:
            self._terminal_fds.remove(fd)
        os.close(fd)

    def _notice_exits(self) -> None:
        failed = []
        for rank, process in list(self._running.items()):
            status = process.status()
            if status is None:
                continue
            del self._running[rank]
            # After a stop, what our own signals did to a rank is not its failure.
            if status != 0 and not self._stopping:
                failed.append((process, status))
            elif status > 0 and self._signum is None and not self._output_problem:
                self._failures.append((process, status))
        # Of several noticed at once, one ended by a signal is the likelier cause.
        self._failures.extend(sorted(failed, key=lambda failure: failure[1] > 0))
        if failed:
            self._stop(signal.SIGTERM, min(self._settings.grace_s, _FAILURE_GRACE_S))

    # ---- signals and the stop ----

    def _take_signal(self, signum: int) -> None:
        if signum in STOPPING:
            self._stop_requests += 1
            if self._stopping:
                self._kill()
            else:
                self._signum = signum
                for feed in self._feeds.values():
                    # One rank's KeyboardInterrupt shows where the job was; the others only repeat.
                    feed.muted = signum == signal.SIGINT and feed.rank > 0
                self._stop(signum, self._settings.grace_s)
        elif signum in FORWARDED:
            self._signal_all(signum)
        elif signum == signal.SIGWINCH:
            for fd in self._terminal_fds:
                copy_window_size(self._feeds[fd].sink.fd, fd)
            self._signal_all(signum)
        elif signum == signal.SIGTSTP:
            # Ctrl-Z reaches the launcher alone: the ranks are in sessions of their own.
            self._signal_all(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_all(signal.SIGCONT)

    def _stop(self, signum: int, grace_s: float) -> None:
        """Ask every rank's group to end; kill what is left after ``grace_s``."""
        if self._stopping:
            return
        self._stopping = True
        self._kill_at_s = time.monotonic() + grace_s
        self._signal_all(signum)

    def _kill(self) -> None:
        self._killed.extend(rank for rank in self._running if rank not in self._killed)
        self._kill_at_s = None
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, signum: int) -> None:
        for process in self._ranks:
            process.signal(signum)

    # ---- the end ----

    def end(self) -> None:
        """Leave nothing running, also when :meth:`start` or :meth:`wait` was left by an error."""
        sessions = [process.pid for process in self._ranks]
        if self._running:
            end_processes(sessions, self._run_id, grace_s=0.0)
        elif self._stopping:
            left_s = max(0.0, (self._kill_at_s or 0.0) - time.monotonic())
            end_processes(sessions, self._run_id, grace_s=left_s)
        else:
            self._leftovers = end_processes(sessions, self._run_id, grace_s=_LEFTOVER_GRACE_S)
        self._show_last_output()
        for process in self._ranks:
            process.reap()
        for log in self._logs.values():
            log.close()

    def _show_last_output(self) -> None:
        """Read what the channels still hold and write it out."""
        quiet_since_s = time.monotonic()
        while self._feeds or any(sink.pending for sink in self._console.sinks):
            stuck = any(sink.pending for sink in self._console.sinks)
            requests = self._stop_requests
            if self._turn(None if stuck else _LAST_OUTPUT_S):
                quiet_since_s = time.monotonic()
            elif not stuck and time.monotonic() - quiet_since_s >= _LAST_OUTPUT_S:
                break  # held open by a process that escaped the job on purpose
            if self._stop_requests > requests:
                break  # the reader of our output pauses, and the user has had enough
        for fd in list(self._feeds):
            self._close_feed(fd)

    def outcome(self) -> Outcome:
        """Return how the job ended."""
        failures = []
        for process, status in self._failures:
            feed = self._error_feeds.get(process.rank)
            log = self._logs.get(process.rank)
            failures.append(
                Failure(
                    rank=process.rank,
                    pid=process.pid,
                    status=status,
                    tail=bytes(feed.tail) if feed else b"",
                    log=log.path if log else None,
                )
            )
        return Outcome(
            num_ranks=self._num_ranks,
            failures=tuple(failures),
            killed=tuple(self._killed),
            signum=self._signum,
            output_problem=self._output_problem,
            leftovers=tuple(self._leftovers),
            log_problems=tuple(
                f"{log.path} is incomplete: {log.problem}"
                for log in self._logs.values()
                if log.problem
            ),
        )
