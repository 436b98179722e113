"""Where the stored inputs of checkpoints lie: fresh memory or rows of an arena, device or host.

Everything here moves 1-D tensors; what they mean is told in ``storage``.

[Note: prefetch]
Backward needs the inputs of checkpoints in the reverse of the order in which they were stored.
When one is fetched from the host, the copy of the one stored before it starts on a stream of its
own, while the first is recomputed.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_comm.logging import get_logger, log_once

__all__ = [
    "Allocator",
    "Arena",
    "DevicePlace",
    "FreshMemory",
    "HostPlace",
    "Mover",
    "Place",
    "Stored",
    "StreamMover",
]

logger = get_logger(__name__)


class Stored(Protocol):
    """A 1-D tensor that is kept for backward."""

    def fetch(self) -> Tensor:
        """Return its values on the device; may be called again."""
        ...


class Place(Protocol):
    """Keeps 1-D tensors."""

    def keep(self, values: Tensor) -> Stored:
        """Copy ``values``, which may be reused afterwards."""
        ...


class Allocator(Protocol):
    """Memory for copies."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor with undefined contents."""
        ...

    def give(self, memory: Tensor) -> None:
        """Take back a tensor of :meth:`take`."""
        ...


class FreshMemory:
    """An allocation for every copy."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """Allocate on ``device``; ``pinned`` host memory is page-locked."""
        self._device = device
        self._pinned = pinned

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Allocator`."""
        return torch.empty(numel, dtype=dtype, device=self._device, pin_memory=self._pinned)

    def give(self, memory: Tensor) -> None:
        """Leave it to the garbage collector."""


class Arena:
    """Rows of one allocation per size, so that long-lived copies do not fragment the memory."""

    def __init__(self, memory: Allocator, num_rows: int) -> None:
        """Cut blocks of ``num_rows`` rows out of ``memory``."""
        self._memory = memory
        self._num_rows = num_rows
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a free row; more than there are rows of that size come from outside, once told."""
        key = (numel, dtype)
        if key not in self._free:
            block = self._memory.take(numel * self._num_rows, dtype)
            self._free[key] = list(reversed(block.view(self._num_rows, numel).unbind()))
        if self._free[key]:
            return self._free[key].pop()
        log_once(
            logger,
            "warning",
            "more than number_checkpoints = %d checkpoints of %d elements are alive: the rest is "
            "stored outside of the contiguous buffer",
            self._num_rows,
            numel,
        )
        return self._memory.take(numel, dtype)

    def give(self, memory: Tensor) -> None:
        """Make a row free again."""
        free = self._free.get((memory.numel(), memory.dtype))
        if free is not None and len(free) < self._num_rows:
            free.append(memory)


class _DeviceCopy:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def fetch(self) -> Tensor:
        return self._memory


class DevicePlace:
    """Copies on the device that computes."""

    def __init__(self, allocator: Allocator) -> None:
        """Copy into memory of ``allocator``."""
        self._allocator = allocator

    def keep(self, values: Tensor) -> Stored:
        """See :class:`Place`."""
        memory = self._allocator.take(values.numel(), values.dtype)
        memory.copy_(values)
        copy = _DeviceCopy(memory)
        weakref.finalize(copy, self._allocator.give, memory).atexit = False
        return copy


class Mover(Protocol):
    """Copies between the host and a device without waiting."""

    def to_host(self, memory: Tensor, values: Tensor) -> Any:
        """Start to copy ``values`` of the device into ``memory``; return what marks the end."""
        ...

    def to_device(self, memory: Tensor, stored: Any) -> tuple[Tensor, Any]:
        """Start to copy back what ``stored`` marked; return it and what marks the end."""
        ...

    def arrive(self, values: Tensor, mark: Any) -> None:
        """Let work that is queued from now on see ``values``."""
        ...


class StreamMover:
    """Copies on two streams of an accelerator, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        """Serve ``device``."""
        self._device = device
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)

    def to_host(self, memory: Tensor, values: Tensor) -> Any:
        """See :class:`Mover`."""
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        self._out.wait_stream(self._in)  # which may still read what ``memory`` held before
        return self._copy(memory, values, self._out)

    def to_device(self, memory: Tensor, stored: Any) -> tuple[Tensor, Any]:
        """See :class:`Mover`."""
        values = torch.empty_like(memory, device=self._device)
        self._in.wait_stream(torch.accelerator.current_stream(self._device))
        self._in.wait_event(stored)
        return values, self._copy(values, memory, self._in)

    def arrive(self, values: Tensor, mark: Any) -> None:
        """See :class:`Mover`."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(mark)
        values.record_stream(current)

    def _copy(self, target: Tensor, source: Tensor, stream: torch.Stream) -> Any:
        present = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(present)
        for tensor in (target, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)
        return stream.record_event()


class _HostCopy:
    def __init__(
        self, place: HostPlace, memory: Tensor, stored: Any, before: _HostCopy | None
    ) -> None:
        self.memory = memory
        self.stored = stored
        """Marks the end of the copy to the host."""
        self.arriving: tuple[Tensor, Any] | None = None
        """The copy on its way back, and what marks its end."""
        self._place = place
        self._before = weakref.ref(before) if before is not None else None

    @property
    def before(self) -> _HostCopy | None:
        """What was stored before it, if that is still wanted."""
        return self._before() if self._before is not None else None

    def fetch(self) -> Tensor:
        return self._place.fetch(self)


class HostPlace:
    """Copies in page-locked host memory.  See [Note: prefetch]."""

    def __init__(self, allocator: Allocator, mover: Mover) -> None:
        """Let ``mover`` copy into host memory of ``allocator`` and back."""
        self._allocator = allocator
        self._mover = mover
        self._last: weakref.ref[_HostCopy] | None = None

    def keep(self, values: Tensor) -> Stored:
        """See :class:`Place`; returns before the copy is done."""
        memory = self._allocator.take(values.numel(), values.dtype)
        stored = self._mover.to_host(memory, values)
        before = self._last() if self._last is not None else None
        copy = _HostCopy(self, memory, stored, before)
        self._last = weakref.ref(copy)
        weakref.finalize(copy, self._allocator.give, memory).atexit = False
        return copy

    def fetch(self, copy: _HostCopy) -> Tensor:
        """Return the values of ``copy`` on the device and start to fetch its predecessor."""
        self._start(copy)
        assert copy.arriving is not None
        values, mark = copy.arriving
        copy.arriving = None
        self._mover.arrive(values, mark)
        if copy.before is not None:
            self._start(copy.before)
        return values

    def _start(self, copy: _HostCopy) -> None:
        if copy.arriving is None:
            copy.arriving = self._mover.to_device(copy.memory, copy.stored)
