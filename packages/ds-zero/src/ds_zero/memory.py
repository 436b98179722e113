"""Flat buffers at a fixed address that give their memory back and take it again.

[Note: inflate and deflate]
Autograd keeps views of a gathered weight (a ``weight.t()`` say) until the backward pass.  If the
buffer is *deflated*, its pages returned while its address stays, those views cost nothing, and
are valid again after the next gather.  On the CPU the buffer is a private anonymous mapping,
2 MiB aligned with huge pages, and ``MADV_DONTNEED`` deflates it: three times cheaper than freeing
and allocating, and a stray read gives zeros instead of a crash.  On accelerators the storage is
resized.
"""

from __future__ import annotations

import mmap
import sys
from typing import Protocol

import torch
from torch import Tensor

from ds_comm.collectives import Allocator
from ds_comm.logging import get_logger, log_once

__all__ = ["FlatBuffer", "flat_buffer"]

logger = get_logger(__name__)

_HUGE_PAGE_BYTES = 2 << 20


class FlatBuffer(Protocol):
    """A 1-D tensor whose memory can be returned while its address stays."""

    tensor: Tensor
    """The whole buffer; views of it stay valid across deflation, their contents do not."""

    def inflate(self) -> None:
        """Make the memory usable; contents are undefined.  Does nothing when inflated."""
        ...

    def deflate(self) -> None:
        """Give the memory back; contents are lost.  Does nothing when deflated."""
        ...


def flat_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, allocator: Allocator | None = None
) -> FlatBuffer:
    """Allocate an inflated buffer of zeros.

    Args:
        numel: Number of elements; 0 is allowed.
        dtype: Element type.
        device: Where it lives.
        allocator: That of the collectives, for what peers read; such a buffer is never deflated.
    """
    if allocator is not None and device.type == "cpu":
        return LentBuffer(allocator(numel, dtype))
    mappable = sys.platform == "linux" and device.type == "cpu" and numel > 0
    return MappedBuffer(numel, dtype) if mappable else StorageBuffer(numel, dtype, device)


class MappedBuffer:
    """A private anonymous mapping of huge pages.  See [Note: inflate and deflate]."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        """Map ``numel`` elements; no page is touched before it is written."""
        num_bytes = numel * dtype.itemsize
        huge = num_bytes >= _HUGE_PAGE_BYTES
        slack = _HUGE_PAGE_BYTES if huge else 0
        # The end stays on small pages: a whole huge page would cost up to 2 MiB a buffer.
        self._length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self._length + slack, flags=flags)
        address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._offset = -address % _HUGE_PAGE_BYTES if huge else 0
        if huge:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, self._offset, self._length)
            except OSError as error:  # a kernel without transparent huge pages
                log_once(logger, "info", "flat buffers use small pages: %s", error)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._offset)

    def inflate(self) -> None:
        """Do nothing: pages come back when they are written."""

    def deflate(self) -> None:
        """Return the pages to the system."""
        self._map.madvise(mmap.MADV_DONTNEED, self._offset, self._length)


class LentBuffer:
    """Memory that peers may read at any time, so that it always stays."""

    def __init__(self, tensor: Tensor) -> None:
        """Hold ``tensor``."""
        self.tensor = tensor

    def inflate(self) -> None:
        """Do nothing."""

    def deflate(self) -> None:
        """Do nothing."""


class StorageBuffer:
    """An ordinary allocation whose storage is resized."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate ``numel`` zeros on ``device``."""
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._num_bytes = numel * dtype.itemsize

    def inflate(self) -> None:
        """Give the storage its size again."""
        if self.tensor.untyped_storage().size() != self._num_bytes:
            self.tensor.untyped_storage().resize_(self._num_bytes)

    def deflate(self) -> None:
        """Take the storage's memory away."""
        self.tensor.untyped_storage().resize_(0)
