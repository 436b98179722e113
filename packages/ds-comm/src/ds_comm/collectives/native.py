"""Flat collectives by the backend's own tensor collectives (NCCL and other accelerators)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.collectives.base import Allocator, Done, Work
from ds_comm.errors import CommError
from ds_comm.group import Group

__all__ = ["NativeCollectives"]


class _NativeWork:
    """A backend handle, and what is left to do with the result."""

    def __init__(
        self, work: dist.Work, what: str, total: Tensor | None, out: Tensor | None
    ) -> None:
        self._work: dist.Work | None = work
        self._what = what
        self._total = total
        self._out = out

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommError(f"{self._what} failed: {error}") from error
        self._work = None
        if self._total is not None and self._out is not None:
            self._out.add_(self._total)
            self._total = None


class _Unpack:
    """Copies what arrived in one piece to where it belongs."""

    def __init__(self, work: Work, received: Tensor, parts: Sequence[Tensor]) -> None:
        self._work = work
        self._received: Tensor | None = received
        self._parts = parts

    def wait(self) -> None:
        self._work.wait()
        if self._received is not None:
            pieces = self._received.split([part.numel() for part in self._parts])
            for part, piece in zip(self._parts, pieces, strict=True):
                part.copy_(piece)
            self._received = None


class NativeCollectives:
    """Flat collectives through ``reduce_scatter_tensor`` and ``all_gather_into_tensor``.

    The order and the dtype of the sum are the backend's.
    """

    def __init__(self, group: Group) -> None:
        """Serve ``group``, which has at least two members."""
        self.group = group

    @property
    def allocator(self) -> Allocator | None:
        """None: any memory will do."""
        return None

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.gather`."""
        if flat.numel() == 0:
            return Done()
        own = flat.chunk(self.group.size)[self.group.rank]
        if shard is not None:
            own.copy_(shard)
        work = dist.all_gather_into_tensor(flat, own, group=self.group.handle, async_op=True)
        return self._handle(work, f"gather of {label!r}")

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.reduce`."""
        if flat.numel() == 0:
            return Done()
        direct = not accumulate and out.dtype == flat.dtype
        target = out if direct else torch.empty_like(out, dtype=flat.dtype)
        if not direct and not accumulate:
            out.zero_()
        work = dist.reduce_scatter_tensor(target, flat, group=self.group.handle, async_op=True)
        if direct:
            return self._handle(work, f"reduce of {label!r}")
        return self._handle(work, f"reduce of {label!r}", target, out)

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.all_to_all`."""
        sent = torch.cat(list(send))
        received = sent.new_empty(sum(part.numel() for part in receive))
        work = dist.all_to_all_single(
            received,
            sent,
            [part.numel() for part in receive],
            [part.numel() for part in send],
            group=self.group.handle,
            async_op=True,
        )
        return _Unpack(self._handle(work, f"all_to_all of {label!r}"), received, receive)

    def exchange(self, row: Tensor) -> Tensor:
        """See :meth:`ds_comm.collectives.base.Collectives.exchange`."""
        rows = torch.empty(self.group.size, row.numel(), dtype=row.dtype, device=row.device)
        dist.all_gather_into_tensor(rows.flatten(), row, group=self.group.handle)
        return rows

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See :meth:`ds_comm.collectives.base.Collectives.broadcast`."""
        dist.broadcast(tensor, src=self.group.ranks[source], group=self.group.handle)

    def _handle(
        self,
        work: dist.Work | None,
        what: str,
        total: Tensor | None = None,
        out: Tensor | None = None,
    ) -> _NativeWork:
        if work is None:
            raise CommError(f"rank {self.group.ranks[self.group.rank]} is not in the group")
        return _NativeWork(work, what, total, out)
