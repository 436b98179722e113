"""The process that has imported torch and forks workers: ``python -m ds_comm.testing.zygote FD``.

Importing torch takes seconds of processor time, a fork milliseconds, and forked workers share
torch's pages.  This process stays single-threaded and never forms a group, so forking it is safe.
It ends when its control channel closes; the workers watch it and end with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from ds_comm.testing import worker
from ds_comm.testing.messages import Fork

__all__ = ["main"]


def _fork(control: Connection) -> int:
    channel, log = recv_handle(control), recv_handle(control)
    pid = os.fork()
    if pid:
        os.close(channel)
        os.close(log)
        return pid
    control.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    worker.main(channel)


def _end(pid: int, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)  # not collected yet, so the id is still its own
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(argv: list[str]) -> None:
    """Serve requests from file descriptor ``argv[1]`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business
    control = Connection(int(argv[1]))
    gc.collect()
    gc.freeze()  # collections in the workers then skip what torch itself owns
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = control.recv()
            if isinstance(request, Fork):
                control.send(_fork(control))
            else:
                control.send(_end(request.pid, request.patience_s))


if __name__ == "__main__":
    main(sys.argv)
