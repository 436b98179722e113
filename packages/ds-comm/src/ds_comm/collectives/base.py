"""What the engine needs from communication: collectives, and a handle.

A *flat* collective works in place on one contiguous 1-D buffer that is cut into ``group.size``
equal shards; shard ``r`` belongs to rank ``r``.  Nothing is copied in or out of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_comm.group import Group

__all__ = ["Allocator", "Collectives", "Done", "Work"]


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until the result is in place.  Further calls do nothing.

        Raises:
            CommError: The exchange failed; the message names the operation, its label and the peer.
            CommTimeoutError: A peer did not take part within the group's time-out.
            DivergenceError: A peer took part in another operation than this one.
        """
        ...


class Done:
    """The handle of a collective that is already complete."""

    def wait(self) -> None:
        """Return at once."""


Allocator = Callable[[int, torch.dtype], Tensor]
"""Returns zeros, 1-D on the CPU, of so many elements and that dtype."""


class Collectives(Protocol):
    """Communication of one group.  All ranks of the group must make the same calls in order."""

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        ...

    @property
    def allocator(self) -> Allocator | None:
        """Makes tensors that peers can read in place, where that saves copies; else None."""
        ...

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        """Start filling every shard of ``flat`` with its owner's values, in place.

        Args:
            flat: 1-D contiguous, ``size * n`` elements.
            label: What is gathered, for messages; must be equal on all ranks.
            shard: This rank's values where ``flat`` does not hold them yet: 1-D, ``n`` elements,
                of ``flat``'s dtype or a float that is rounded to it.

        Returns:
            A handle; ``flat`` must not be touched before it was waited for, nor ``shard`` be
            written to.
        """
        ...

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """Start summing this rank's shard of every rank's ``flat`` into ``out``.

        Where ranks exchange pieces, the sum is formed in rank order, in fp32 for 16-bit inputs, so
        two layouts of the same values give the same bits.  A backend's own collective sums in
        the dtype and order that it chooses.

        Args:
            flat: 1-D contiguous, ``size * n`` elements.  Its contents are undefined afterwards,
                except that ``out`` may be a view of this rank's own shard.
            out: 1-D, ``n`` elements, fp32 or the dtype of ``flat``.
            label: What is reduced, for messages; must be equal on all ranks.
            accumulate: Add to ``out`` instead of replacing it.

        Returns:
            A handle; neither buffer may be touched before it was waited for.
        """
        ...

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Work:
        """Start sending ``send[r]`` to rank ``r`` and filling ``receive[r]`` with what it sends.

        Args:
            send: One 1-D contiguous tensor a rank, one dtype; sizes may differ and be 0.
            receive: The same; ``receive[r]`` is as large as what rank ``r`` sends here.
            label: What is moved, for messages; must be equal on all ranks.

        Returns:
            A handle; nothing may be touched before it was waited for.
        """
        ...

    def exchange(self, row: Tensor) -> Tensor:
        """Give every rank each rank's ``row`` (1-D, equal sizes): shape ``[size, n]``.  Blocks."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` (contiguous) with that of group rank ``source``.  Blocks."""
        ...
