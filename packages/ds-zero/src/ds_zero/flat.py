"""Runs and units with memory: the tensors behind a layout.

[Note: master]
The optimiser updates a run's *master*: this rank's shard, or at stage 0 the whole run; fp32
wherever the run is trainable.  Where the master has the run's own dtype and the run is never
released, it is no copy but the shard's range of the flat buffer.  On request masters have the
run's own dtype even if it is a 16-bit one.

[Note: placeholder]
A released parameter's ``data`` is its own 0-dim NaN expanded to the true shape: shape, ``numel``
and dtype stay right, the memory is one element, and a read gives NaN instead of a silent zero.
Pointer and value are checked at every gather, so that an edit of a released parameter is an
error instead of being lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ds_comm.collectives import Allocator
from ds_comm.errors import EditError
from ds_zero.layout import ModelLayout, Run, UnitLayout
from ds_zero.memory import FlatBuffer, flat_buffer
from ds_zero.nursery import hand_over
from ds_zero.presence import Presence, Present
from ds_zero.stages import Extent, Stage
from ds_zero.units import UnitPlan

__all__ = ["FlatRun", "Presence", "Present", "Unit", "build_units"]

Broadcast = Callable[[Tensor], None]
"""Overwrites a tensor on every rank with that of rank 0."""


@dataclass(frozen=True)
class FlatRun:
    """The tensors of one run."""

    layout: Run
    params: tuple[nn.Parameter, ...]
    """In slot order."""
    buffer: FlatBuffer
    views: tuple[Tensor, ...]
    """Each parameter's range of the flat buffer, in its shape."""
    marks: Tensor
    """One NaN a parameter; see [Note: placeholder]."""
    placeholders: tuple[Tensor, ...]
    """Each parameter's NaN, expanded to its shape."""
    master: Tensor
    """1-D; see [Note: master]."""
    master_range: tuple[int, int]
    """Which elements of the run the master holds."""
    shard: int
    """Which shard of the run belongs to this rank."""

    @property
    def flat(self) -> Tensor:
        """The whole run, ``[numel]``, in the forward dtype."""
        return self.buffer.tensor

    @property
    def aliased(self) -> bool:
        """Whether the master is a view of the flat buffer."""
        start = self.master_range[0]
        return self.master.dtype == self.flat.dtype and (
            self.master.data_ptr() == self.flat.data_ptr() + start * self.flat.element_size()
        )

    @property
    def master_copy(self) -> Tensor:
        """The master's range of the flat buffer, in the forward dtype."""
        return self.flat[slice(*self.master_range)]

    def publish_master(self) -> None:
        """Write the master's values into its range of the flat buffer, in the forward dtype."""
        if not self.aliased:
            self.master_copy.copy_(self.master)

    def master_shard(self) -> Tensor:
        """This rank's shard of the master, ``[shard_numel]``, also at stage 0."""
        begin, end = self.layout.shard_range(self.shard)
        offset = self.master_range[0]
        return self.master[begin - offset : end - offset]

    def adopt(self, index: int) -> None:
        """Write the flat buffer's values of one slot into the master, as far as it holds them."""
        slot = self.layout.slots[index]
        begin, end = self.master_range
        low, high = max(slot.start, begin), min(slot.stop, end)
        if low < high and not self.aliased:
            self.master[low - begin : high - begin].copy_(self.flat[low:high])

    def expose(self) -> None:
        """Point every parameter at its view."""
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view

    def hide(self) -> None:
        """Point every parameter at its placeholder."""
        for param, placeholder in zip(self.params, self.placeholders, strict=True):
            param.data = placeholder

    def check_hidden(self) -> None:
        """Raise unless every parameter still is its untouched placeholder.

        Raises:
            EditError: A parameter was replaced or written to while it was released.
        """
        for index, param in enumerate(self.params):
            mark = self.placeholders[index]
            if param.numel() and (param.data_ptr() != mark.data_ptr() or param.dtype != mark.dtype):
                raise EditError(_edited(self.layout.slots[index].spec.name, "replaced"))
        if self.marks.is_cpu and not bool(self.marks.isnan().all()):
            index = int((~self.marks.isnan()).nonzero()[0])
            raise EditError(_edited(self.layout.slots[index].spec.name, "written to"))

    def check_exposed(self) -> None:
        """Raise unless every parameter still is its view of the flat buffer.

        Raises:
            EditError: ``param.data`` was replaced.
        """
        for param, view, slot in zip(self.params, self.views, self.layout.slots, strict=True):
            if param.numel() and (param.data_ptr() != view.data_ptr() or param.dtype != view.dtype):
                raise EditError(_edited(slot.spec.name, "replaced"))


def _edited(name: str, how: str) -> str:
    return (
        f"parameter {name!r} was {how} outside of the engine, and the change would be lost. Edit "
        "it inside `with ds_zero.GatheredParameters([param], modifier_rank=0):`, or load values "
        "with engine.load_module_state_dict()."
    )


