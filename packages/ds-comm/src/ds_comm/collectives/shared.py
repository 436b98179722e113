"""Flat collectives through memory that the ranks of one host share, the fastest way on a CPU.

ds_kernels holds the segments and the loops; this module decides whether ranks can share memory,
and speaks the protocol and the errors of ds_comm.  No rank waits inside of a collective for what
another computes: it announces where its data lie, and reads those of its peers when it waits.
Tensors from :attr:`SharedCollectives.allocator` are read in place, others are copied in once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.collectives.base import Allocator, Done, Work
from ds_comm.collectives.divergence import divergence
from ds_comm.collectives.objects import gather_objects
from ds_comm.errors import CommError, CommTimeoutError
from ds_comm.group import Group
from ds_comm.logging import get_logger, log_once

if TYPE_CHECKING:
    from ds_kernels.shm import SharedGroup, SharedSegment, ShmError, ShmWork

__all__ = ["SharedCollectives", "connect_shared"]

_LOGGER = get_logger(__name__)
_SWITCH = "DS_COMM_SHM"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ADDRESSES_BYTES = 4 << 40
"""What the segments of a group take of a process's address space at most."""


class _SharedWork:
    """A collective in flight, with the errors of ds_comm."""

    def __init__(self, owner: SharedCollectives, work: ShmWork) -> None:
        self._owner = owner
        self._work = work

    def wait(self) -> None:
        with self._owner.typed_errors():
            self._work.wait()


class SharedCollectives:
    """Flat collectives of CPU ranks of one host.  Made by :func:`connect_shared`."""

    def __init__(self, group: Group, shared: SharedGroup) -> None:
        """Serve ``group`` through its connected memory."""
        self.group = group
        self._shared = shared

    @property
    def allocator(self) -> Allocator | None:
        """Makes tensors in this rank's segment."""
        return self._shared.segment.allocate

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.gather`."""
        if flat.numel() == 0:
            return Done()
        with self.typed_errors():
            return _SharedWork(self, self._shared.gather(flat, f"gather of {label!r}", shard))

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.reduce`."""
        if flat.numel() == 0:
            return Done()
        what = f"reduce of {label!r}"
        with self.typed_errors():
            return _SharedWork(self, self._shared.reduce(flat, out, what, accumulate=accumulate))

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.all_to_all`."""
        with self.typed_errors():
            return _SharedWork(
                self, self._shared.all_to_all(send, receive, f"all_to_all of {label!r}")
            )

    def exchange(self, row: Tensor) -> Tensor:
        """See :meth:`ds_comm.collectives.base.Collectives.exchange`."""
        with self.typed_errors():
            return self._shared.all_gather(row, what="exchange")

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See :meth:`ds_comm.collectives.base.Collectives.broadcast`."""
        with self.typed_errors():
            self._shared.broadcast(tensor, source)

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Turn errors of ds_kernels into those of ds_comm, with global ranks."""
        from ds_kernels.shm import ShmError

        try:
            yield
        except ShmError as error:
            raise self._typed(error) from error

    def _typed(self, error: ShmError) -> CommError:
        from ds_kernels.shm import ShmDivergenceError, ShmTimeoutError

        me, peer = self.group.ranks[self.group.rank], self.group.ranks[error.peer]
        if isinstance(error, ShmDivergenceError):
            return divergence(me, str(error.mine), peer, str(error.theirs))
        late = isinstance(error, ShmTimeoutError)
        how = "did not come in time" if late else "died or left the group"
        text = f"{error.mine.what} on rank {me} failed: rank {peer} {how}"
        return (CommTimeoutError if late else CommError)(text)


@dataclass(frozen=True)
class _Offer:
    """What one rank tells the others before they connect."""

    host: str
    """Equal for processes that can open each other's memory."""
    address: str
    problem: str
    """Why this rank cannot share memory; empty if it can."""


def connect_shared(group: Group) -> SharedCollectives | None:
    """Connect the ranks of ``group`` through shared memory.  Collective; all get the same answer.

    Args:
        group: At least two ranks, with a handle that moves CPU objects.

    Returns:
        None where ranks cannot share memory: the reason is logged once.  ``DS_COMM_SHM=0`` of any
        rank turns it off.
    """
    host, problem = _host_key()
    problem = _obstacle() or problem
    segment: SharedSegment | None = None
    if not problem:
        from ds_kernels.shm import SharedSegment

        try:
            segment = SharedSegment(_capacity_bytes(group.size))
        except OSError as error:
            problem = f"no shared memory: {error}"
    offers = gather_objects(_Offer(host, segment.address if segment else "", problem), group)
    problem = _disagreement(offers, group)
    if problem or segment is None:
        log_once(_LOGGER, "info", "ranks talk over gloo, not through shared memory: %s", problem)
        return None
    shared, problem = _open(segment, [offer.address for offer in offers], group)
    # Ranks close nothing before all have connected, and agree on the outcome.
    problems = gather_objects(problem, group)
    if shared is None or any(problems):
        reason = next(text for text in problems if text)
        log_once(_LOGGER, "info", "ranks talk over gloo, not through shared memory: %s", reason)
        return None
    return SharedCollectives(group, shared)


def _obstacle() -> str:
    """Why this process cannot take part, or an empty string."""
    if os.environ.get(_SWITCH, "").strip() == "0":
        return f"{_SWITCH}=0"
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if find_spec("ds_kernels") is None:
        return "ds-kernels is not installed (pip install ds-comm[kernels])"
    from ds_kernels import native_status

    return native_status().reason


def _host_key() -> tuple[str, str]:
    """Names the running kernel, the PID namespace and the user; and why that is not known."""
    if sys.platform != "linux":
        return "", ""
    try:
        boot = _BOOT_ID.read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return "", f"it cannot be told which ranks are on one host: {error}"
    return f"{boot} {namespace} {os.getuid()}", ""


def _capacity_bytes(num_ranks: int) -> int:
    """Size of a rank's segment: the machine's memory, as far as addresses reach.

    Every rank maps every segment, so that many ranks on a large machine would run out of the
    128 TiB that a process can address; with their share of 4 TiB, many groups fit.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory_bytes, _ADDRESSES_BYTES // num_ranks)


def _disagreement(offers: Sequence[_Offer], group: Group) -> str:
    """Why these ranks cannot share memory; the same text on all of them."""
    for rank, offer in zip(group.ranks, offers, strict=True):
        if offer.problem:
            return f"{offer.problem} (rank {rank})"
        if offer.host != offers[0].host:
            return f"ranks {group.ranks[0]} and {rank} are on different hosts, or not of one user"
    return ""


def _open(
    segment: SharedSegment, addresses: Sequence[str], group: Group
) -> tuple[SharedGroup | None, str]:
    from ds_kernels.shm import SharedGroup

    try:
        shared = SharedGroup(
            segment, addresses, group.rank, timeout_s=_timeout_s(group), chunk_bytes=1 << 19
        )
    except RuntimeError as error:
        return None, f"{error} (rank {group.ranks[group.rank]})"
    return shared, ""


def _timeout_s(group: Group) -> float:
    """The time-out of the group's collectives."""
    assert isinstance(group.handle, dist.ProcessGroup)
    backend = group.handle._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())
