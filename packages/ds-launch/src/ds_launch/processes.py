"""Start ranks in sessions of their own, learn how they ended, and end all that they started.

[Note: leaders stay zombies]
A rank leads a session and process group with its own pid. Its exit is read without reaping it
(WNOWAIT), and it is reaped only when the job is over: as long as the zombie exists the kernel
cannot give its pid, and so its session and group number, to a stranger that a later signal would
hit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_launch.plan import RUN_ID, RankPlan

_POLL_S = 0.02
_UNKILLABLE_S = 2.0


class RankProcess:
    """A started rank.

    Attributes:
        rank: Its global rank.
        pid: Process, session and group number.
    """

    def __init__(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.pid = popen.pid
        self._popen = popen

    @classmethod
    def start(
        cls,
        plan: RankPlan,
        *,
        environ: Mapping[str, str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        register_fd: int,
    ) -> RankProcess:
        """Start the rank.

        Args:
            plan: Its command and variables.
            environ: The environment under the plan's variables.
            stdin: File descriptor, or ``None`` to inherit the launcher's; likewise the next two.
            stdout: Standard output.
            stderr: Standard error.
            register_fd: Where the child writes its pid and a newline before it becomes the
                rank's program (see :mod:`ds_launch.keeper`).

        Raises:
            OSError: The program cannot be executed or the system has no process to give.
        """

        def register() -> None:
            os.write(register_fd, b"%d\n" % os.getpid())

        popen = subprocess.Popen(
            plan.argv,
            env={**environ, **plan.variables},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            # Safe here: the launcher has one thread, so the fork holds no lock of another one.
            preexec_fn=register,
        )
        return cls(plan.rank, popen)

    def status(self) -> int | None:
        """Return the exit status (minus the signal's number if one ended it), None while running.

        Leaves the process unreaped: see [Note: leaders stay zombies].
        """
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, self.pid, flags)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the rank's group; none left is no error."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            pass

    def reap(self) -> None:
        """Release the process; it must have exited."""
        self._popen.wait()


class Leftover(NamedTuple):
    """A process of the job that is not one of its ranks.

    Attributes:
        pid: Its process number.
        name: Its command name as the kernel has it.
    """

    pid: int
    name: str


def find_processes(sessions: Sequence[int], run_id: str) -> list[Leftover]:
    """Return the living processes of a job, zombies not counted.

    A process belongs to the job when it is in a session of one of its ranks, or when its
    environment holds the job's mark: a daemon that made its own session is found by that.

    Args:
        sessions: Session numbers of the ranks.
        run_id: The job's value of ``DS_RUN_ID``.
    """
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
            state, _, _, session = tail.split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) not in sessions:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if not _has_mark(file.read(), mark):
                        continue
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        name = head.partition(b"(")[2].decode("utf-8", "backslashreplace")
        found.append(Leftover(int(entry), name))
    return found


def end_processes(sessions: Sequence[int], run_id: str, *, grace_s: float) -> list[Leftover]:
    """End every process of a job: SIGTERM, and SIGKILL to those that live ``grace_s`` later.

    Returns:
        Those that were found, in the order of their discovery.
    """
    deadline = time.monotonic() + grace_s
    found: dict[int, Leftover] = {}
    while alive := find_processes(sessions, run_id):
        now = time.monotonic()
        if now > deadline + _UNKILLABLE_S:
            break  # in an uninterruptible wait of the kernel: nobody can end it
        for process in alive:
            if now >= deadline:
                _kill(process.pid, signal.SIGKILL)
            elif process.pid not in found:
                _kill(process.pid, signal.SIGTERM)
            found[process.pid] = process
        time.sleep(_POLL_S)
    return list(found.values())


def _has_mark(environ: bytes, mark: bytes) -> bool:
    """Tell whether an environment block holds the mark, or that of a launch inside the job."""
    return any(entry == mark or entry.startswith(mark + b"/") for entry in environ.split(b"\0"))


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass
