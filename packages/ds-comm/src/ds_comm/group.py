"""A process group as a value: its ranks, this process's place in it, and the torch handle."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other.

    ``handle`` is ``None`` for a group of one rank: collectives on it are local and need no
    initialised process group.
    """

    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    rank: int
    """Index of this process within ``ranks``."""
    handle: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """torch's process group, or ``None`` when the group has one member."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @staticmethod
    def solo(rank: int = 0) -> Group:
        """The group of this process alone."""
        return Group(ranks=(rank,), rank=0)

    @staticmethod
    def world() -> Group:
        """All ranks of the initialised default process group, or a group of one without it."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return Group.solo()
        return Group(
            ranks=tuple(range(dist.get_world_size())),
            rank=dist.get_rank(),
            handle=dist.group.WORLD,
        )

    @staticmethod
    def of(handle: dist.ProcessGroup) -> Group:
        """The group of torch's ``handle``, which this process belongs to."""
        ranks = tuple(dist.get_process_group_ranks(handle))
        place = dist.get_group_rank(handle, dist.get_rank())
        return Group(ranks=ranks, rank=place, handle=handle if len(ranks) > 1 else None)