@dataclass
class Unit:
    """What is gathered, released and reduced together."""

    index: int
    layout: UnitLayout
    runs: tuple[FlatRun, ...]
    modules: tuple[nn.Module, ...]
    releasable: bool
    """Whether it is released between uses."""
    presence: Presence = Presence.PRESENT
    held: int = 0
    """How many contexts (gathered parameters, held graphs) forbid a release."""
    calls_running: int = 0
    """Forward calls of its modules that have not returned."""
    calls_pending: int = 0
    """Forward calls whose backward has not begun; see ``tracker``."""
    versions: list[int] = field(default_factory=list)
    """Version counter of each parameter when it was gathered."""

    @property
    def name(self) -> str:
        """Name of the unit, for messages."""
        return self.layout.name

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters of the unit."""
        return [param for run in self.runs for param in run.params]

    def check_unedited(self) -> None:
        """Raise if a gathered parameter was replaced or written to since the gather.

        Raises:
            EditError: The change would be lost at the release.
        """
        for run in self.runs:
            run.check_exposed()
        for param, version, name in zip(self.params, self.versions, self._names, strict=True):
            if param._version != version:
                raise EditError(_edited(name, "written to"))

    @property
    def _names(self) -> list[str]:
        return [slot.spec.name for run in self.runs for slot in run.layout.slots]


def build_units(
    layout: ModelLayout,
    plans: Sequence[UnitPlan],
    params: Mapping[str, nn.Parameter],
    stage: Stage,
    shard: int,
    broadcast: Broadcast,
    *,
    narrow_masters: bool = False,
    allocator: Allocator | None = None,
) -> list[Unit]:
    """Move every parameter into flat buffers with rank 0's values; collective.

    Args:
        layout: Places of all parameters, made from ``plans``.
        plans: The units, in the layout's order.
        params: All parameters by name; their ``data`` is replaced.
        stage: What a rank keeps.
        shard: Which shard belongs to this rank.
        broadcast: How rank 0's values reach the others.
        narrow_masters: Let trainable runs of a 16-bit dtype have masters of that dtype.
        allocator: Of memory from which other ranks gather.
    """
    units = []
    for index, (unit, plan) in enumerate(zip(layout.units, plans, strict=True)):
        releasable = stage.params is Extent.SHARD and not unit.resident
        runs = tuple(
            _build_run(run, params, stage, shard, releasable, broadcast, narrow_masters, allocator)
            for run in unit.runs
        )
        built = Unit(index, unit, runs, plan.modules, releasable)
        if releasable:
            for run in runs:
                run.hide()
                run.buffer.deflate()
            built.presence = Presence.RELEASED
        units.append(built)
    return units


def _build_run(
    run: Run,
    params: Mapping[str, nn.Parameter],
    stage: Stage,
    shard: int,
    releasable: bool,
    broadcast: Broadcast,
    narrow_masters: bool,
    allocator: Allocator | None,
) -> FlatRun:
    """Allocate one run, fill it with rank 0's values, and point its parameters into it."""
    members = tuple(params[slot.spec.name] for slot in run.slots)
    device = members[0].device
    # Peers gather from the masters of what is released, else from the run after the step.
    keeps_all = stage.optimizer is Extent.FULL
    gathered = run.trainable and not keeps_all and not releasable
    buffer = flat_buffer(run.numel, run.dtype, device, allocator if gathered else None)
    flat = buffer.tensor
    narrow = run.dtype.is_floating_point and run.dtype.itemsize < 4
    widened = run.trainable and narrow and not narrow_masters
    master_dtype = torch.float32 if widened else run.dtype
    whole = (
        flat
        if master_dtype == run.dtype
        else torch.zeros(run.numel, dtype=master_dtype, device=device)
    )
    shared = True
    for slot, param in zip(run.slots, members, strict=True):
        target = whole[slot.start : slot.stop]
        if not hand_over(param, target):
            target.copy_(param.detach().reshape(-1))
            shared = False
    if not shared:  # what Init has sharded is the same on every rank already
        broadcast(whole)
    if whole is not flat:
        flat.copy_(whole)
    bounds = (0, run.numel) if keeps_all else run.shard_range(shard)
    master = whole[slice(*bounds)]
    if releasable or whole is not flat:
        master = _own_copy(master, allocator if releasable else None)
    nan = float("nan") if run.dtype.is_floating_point else 0
    marks = torch.full((len(members),), nan, dtype=run.dtype, device=device)
    result = FlatRun(
        layout=run,
        params=members,
        buffer=buffer,
        views=tuple(flat[s.start : s.stop].view(s.spec.shape) for s in run.slots),
        marks=marks,
        placeholders=tuple(
            mark.expand(param.shape) for mark, param in zip(marks, members, strict=True)
        ),
        master=master,
        master_range=bounds,
        shard=shard,
    )
    result.expose()
    return result


def _own_copy(values: Tensor, allocator: Allocator | None) -> Tensor:
    """Copy ``values`` into a buffer of its own, on huge pages where possible."""
    own = flat_buffer(values.numel(), values.dtype, values.device, allocator).tensor
    own.copy_(values)
    return own
