"""From ``param.grad`` to reduced shards.

[Note: one door]
Every gradient enters through :meth:`GradientFlow.accumulate`: one pass that copies it into the
unit's flat buffer, converts its dtype and applies ``1 / (accumulation * world)`` (see
:class:`Averaging`); then ``param.grad`` is dropped.  A flat buffer of *local* gradients is
reduced as a whole into the *reduced* shard.  Stages 0 and 1 keep the local buffer until the
accumulation boundary, and the reduced shard is its own range of it where dtypes agree; stages 2
and 3 reduce after every micro-step, return the local buffer to a pool, and give the shard's memory
back after the step.

[Note: order of reductions]
Within a backward every unit is reduced exactly once, in an order that is the same on all ranks:
the reverse of the layout, resident units last.  A unit may be launched when it was *passed* (see
``tracker``) and all units before it in that order are launched; the rest follows at the end of
the backward.  So ranks that used different modules still pair the same buffers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ds_comm.collectives import Allocator, Collectives, Work
from ds_zero.flat import FlatRun, Unit
from ds_zero.memory import FlatBuffer, flat_buffer
from ds_zero.precision.entry import ScaleEntry
from ds_zero.rows import FlatReduction, RowCollectives
from ds_zero.stages import Extent, Stage
from ds_zero.trace import Trace

__all__ = ["Averaging", "GradientFlow", "RunGradients", "own_shard"]

logger = logging.getLogger(__name__)

POOL_LIMIT = 2
"""Reductions in flight, and flat buffers kept for them, at stages 2 and 3."""


@dataclass
class RunGradients:
    """The gradients of one trainable run on this rank."""

    run: FlatRun
    reduction: FlatReduction
    local: Tensor | None = None
    """``[numel]`` gradients of this rank that are not reduced yet."""
    seen: set[int] = field(default_factory=set)
    """Slots that were written in ``local``."""
    used: set[int] = field(default_factory=set)
    """Slots that received a gradient since the last step."""
    reduced: Tensor | None = None
    """Reduced gradients: this rank's shard in fp32, or at stage 0 the whole run."""
    shard: FlatBuffer | None = None
    """The memory of ``reduced`` where it is not a range of ``local``."""
    has_reduced: bool = False
    """Whether ``reduced`` holds values of the current window."""
    flying: bool = False
    """Whether ``local`` is being reduced and must not be touched."""
    carry: Tensor | None = None
    """What earlier backwards of the window reduced, where ``reduced`` is a range of ``local``."""
    probe: Tensor | None = None
    """Sum of what this rank gave to reductions of the window, if gradients are watched."""

    def watch(self, values: Tensor) -> None:
        """Take note of what is about to be reduced; does not synchronise."""
        total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        self.probe = total if self.probe is None else self.probe + total

    def suspect(self) -> bool:
        """Whether something that was not finite went into a watched reduction."""
        return self.probe is not None and not bool(torch.isfinite(self.probe))


def own_shard(gradients: RunGradients) -> Tensor | None:
    """This rank's shard of the reduced gradients, also at stage 0; None if there are none."""
    reduced = gradients.reduced
    if reduced is None or not gradients.has_reduced:
        return None
    run = gradients.run
    if reduced.numel() == run.layout.shard_numel:
        return reduced
    return reduced[slice(*run.layout.shard_range(run.shard))]


@dataclass(frozen=True)
class Averaging:
    """How gradients of ranks and micro-steps are combined."""

    mean: bool = True
    """Average over the ranks; otherwise they are summed, and only micro-steps are averaged."""
    predivide: float = 1.0
    """Divide by this before the reduction and by the rest at the step; 1 divides by everything
    before it."""

    def factor_before(self, accumulation: int, world: int) -> float:
        """By what a gradient is multiplied before the reduction."""
        ranks = world if self.mean else 1
        return 1.0 / (accumulation * (ranks if self.predivide == 1.0 else self.predivide))

    def factor_after(self, world: int) -> float:
        """By what the reduced gradient is still to be multiplied."""
        if self.predivide == 1.0:
            return 1.0
        return self.predivide / (world if self.mean else 1)


