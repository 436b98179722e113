"""Collectives between the ranks of one host through memory that they share.

Ranks are processes of one machine and one PID namespace.  Each makes a :class:`SharedSegment`,
the caller brings every rank the addresses of all, and a :class:`SharedGroup` connects them:

    segment = SharedSegment()
    addresses = ...  # segment.address of every rank, in rank order
    group = SharedGroup(segment, addresses, rank)

A segment is anonymous memory: a crash leaves nothing behind.  What lies in it, made by
:meth:`SharedSegment.allocate`, is read by the peers in place; everything else is copied in once.
Sums are formed in rank order, in fp32 for 16-bit floats, so that every rank gets the same bits.

The algorithms are described in ``csrc/shm``, [Note: segment] and [Note: announce and pull].
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kernels.errors import KernelArgumentError
from ds_kernels.native import load_native

__all__ = [
    "Place",
    "SharedGroup",
    "SharedSegment",
    "ShmDivergenceError",
    "ShmError",
    "ShmPeerError",
    "ShmTimeoutError",
    "ShmWork",
]

# Codes of `enum Channel` in csrc/shm/control.h.
_GATHER, _REDUCE, _PIECES = 0, 1, 2


@dataclass(frozen=True)
class Place:
    """An operation in the sequence of its channel."""

    what: str
    """How its rank described it; cut after 160 bytes."""
    index: int
    """How many operations came before it."""
    num_bytes: int
    """Its size."""

    def __str__(self) -> str:
        return f"{self.what} (#{self.index}, {self.num_bytes:,} bytes)"


class ShmError(RuntimeError):
    """A collective failed.

    Attributes:
        peer: The rank that is to blame.
        mine: The operation that failed here.
    """

    def __init__(self, message: str, peer: int, mine: Place) -> None:
        super().__init__(message)
        self.peer = peer
        self.mine = mine


class ShmPeerError(ShmError):
    """A peer died, or closed its group, before it took part."""


class ShmTimeoutError(ShmError, TimeoutError):
    """A peer did not take part in time."""


class ShmDivergenceError(ShmError):
    """A peer runs another operation at the same place.

    Attributes:
        theirs: What it runs.
    """

    def __init__(self, message: str, peer: int, mine: Place, theirs: Place) -> None:
        super().__init__(message, peer, mine)
        self.theirs = theirs


class SharedSegment:
    """This rank's shared memory: address space of which only what is used costs memory."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Reserve the segment.

        Args:
            capacity_bytes: Most that can be allocated; by default the machine's memory.

        Raises:
            NativeUnavailableError: The native module is not there.
            OSError: The system has no memfd, or refuses the address space.
        """
        native = load_native()
        if capacity_bytes is None:
            capacity_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._handle = native.ShmSegment(capacity_bytes + (4 << 20))

    @property
    def address(self) -> str:
        """What peers need to open the segment."""
        return self._handle.address()

    @property
    def has_huge_pages(self) -> bool:
        """Whether large tensors lie on huge pages."""
        return self._handle.has_huge_pages()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in the segment, 1-D; page aligned, given back with the tensor.

        Args:
            numel: Number of elements.
            dtype: Any dtype.

        Raises:
            MemoryError: The segment is full, its group was closed, or this is a forked child.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        region = self._handle.allocate(numel * dtype.itemsize)
        return torch.frombuffer(region, dtype=dtype, count=numel)

    def contains(self, tensor: Tensor) -> bool:
        """Whether the (contiguous) tensor lies in the segment, so that peers see it in place."""
        return tensor.is_cpu and self._handle.contains(tensor)


class ShmWork:
    """An asynchronous collective."""

    def __init__(self, group: SharedGroup, channel: int, index: int, settle: bool) -> None:
        self._group = group
        self._channel = channel
        self._index = index
        self._settle = settle

    def wait(self) -> None:
        """Block until the result is in place; further calls do nothing.

        Raises:
            ShmDivergenceError: A peer runs another operation at this place.
            ShmPeerError: A peer died or left before it took part.
            ShmTimeoutError: A peer did not take part in time.
        """
        self._group._finish(self._channel, self._index, self._settle)
        self._settle = False


class SharedGroup:
    """One rank's end of a group.

    Every rank makes the same calls in the same order; gathers, reductions and all-to-alls may be
    interleaved differently.  Not to be called from two threads at once.
    """

    def __init__(
        self,
        segment: SharedSegment,
        addresses: Sequence[str],
        rank: int,
        *,
        timeout_s: float = 600.0,
        chunk_bytes: int = 1 << 19,
    ) -> None:
        """Open the segments of the peers.

        All ranks must have connected before any closes or ends: the caller sees to that.

        Args:
            segment: This rank's.
            addresses: The address of every rank's segment, in rank order.
            rank: Index of this rank.
            timeout_s: How long to wait for a peer.
            chunk_bytes: Piece by which blocking collectives advance; 256 KiB to 1 MiB is best.

        Raises:
            KernelArgumentError: An argument is out of its range.
            RuntimeError: A segment cannot be opened; the message says why.
        """
        if not 0 <= rank < len(addresses):
            raise KernelArgumentError(f"rank: is {rank}, but there are {len(addresses)} ranks")
        if chunk_bytes < 4096:
            raise KernelArgumentError(f"chunk_bytes: is {chunk_bytes}, must be at least 4096")
        if timeout_s <= 0:
            raise KernelArgumentError(f"timeout_s: is {timeout_s}, must be positive")
        if segment.address != addresses[rank]:
            raise KernelArgumentError(f"addresses: number {rank} is not that of this segment")
        self.rank = rank
        self.size = len(addresses)
        self.segment = segment
        native = load_native()
        self._failure = native.ShmFailure
        self._handle = native.ShmGroup(
            rank, segment._handle, list(addresses), timeout_s, chunk_bytes
        )
        # Tensors of operations that are not complete: native code holds their addresses.
        self._live: deque[tuple[int, int, tuple[Tensor, ...]]] = deque()

    # ---- asynchronous ------------------------------------------------------------------------

    def gather(self, flat: Tensor, what: str, shard: Tensor | None = None) -> ShmWork:
        """Start to fill every part of ``flat`` with its owner's values.

        Args:
            flat: 1-D contiguous, ``size * n`` elements; not to be touched before the wait.
            what: Describes the operation; must be equal on all ranks.
            shard: This rank's values where ``flat`` does not hold them yet: 1-D contiguous, ``n``
                elements, of ``flat``'s dtype or a float to be rounded to it; the same dtype on
                all ranks.

        Raises:
            KernelArgumentError: Shapes or dtypes do not fit, or a tensor is not contiguous.
        """
        with self._errors():
            index = self._handle.gather(what, flat, shard)
        tensors = (flat,) if shard is None else (flat, shard)
        return self._started(_GATHER, index, tensors, lends=tensors[-1:])

    def reduce(self, flat: Tensor, out: Tensor, what: str, *, accumulate: bool = False) -> ShmWork:
        """Start to sum this rank's part of every rank's ``flat`` into ``out``.

        Args:
            flat: 1-D contiguous, ``size * n`` elements; not to be touched before the wait.
            out: 1-D contiguous, ``n`` elements of ``flat``'s dtype, or fp32 for 16-bit floats;
                may be this rank's own part of ``flat``.
            what: Describes the operation; must be equal on all ranks.
            accumulate: Add to ``out``.

        Raises:
            KernelArgumentError: Shapes or dtypes do not fit, or a tensor is not contiguous.
        """
        with self._errors():
            index = self._handle.reduce(what, _real(flat), _real(out), accumulate)
        return self._started(_REDUCE, index, (flat, out), lends=(flat,))

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> ShmWork:
        """Start to fill ``receive[r]`` with what rank ``r`` has in its ``send`` for this rank.

        Args:
            send: One contiguous tensor a rank; sizes may differ and be 0.
            receive: The same; not to be touched before the wait.
            what: Describes the operation; must be equal on all ranks.

        Raises:
            KernelArgumentError: There is not one tensor a rank, or one is not contiguous.
        """
        with self._errors():
            index = self._handle.all_to_all(what, send, receive)
        return self._started(_PIECES, index, (*send, *receive), lends=send)

    # ---- blocking ----------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, what: str = "all_reduce") -> Tensor:
        """Sum ``tensor`` over the ranks, in place; blocks.

        Args:
            tensor: Any shape, contiguous, the same on all ranks.
            what: Describes the operation; must be equal on all ranks.

        Raises:
            KernelArgumentError: The dtype has no sum, or the tensor is not contiguous.
        """
        with self._errors():
            self._handle.all_reduce(what, _real(tensor))
        return tensor

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, what: str = "reduce_scatter", *, accumulate: bool = False
    ) -> Tensor:
        """As :meth:`reduce`, but block, and move a chunk at a time; returns ``out``."""
        with self._errors():
            self._handle.reduce_scatter(what, _real(flat), _real(out), accumulate)
        return out

    def all_gather(
        self, row: Tensor, out: Tensor | None = None, what: str = "all_gather"
    ) -> Tensor:
        """Return every rank's ``row``, shape ``[size, *row.shape]``; blocks.

        Args:
            row: Contiguous, the same shape and dtype on all ranks.
            out: Contiguous, where to put the result.
            what: Describes the operation; must be equal on all ranks.

        Raises:
            KernelArgumentError: Shapes or dtypes do not fit, or a tensor is not contiguous.
        """
        if out is None:
            out = torch.empty((self.size, *row.shape), dtype=row.dtype)
        with self._errors():
            self._handle.all_gather(what, row, out)
        return out

    def broadcast(self, tensor: Tensor, source: int, what: str = "broadcast") -> Tensor:
        """Overwrite ``tensor`` with that of rank ``source``; blocks.

        Args:
            tensor: Any shape and dtype, contiguous, the same on all ranks.
            source: The rank whose values count.
            what: Describes the operation; must be equal on all ranks.

        Raises:
            KernelArgumentError: The source is no rank, or the tensor is not contiguous.
        """
        with self._errors():
            self._handle.broadcast(f"{what} from {source}", tensor, source)
        return tensor

    def close(self) -> None:
        """Leave the group.  Tensors of the segment stay valid."""
        self._handle.close()

    # ---- inner -------------------------------------------------------------------------------

    def _started(
        self, channel: int, index: int, tensors: tuple[Tensor, ...], *, lends: Sequence[Tensor]
    ) -> ShmWork:
        self._drop_complete()
        self._live.append((channel, index, tensors))
        settle = any(self.segment.contains(tensor) for tensor in lends)
        return ShmWork(self, channel, index, settle)

    def _finish(self, channel: int, index: int, settle: bool) -> None:
        with self._errors():
            self._handle.complete(channel, index)
            if settle:
                self._handle.settle(channel, index)
        self._drop_complete()

    def _drop_complete(self) -> None:
        while self._live and self._handle.completed(*self._live[0][:2]):
            self._live.popleft()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn native failures into typed errors."""
        try:
            yield
        except self._failure as failure:
            raise _typed(self.rank, failure) from None


def _typed(rank: int, failure: RuntimeError) -> ShmError:
    kind, peer, mine_raw, theirs_raw = failure.args
    mine = Place(mine_raw[0].decode(errors="replace"), *mine_raw[1:])
    if kind == 0:
        theirs = Place(theirs_raw[0].decode(errors="replace"), *theirs_raw[1:])
        message = f"rank {rank} runs {mine}, but rank {peer} runs {theirs} at the same place"
        return ShmDivergenceError(message, peer, mine, theirs)
    if kind == 1:
        message = f"{mine} on rank {rank} timed out: rank {peer} did not come"
        return ShmTimeoutError(message, peer, mine)
    how = "died" if kind == 2 else "left the group"
    return ShmPeerError(f"{mine} on rank {rank} failed: rank {peer} {how}", peer, mine)


def _real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers, since complex ones are added by their parts."""
    if not tensor.is_complex():
        return tensor
    parts = torch.view_as_real(tensor)
    return parts.flatten() if tensor.is_contiguous() else parts
