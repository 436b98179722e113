"""Collectives of a group of one rank: no process group, no copies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_comm.collectives.base import Allocator, Done, Work
from ds_comm.group import Group

__all__ = ["LocalCollectives"]


class LocalCollectives:
    """Every collective of a group with one member is the identity."""

    def __init__(self, group: Group) -> None:
        """Serve ``group``, which has one member."""
        self.group = group

    @property
    def allocator(self) -> Allocator | None:
        """None: any memory will do."""
        return None

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        """Return at once, with ``shard`` in place."""
        if shard is not None:
            flat.copy_(shard)
        return Done()

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """Copy (or add) ``flat`` to ``out`` unless they are the same memory."""
        if accumulate:
            out.add_(flat)
        elif out.data_ptr() != flat.data_ptr():
            out.copy_(flat)
        return Done()

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Work:
        """Copy the only part."""
        receive[0].copy_(send[0])
        return Done()

    def exchange(self, row: Tensor) -> Tensor:
        """Return ``row`` as a matrix of one row."""
        return row.unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Return at once."""
