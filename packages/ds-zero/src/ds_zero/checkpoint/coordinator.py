"""What saving needs from the ranks' communication, kept small so that tests need no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Coordinator", "SoloCoordinator"]

T = TypeVar("T")


class Coordinator(Protocol):
    """Exchange of small picklable objects between the ranks that save together.

    All ranks call ``gather`` and ``broadcast`` in the same order.  The objects are described by
    text and numbers only (names, offsets, checksums): tensor data never travels.
    """

    @property
    def rank(self) -> int:
        """Index of this rank, in [0, size)."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, value: T) -> list[T] | None:
        """Collect one value per rank on rank 0, in rank order; ``None`` elsewhere. Collective."""

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. Collective."""


@dataclass(frozen=True)
class SoloCoordinator:
    """The coordinator of a single process: nothing to exchange."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T] | None:
        """Return the value as the only element."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value itself."""
        return value