class BufferPool:
    """A few flat buffers that are handed out in turn, so that their pages stay warm."""

    def __init__(
        self, device: torch.device, max_bytes: int, allocator: Allocator | None = None
    ) -> None:
        """Serve requests of up to ``max_bytes`` on ``device``."""
        self._device = device
        self._allocator = allocator
        self._max_bytes = max_bytes
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``[numel]`` elements with undefined contents."""
        whole = (
            self._free.pop()
            if self._free
            else flat_buffer(self._max_bytes, torch.uint8, self._device, self._allocator).tensor
        )
        return whole[: numel * dtype.itemsize].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Take a buffer back; it is dropped when enough are kept."""
        if len(self._free) < POOL_LIMIT:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole.set_(
                tensor.untyped_storage(),  # type: ignore[call-overload]
                tensor.storage_offset() * tensor.element_size(),
                (self._max_bytes,),
            )
            self._free.append(whole)


class GradientFlow:
    """Takes gradients in, reduces them, and hands them to the optimiser."""

    def __init__(
        self,
        units: Sequence[Unit],
        stage: Stage,
        collectives: Collectives,
        trace: Trace,
        *,
        accumulation: int,
        accumulation_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        averaging: Averaging | None = None,
        entry: ScaleEntry | None = None,
    ) -> None:
        """Own the gradients of ``units``.

        Args:
            units: In layout order.
            stage: What a rank keeps.
            collectives: The group over which gradients are averaged.
            trace: Where reductions are noted.
            accumulation: Micro-steps per optimiser step.
            accumulation_dtype: Dtype of local sums; fp32 by default where there are any.
            wire_dtype: Dtype in which gradients travel; that of the local buffer by default.
            averaging: How ranks are combined; their mean by default.
            entry: Tells by what loss scale arriving gradients are multiplied.
        """
        self._units = units
        self._stage = stage
        self._collectives = collectives
        self._trace = trace
        self._accumulation_dtype = accumulation_dtype or torch.float32
        self._wire_dtype = wire_dtype
        self.accumulating = accumulation > 1
        self.accumulation = accumulation
        self.by_unit: list[list[RunGradients]] = [
            [
                RunGradients(run, _reduction(run, collectives))
                for run in unit.runs
                if run.layout.trainable
            ]
            for unit in units
        ]
        self._place: dict[int, tuple[RunGradients, int]] = {
            id(param): (gradients, slot)
            for unit in self.by_unit
            for gradients in unit
            for slot, param in enumerate(gradients.run.params)
        }
        self._flight: deque[tuple[RunGradients, Work]] = deque()
        trainable = [g.run for g in self.all_runs()]
        self.device = device = trainable[0].flat.device if trainable else torch.device("cpu")
        """Where gradients are."""
        self.watching = False
        """Whether local gradients are looked at before they are reduced; see ``non_finite``."""
        self._averaging = averaging or Averaging()
        self._entry = entry or ScaleEntry(None)
        self._window_scale: float | None = None
        self._arrived = 1.0
        largest = max(
            (r.layout.numel * max(4, r.layout.dtype.itemsize) for r in trainable), default=0
        )
        self._pool = BufferPool(device, largest, collectives.allocator)
        self._factor = torch.ones(1, dtype=torch.float32, device=device)
        self.set_accumulation(accumulation)
        # Resident units have no module that could pass them: they come last.
        order = sorted(reversed(range(len(units))), key=lambda i: units[i].layout.resident)
        self._queue = [index for index in order if self.by_unit[index]]
        self._next = 0
        self._ready: set[int] = set()

    def set_accumulation(self, accumulation: int) -> None:
        """Average over ``accumulation`` micro-steps from now on."""
        self.accumulation = accumulation
        self.accumulating = accumulation > 1
        self._set_factor()

    def _set_factor(self) -> None:
        """Prepare the factor of gradients that arrive with the scale ``_arrived``."""
        before = self._averaging.factor_before(self.accumulation, self._collectives.group.size)
        self._scale = before * (self.loss_scale / self._arrived)
        self._factor.fill_(self._scale)

    @property
    def loss_scale(self) -> float:
        """By what loss scale the gradients of this window are multiplied."""
        return self._window_scale if self._window_scale is not None else self._entry.scale

    @property
    def multiplier(self) -> float:
        """What reduced gradients have to be divided by to be those of the loss."""
        return self.loss_scale / self._averaging.factor_after(self._collectives.group.size)

    def all_runs(self) -> list[RunGradients]:
        """The gradients of every trainable run, in layout order."""
        return [gradients for unit in self.by_unit for gradients in unit]

    def trainable_params(self) -> list[nn.Parameter]:
        """The parameters that take gradients in."""
        return [param for gradients in self.all_runs() for param in gradients.run.params]

    def accumulate(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add one gradient; see [Note: one door].  Not collective.

        Args:
            param: A trainable parameter of the model.
            grad: Gradient of this rank's loss, in the parameter's shape, any dtype and strides.

        Raises:
            EngineError: No loss scale has entered this backward, and one is needed.
        """
        arrived = self._entry.arrived()
        if arrived != self._arrived or self._window_scale is None:
            self._window_scale = self.loss_scale
            self._arrived = arrived
            self._set_factor()
        gradients, index = self._place[id(param)]
        local = self._local(gradients)
        slot = gradients.run.layout.slots[index]
        target = local[slot.start : slot.stop].view(slot.spec.shape)
        if grad.is_sparse and grad.sparse_dim() == 1:
            if index not in gradients.seen:
                target.zero_()
            grad = grad.coalesce()
            values = grad.values().to(target.dtype)
            target.index_add_(0, grad.indices()[0], values, alpha=self._scale)
        elif index in gradients.seen:
            target.add_(grad, alpha=self._scale)
        elif grad.dtype == target.dtype:
            torch.mul(grad, self._scale, out=target)
        else:
            # A Python scalar would round in the gradient's 16 bits first; a 1-element fp32
            # tensor promotes, so that the product is rounded once, into the target.
            torch.mul(grad, self._factor, out=target)
        gradients.seen.add(index)
        gradients.used.add(index)

    def _local(self, gradients: RunGradients) -> Tensor:
        """The run's buffer of local gradients, taken from the pool when it has none."""
        if gradients.flying:
            self.drain()  # a late gradient: its buffer is on the wire
        if gradients.has_reduced and not gradients.seen:
            self._stash(gradients)
        if gradients.local is not None and (
            gradients.seen or gradients.local.dtype == self._local_dtype(gradients)
        ):
            return gradients.local
        if self._stage.gradients is Extent.FULL:
            gradients.local = flat_buffer(
                gradients.run.layout.numel,
                self._local_dtype(gradients),
                gradients.run.flat.device,
                self._collectives.allocator,
            ).tensor
        else:
            while len(self._flight) >= POOL_LIMIT:
                self._land()
            gradients.local = self._pool.take(
                gradients.run.layout.numel, self._local_dtype(gradients)
            )
        return gradients.local

    def _local_dtype(self, gradients: RunGradients) -> torch.dtype:
        dtype = gradients.run.layout.dtype
        if not self.accumulating or dtype == torch.float64:
            return dtype
        return self._accumulation_dtype

    def _reduced_dtype(self, gradients: RunGradients) -> torch.dtype:
        return torch.promote_types(gradients.run.master.dtype, self._accumulation_dtype)

    def _stash(self, gradients: RunGradients) -> None:
        """Put reduced values aside before the buffer that they are in takes local ones again."""
        if gradients.shard is None and gradients.reduced is not None:
            gradients.carry = gradients.reduced.to(self._reduced_dtype(gradients), copy=True)
            gradients.has_reduced = False

    # ---- reduction ---------------------------------------------------------------------------

    def mark_passed(self, unit: Unit) -> None:
        """Launch reductions up to this unit's place in the order; see [Note: order …]."""
        self._ready.add(unit.index)
        while self._next < len(self._queue) and self._queue[self._next] in self._ready:
            self._launch(self._queue[self._next])
            self._next += 1

    def finish_backward(self) -> None:
        """Launch what is left, in order, and wait for everything.  Collective."""
        while self._next < len(self._queue):
            self._launch(self._queue[self._next])
            self._next += 1
        self.drain()
        self.restart_order()

    def restart_order(self) -> None:
        """Begin the order of reductions anew."""
        self._next = 0
        self._ready.clear()

    def flush(self, units: Sequence[int]) -> None:
        """Reduce the local gradients of ``units`` outside of a backward.  Collective."""
        for index in units:
            self._launch(index)
        self.drain()

    def unreduced(self) -> list[int]:
        """Units whose local gradients were not reduced yet (late arrivals, ``no_sync``)."""
        return [i for i, unit in enumerate(self.by_unit) if any(g.seen for g in unit)]

    def _launch(self, index: int) -> None:
        self._trace.add("reduce", index)
        for gradients in self.by_unit[index]:
            local = self._local(gradients)
            for slot, place in enumerate(gradients.run.layout.slots):
                if slot not in gradients.seen:
                    local[place.start : place.stop].zero_()
            for start, stop in gradients.run.layout.gaps:
                local[start:stop].zero_()
            gradients.seen.clear()
            wire = local if self._wire_dtype in (None, local.dtype) else local.to(self._wire_dtype)
            whole = self._stage.optimizer is Extent.FULL
            if whole or self._reduces_in_place(gradients, wire):
                out = wire[slice(*gradients.run.layout.shard_range(gradients.run.shard))]
                gradients.reduced = wire if whole else out
                accumulate = False
            else:
                out = self._shard(gradients)
                accumulate = gradients.has_reduced
            if self.watching:
                gradients.watch(wire)
            name = gradients.run.layout.name
            work = gradients.reduction.reduce(wire, out, name, accumulate=accumulate)
            gradients.has_reduced = gradients.flying = True
            self._flight.append((gradients, work))

    def _reduces_in_place(self, gradients: RunGradients, wire: Tensor) -> bool:
        """Whether the reduced shard can be this rank's own range of the local buffer."""
        kept = self._stage.gradients is Extent.FULL and wire is gradients.local
        return kept and wire.dtype == self._reduced_dtype(gradients) and gradients.shard is None

    def _shard(self, gradients: RunGradients) -> Tensor:
        """The run's buffer of reduced gradients, inflated."""
        if gradients.shard is None:
            gradients.shard = flat_buffer(
                gradients.run.layout.shard_numel,
                self._reduced_dtype(gradients),
                gradients.run.flat.device,
            )
        gradients.shard.inflate()
        gradients.reduced = gradients.shard.tensor
        return gradients.reduced

    def _land(self) -> None:
        """Wait for the oldest reduction and return its buffer."""
        gradients, work = self._flight.popleft()
        work.wait()
        gradients.flying = False
        if self._stage.gradients is Extent.SHARD and gradients.local is not None:
            self._pool.give(gradients.local)
            gradients.local = None

    def drain(self) -> None:
        """Wait for all reductions in flight; at stage 0 also bring the sums to every rank."""
        whole = self._stage.optimizer is Extent.FULL
        landed = []
        gathers = []
        while self._flight:
            gradients = self._flight[0][0]
            self._land()
            landed.append(gradients)
            if whole and gradients.reduced is not None:
                name = gradients.run.layout.name
                gathers.append(gradients.reduction.gather(gradients.reduced, name))
        for gather in gathers:
            gather.wait()
        for gradients in landed:
            if gradients.carry is not None and gradients.reduced is not None:
                total = gradients.carry.add_(gradients.reduced)
                gradients.reduced = total if whole else gradients.reduced.copy_(total)
                gradients.carry = None

    # ---- around the step ---------------------------------------------------------------------

    @property
    def exposes_grads(self) -> bool:
        """Whether ``param.grad`` shows reduced gradients: where every rank has them whole.

        Not where they still are to be divided by a factor of the engine's.
        """
        untouched = self._entry.scaler is None and self._averaging.predivide == 1.0
        return self._stage.optimizer is Extent.FULL and untouched

    def expose_grads(self) -> None:
        """Stage 0: let ``param.grad`` show the reduced gradient, as a view where dtypes agree."""
        if not self.exposes_grads:
            return
        for gradients in self.all_runs():
            if gradients.reduced is None or not gradients.has_reduced:
                continue
            if gradients.reduced.dtype != gradients.run.layout.dtype:
                continue
            for param, slot in zip(gradients.run.params, gradients.run.layout.slots, strict=True):
                param.grad = gradients.reduced[slot.start : slot.stop].view(slot.spec.shape)

    def hide_grads(self) -> None:
        """Take the views of :meth:`expose_grads` away, so that autograd does not add to them."""
        for param in self.trainable_params():
            param.grad = None

    def clear(self) -> None:
        """Forget all gradients; waits for what is in flight."""
        self.drain()
        for gradients in self.all_runs():
            if self._stage.gradients is Extent.SHARD and gradients.local is not None:
                self._pool.give(gradients.local)
                gradients.local = None
            if self._stage.gradients is Extent.SHARD and gradients.shard is not None:
                gradients.shard.deflate()
            gradients.seen.clear()
            gradients.used.clear()
            gradients.has_reduced = False
            gradients.carry = None
            gradients.probe = None
        self._window_scale = None
        self.restart_order()


def _reduction(run: FlatRun, collectives: Collectives) -> FlatReduction:
    """How the gradients of a run travel; see [Note: rows] in ``rows``."""
    spec = run.layout.slots[0].spec
    if not spec.sparse or collectives.group.size == 1 or not spec.numel:
        return collectives
    return RowCollectives(collectives, spec.shape[0], spec.numel // spec.shape[0])
