"""Gathering and releasing units.

A stage only decides which units are *releasable*; everything here does nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ds_comm.collectives import Collectives, Work
from ds_zero.flat import Presence, Unit
from ds_zero.saved import Kept, keep, kept_tensor, layered_saved_hooks
from ds_zero.tensors import tensors_in
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
        for run in unit.runs:
            run.check_hidden()
        works = []
        for run in unit.runs:
            run.buffer.inflate()
            works.append(self._collectives.gather(run.flat, run.layout.name, run.master))
        self._works[unit.index] = works
        unit.presence = Presence.GATHERING

    def ensure(self, unit: Unit) -> None:
        """Make the parameters of ``unit`` readable.  Collective when it was released."""
        if unit.presence is Presence.PRESENT:
            return
        self.start(unit)
        self._finish(unit)
        for run in unit.runs:
            run.expose()
        unit.versions = [param._version for param in unit.params]
        unit.presence = Presence.PRESENT

    def _finish(self, unit: Unit) -> None:
        """Wait for the gather of ``unit``; it is released again if that fails."""
        works = self._works.pop(unit.index)
        unit.presence = Presence.RELEASED
        for work in works:
            work.wait()

    def release(self, unit: Unit, *, check: bool = True) -> None:
        """Give the full values of ``unit`` back, unless it is held or never released.

        Args:
            unit: Any unit.
            check: Whether an edit is an error; not where the caller has dealt with it.

        Raises:
            EditError: A parameter was replaced or written to while it was gathered.
        """
        if not unit.releasable or unit.held or unit.presence is Presence.RELEASED:
            return
        if unit.presence is Presence.GATHERING:
            self._finish(unit)
        elif check:
            unit.check_unedited()
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
        self._last = here
        self.ensure(unit)
        follower = self._follower.get(here)
        if follower is not None and self._prefetch:
            self.start(self._units[follower])

    def ends_forward(self, unit: Unit) -> bool:
        """Whether the backward began right after this unit last time, so that it may stay."""
        return self._forward_tail == unit.index

    def begin_forward(self) -> None:
        """Forget the position, since a new forward begins elsewhere."""
        self._last = None

    def begin_backward(self) -> None:
        """Note where the forward ended: that unit is the first that the backward needs."""
        if self._last is not None and not self._last[0]:
            self._forward_tail = self._last[1]
        self._last = None

    # ---- saved tensors -----------------------------------------------------------------------

    def reaches_into(self, unit: Unit, output: Any) -> bool:
        """Whether ``output`` contains a view of ``unit``'s buffer, which must outlive the module.

        Args:
            unit: The unit of the module that returned ``output``.
            output: Tensors in any nesting.
        """
        if not unit.releasable:
            return False
        return any(self._unit_of(tensor) is unit for tensor in tensors_in(output))

    def _unit_of(self, tensor: Tensor) -> Unit | None:
        """The releasable unit whose buffer ``tensor`` is a view of."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return self._storages.get(tensor.untyped_storage().data_ptr())

    def watch_saved(self) -> AbstractContextManager[None]:
        """Return a context in which autograd's saved views of units are gathered on unpack.

        Views of a released buffer read as zeros; this net makes their first use gather again,
        whichever module they belong to.
        """
        return layered_saved_hooks(self._take_view, self._give_view)

    def _take_view(self, tensor: Tensor) -> tuple[Kept, Unit] | None:
        unit = self._unit_of(tensor)
        return None if unit is None else (keep(tensor), unit)

    def _give_view(self, taken: tuple[Kept, Unit]) -> Tensor:
        kept, unit = taken
        tensor = kept_tensor(kept)
        self.ensure(unit)
        return tensor
