"""Small collectives on Python objects, for set-up, checkpoints and messages."""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist

from ds_comm.group import Group

__all__ = ["barrier", "broadcast_object", "gather_objects"]

T = TypeVar("T")


def barrier(group: Group) -> None:
    """Return once every rank of ``group`` has called this.  All ranks must call it."""
    if group.size > 1:
        dist.barrier(group=group.handle)


def gather_objects(value: T, group: Group) -> list[T]:
    """Return every rank's ``value`` in group order, on every rank.  All ranks must call it.

    Args:
        value: Any picklable object.
        group: The ranks that take part; they must trust each other, since objects are pickled.
    """
    if group.size == 1:
        return [value]
    values: list[T | None] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return cast("list[T]", values)


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return group rank ``source``'s ``value`` on every rank.  All ranks must call it."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.handle)
    return box[0]
