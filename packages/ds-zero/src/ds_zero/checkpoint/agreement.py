"""A step that all ranks take together: it succeeds on all, or raises the same error on all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.coordinator import Coordinator

__all__ = ["agree"]

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    rank: int
    message: str


@dataclass(frozen=True)
class _Attempt:
    """Own outcome: the error is kept beside its travelling form, to be chained on this rank."""

    value: object
    error: Exception | None = None


def _attempt(rank: int, work: Callable[[], object]) -> _Attempt:
    # The other ranks wait for this one's outcome: any error must reach them first, and is raised
    # right after on every rank, this one with its cause.  Nothing is swallowed.
    try:
        return _Attempt(work())
    except Exception as error:
        return _Attempt(_Failure(rank, _describe(error)), error)


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error}; free space or fix permissions, or choose another directory"
    return f"{type(error).__name__}: {error}"


def agree(
    coordinator: Coordinator,
    work: Callable[[], T],
    decide: Callable[[list[T]], R],
    undo: Callable[[], None] | None = None,
) -> R:
    """Run ``work`` on every rank, then ``decide`` on rank 0, and return its result everywhere.

    Collective: one gather and one broadcast.

    Args:
        coordinator: Exchange between the ranks.
        work: This rank's part; its result must be picklable.
        decide: Called on rank 0 with all results in rank order, if no rank failed.
        undo: Called on rank 0 after any failure, before the other ranks hear of it.

    Raises:
        CheckpointError: The same on all ranks, naming the rank that failed first and why.
    """
    own = _attempt(coordinator.rank, work)
    outcomes = coordinator.gather(own.value)
    verdict = _Attempt(None)
    if outcomes is not None:
        failures = [item for item in outcomes if isinstance(item, _Failure)]
        if failures:
            verdict = _Attempt(failures[0])
        else:
            results: list[T] = outcomes  # type: ignore[assignment]
            verdict = _attempt(0, lambda: decide(results))
        if undo is not None and isinstance(verdict.value, _Failure):
            _undo(undo)
    final = coordinator.broadcast(verdict.value)
    if isinstance(final, _Failure):
        cause = own.error or verdict.error
        raise CheckpointError(f"on rank {final.rank}: {final.message}") from cause
    return final  # type: ignore[return-value]


def _undo(undo: Callable[[], None]) -> None:
    try:
        undo()
    except OSError as error:
        logger.warning("could not clean up after a failed save: %s", error)
