"""Collectives that keep a log of what was called and how many bytes left this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ds_comm.collectives.base import Allocator, Collectives, Work
from ds_comm.group import Group

__all__ = ["Call", "RecordingCollectives"]


class Call(NamedTuple):
    """One collective as this rank saw it."""

    kind: str
    """``gather``, ``reduce``, ``all_to_all``, ``exchange`` or ``broadcast``."""
    label: str
    """What was moved."""
    sent_bytes: int
    """Payload bytes that this rank sent, by the minimum that the operation needs."""


class RecordingCollectives:
    """Passes every call on to ``inner`` and appends it to :attr:`calls`."""

    def __init__(self, inner: Collectives) -> None:
        """Wrap ``inner``."""
        self._inner = inner
        self.calls: list[Call] = []

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        return self._inner.group

    @property
    def allocator(self) -> Allocator | None:
        """That of ``inner``."""
        return self._inner.allocator

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        """Record and pass on: this rank sends its shard to ``size - 1`` peers."""
        shard_bytes = flat.numel() // self.group.size * flat.element_size()
        self.calls.append(Call("gather", label, shard_bytes * (self.group.size - 1)))
        return self._inner.gather(flat, label, shard)

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """Record and pass on: this rank sends every shard but its own."""
        shard_bytes = flat.numel() // self.group.size * flat.element_size()
        self.calls.append(Call("reduce", label, shard_bytes * (self.group.size - 1)))
        return self._inner.reduce(flat, out, label, accumulate=accumulate)

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Work:
        """Record and pass on: this rank sends every part but its own."""
        own = self.group.rank
        sent = sum(p.numel() * p.element_size() for r, p in enumerate(send) if r != own)
        self.calls.append(Call("all_to_all", label, sent))
        return self._inner.all_to_all(send, receive, label)

    def exchange(self, row: Tensor) -> Tensor:
        """Record and pass on: this rank sends its row to ``size - 1`` peers."""
        sent = row.numel() * row.element_size() * (self.group.size - 1)
        self.calls.append(Call("exchange", "row", sent))
        return self._inner.exchange(row)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Record and pass on: only the source sends."""
        sent = tensor.numel() * tensor.element_size() if self.group.rank == source else 0
        self.calls.append(Call("broadcast", f"from {source}", sent))
        self._inner.broadcast(tensor, source)
