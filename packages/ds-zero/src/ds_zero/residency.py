"""Gathering and releasing units.

A stage only decides which units are *releasable*; everything here does nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ds_comm.collectives import Collectives, Work
from ds_zero.flat import Presence, Unit
from ds_zero.trace import Trace

__all__ = ["Residency"]


class Residency:
    """Brings the full values of units to this rank and lets them go."""

    def __init__(
        self, units: Sequence[Unit], collectives: Collectives, trace: Trace, *, prefetch: bool
    ) -> None:
        """Manage ``units`` (in layout order) over the group of ``collectives``."""
        self._prefetch = prefetch
        self._units = units
        self._collectives = collectives
        self._trace = trace
        self._works: dict[int, list[Work]] = {}
        self._follower: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        self._forward_tail: int | None = None
        self._storages = {
            run.flat.untyped_storage().data_ptr(): unit
            for unit in units
            if unit.releasable
            for run in unit.runs
        }

    # ---- one unit ----------------------------------------------------------------------------

    def start(self, unit: Unit) -> None:
        """Begin to gather ``unit`` if it is released.  Collective.

        Raises:
            EditError: A released parameter was edited.
        """
        if unit.presence is not Presence.RELEASED:
            return
        self._trace.add("gather", unit.index)
        works = []
        for run in unit.runs:
            run.check_hidden()
            run.buffer.inflate()
            run.publish_master()
            works.append(self._collectives.gather(run.flat, run.layout.name))
        self._works[unit.index] = works
        unit.presence = Presence.GATHERING

    def ensure(self, unit: Unit) -> None:
        """Make the parameters of ``unit`` readable.  Collective when it was released."""
        if unit.presence is Presence.PRESENT:
            return
        self.start(unit)
        for work in self._works.pop(unit.index):
            work.wait()
        for run in unit.runs:
            run.expose()
        unit.presence = Presence.PRESENT

    def release(self, unit: Unit) -> None:
        """Give the full values of ``unit`` back, unless it is held or never released.

        Raises:
            EditError: A parameter was replaced while it was gathered.
        """
        if not unit.releasable or unit.held or unit.presence is Presence.RELEASED:
            return
        if unit.presence is Presence.GATHERING:
            for work in self._works.pop(unit.index):
                work.wait()
        else:
            for run in unit.runs:
                run.check_exposed()
        for run in unit.runs:
            run.hide()
            run.buffer.deflate()
        unit.presence = Presence.RELEASED

    def release_all(self) -> None:
        """Release every unit that may be."""
        for unit in self._units:
            self.release(unit)

    # ---- prefetch ----------------------------------------------------------------------------

    def use(self, unit: Unit, *, backward: bool) -> None:
        """Make ``unit`` readable, and begin to gather the unit that followed it last time.

        Args:
            unit: The unit whose module is about to run.
            backward: Whether this is a use in the backward pass.
        """
        if not unit.releasable:
            return
        here = (backward, unit.index)
        if self._last is not None and self._last[0] == backward and self._last != here:
            self._follower[self._last] = unit.index
        if backward and self._last is not None and not self._last[0]:
            self._forward_tail = self._last[1]
        self._last = here
        self.ensure(unit)
        follower = self._follower.get(here)
        if follower is not None and self._prefetch:
            self.start(self._units[follower])

    def ends_forward(self, unit: Unit) -> bool:
        """Whether the backward began right after this unit last time, so that it may stay."""
        return self._forward_tail == unit.index

    def begin_pass(self) -> None:
        """Forget the position, since a new forward or backward begins elsewhere."""
        self._last = None

    # ---- saved tensors -----------------------------------------------------------------------

    def watch_saved(self) -> AbstractContextManager[None]:
        """Return a context in which autograd's saved views of units are gathered on unpack.

        Views of a released buffer read as zeros; this net makes their first use gather again,
        whichever module they belong to.
        """
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, Unit | None]:
        if tensor.device.type == "meta" or not self._storages:
            return tensor, None
        return tensor, self._storages.get(tensor.untyped_storage().data_ptr())

    def _unpack(self, packed: tuple[Tensor, Unit | None]) -> Tensor:
        tensor, unit = packed
        if unit is not None:
            self.ensure(unit)
        return tensor
