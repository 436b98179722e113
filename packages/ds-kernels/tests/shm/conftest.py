"""Ranks for the shared-memory tests: forked processes that know each other by pipes alone."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from ds_kernels.shm import SharedGroup, SharedSegment


@dataclass(frozen=True)
class Rank:
    """What a test function gets: a connected group, and a way to meet outside of it."""

    group: SharedGroup
    pipe: Connection

    def meet(self) -> None:
        """Return when all ranks have called this."""
        self.pipe.send(("meet", None))
        self.pipe.recv()


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    result: Any = None
    error: str | None = None
    exit_code: int | None = None


def _child(
    pipe: Connection, index: int, function: Callable[..., Any], args: Any, opts: Any
) -> None:
    torch.set_num_threads(1)
    try:
        segment = SharedSegment(1 << 30)
        pipe.send(("meet", segment.address))
        group = SharedGroup(segment, pipe.recv(), index, **opts)
        rank = Rank(group, pipe)
        rank.meet()  # all are connected
        pipe.send(("result", function(rank, *args)))
    except BaseException:  # noqa: BLE001 - everything is told to the test
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)  # the parent's atexit handlers are not ours


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    may_die: bool = False,
    limit_s: float = 60.0,
    **opts: Any,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``size`` forked ranks; return results in rank order.

    Args:
        size: Number of ranks.
        function: Any function; its result is pickled.
        args: Further arguments.
        may_die: Return an ``Ended`` per rank instead of failing on errors.
        limit_s: For all of it.
        opts: Of the group.
    """
    context = get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for index in range(size):
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(there, index, function, args, opts))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    ended: dict[int, Ended] = {}
    waiting: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(ended) < size:
            live = [pipe for index, pipe in enumerate(pipes) if index not in ended]
            ready = wait(live, max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(set(range(size)) - ended.keys())} did not finish"
            for pipe in ready:
                index = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, pickle.UnpicklingError):
                    processes[index].join(5)
                    ended[index] = Ended(exit_code=processes[index].exitcode)
                    continue
                if kind == "meet":
                    waiting[index] = value
                else:
                    ended[index] = Ended(**{kind: value})
            if waiting and len(waiting) + len(ended) == size:
                answer = [waiting.get(index) for index in range(size)]
                for index in waiting:
                    pipes[index].send(answer)
                waiting = {}
    finally:
        for process in processes:
            if process.is_alive() and len(ended) < size:
                os.kill(process.pid, signal.SIGKILL)
            process.join(5)
    outcome = [ended[index] for index in range(size)]
    if may_die:
        return outcome
    for index, one in enumerate(outcome):
        assert one.error is None, f"rank {index}:\n{one.error}"
        assert one.exit_code is None, f"rank {index} ended with {one.exit_code}"
    return [one.result for one in outcome]


@pytest.fixture
def shm_ranks() -> Callable[..., list[Any]]:
    """The function ``run_ranks``."""
    return run_ranks
