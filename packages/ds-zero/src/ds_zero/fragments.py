"""Reading and setting what belongs to one parameter, wherever its shards are.

[Note: fragments]
A parameter's fp32 values, its reduced gradient and its optimiser states lie in shards over the
ranks.  ``safe_get_full_*`` bring one of them together, ``safe_set_full_*`` write it back so that
every copy follows; both work at every stage and are collective.  ``safe_get_local_*`` and
``safe_set_local_*`` touch this rank's part of a sharded parameter and communicate nothing.  Frozen
parameters and parameters of no engine have nothing to read: None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_comm.collectives import all_reduce, gather_objects
from ds_comm.errors import DivergenceError, EditError, EngineError
from ds_zero.core import ZeroCore
from ds_zero.flat import FlatRun, Unit
from ds_zero.gradients import RunGradients, own_shard
from ds_zero.optim.base import ShardOptimizer, StateRange
from ds_zero.registry import core_of
from ds_zero.tensors import fingerprint

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


class _Place(NamedTuple):
    """Where a parameter is."""

    core: ZeroCore
    unit: Unit
    run: FlatRun
    slot: int

    @property
    def name(self) -> str:
        return self.run.layout.slots[self.slot].spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.run.layout.slots[self.slot].spec.shape

    @property
    def numel(self) -> int:
        return self.run.layout.slots[self.slot].spec.numel

    def range_in(self, begin: int, end: int) -> tuple[int, int]:
        """The part of the parameter in elements ``begin`` to ``end`` of the run."""
        slot = self.run.layout.slots[self.slot]
        low, high = max(slot.start, begin), min(slot.stop, end)
        return (low, high) if low < high else (begin, begin)

    def gradients(self) -> RunGradients:
        """The run's gradients, with nothing in flight."""
        self.core.gradients.drain()
        return next(g for g in self.core.gradients.by_unit[self.unit.index] if g.run is self.run)

    def optimizer(self) -> ShardOptimizer:
        if self.core.optimizer is None:
            raise EngineError(f"{self.name!r} has no optimiser states: there is no optimiser")
        return self.core.optimizer

    def ranges(self) -> list[StateRange]:
        """This rank's part of the parameter's optimiser states."""
        return [r for r in self.optimizer().state_ranges() if r.name == self.name]


def _find(param: nn.Parameter) -> _Place | None:
    """The place of a parameter that is trained; None for any other."""
    core = core_of(param)
    if core is None:
        return None
    for unit in core.units:
        for run in unit.runs:
            for slot, member in enumerate(run.params):
                if member is param:
                    return _Place(core, unit, run, slot) if run.layout.trainable else None
    return None


def _must_find(param: nn.Parameter, verb: str) -> _Place:
    place = _find(param)
    if place is None:
        raise EngineError(
            f"{verb}: the parameter belongs to no engine, or is frozen: there is nothing to set. "
            "Values of a frozen parameter are set inside `with ds_zero.GatheredParameters("
            "[param], modifier_rank=0):`."
        )
    return place


def _check_value(place: _Place, value: Tensor, verb: str, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise EditError(
            f"{verb}: {place.name!r} takes values of shape {shape}, not {tuple(value.shape)}"
        )


def _check_agreed(place: _Place, value: Tensor, verb: str) -> None:
    """Raise unless every rank passes the same values.  Collective."""
    seen = torch.tensor([fingerprint(value.detach().contiguous())], device=place.run.flat.device)
    rows = place.core.collectives.exchange(seen)[:, 0].tolist()
    if len(set(rows)) > 1:
        other = next(rank for rank, row in enumerate(rows) if row != rows[0])
        raise DivergenceError(
            f"{verb}: ranks 0 and {other} of the group pass different values for {place.name!r}; "
            "all ranks must pass the same"
        )


# ---- values ----------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master values of a parameter, whole.  Collective.

    Args:
        param: A parameter of an engine's model.

    Returns:
        A new fp32 tensor (fp64 for fp64 parameters) in the parameter's shape; None if the parameter
        is frozen or belongs to no engine.
    """
    place = _find(param)
    if place is None:
        return None
    slot = place.run.layout.slots[place.slot]
    values = place.core.full_masters(place.run)[slot.start : slot.stop]
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.to(wide, copy=True).view(place.shape)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter; the masters and every copy in the compute dtype follow.  Collective.

    Args:
        param: A trained parameter of an engine's model.
        value: In its shape, any float dtype; the same on all ranks.

    Raises:
        EngineError: The parameter is frozen or belongs to no engine.
        EditError: ``value`` has another shape.
        DivergenceError: Ranks pass different values.
    """
    verb = "safe_set_full_fp32_param"
    place = _must_find(param, verb)
    _check_value(place, value, verb, place.shape)
    _check_agreed(place, value, verb)
    place.core.load_values({place.name: value})


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's master values; not collective.

    Returns:
        A new 1-D tensor, empty if this rank's shard holds nothing of the parameter; None if the
        parameter is frozen or belongs to no engine.
    """
    place = _find(param)
    return None if place is None else _local_values(place).clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of a parameter's master values; not collective.

    Args:
        param: A trained parameter that is released between uses (stage 3).
        value: 1-D, as long as :func:`safe_get_local_fp32_param` gives it.

    Raises:
        EngineError: The parameter is kept whole on every rank, so that a change of one part would
            have to travel; or it is frozen or belongs to no engine.
        EditError: ``value`` has another shape.
    """
    verb = "safe_set_local_fp32_param"
    place = _must_find(param, verb)
    if not place.unit.releasable and place.core.collectives.group.size > 1:
        raise EngineError(
            f"{verb}: {place.name!r} is kept whole on every rank; use safe_set_full_fp32_param"
        )
    local = _local_values(place)
    _check_value(place, value, verb, tuple(local.shape))
    local.copy_(value)
    if not place.unit.releasable:
        place.core.publish()


def _local_values(place: _Place) -> Tensor:
    begin, end = place.run.master_range
    low, high = place.range_in(begin, end)
    return place.run.master[low - begin : high - begin]


# ---- gradients -------------------------------------------------------------------------------


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The reduced gradient of a parameter, whole.  Collective.

    Readable between the backward that ends the accumulation and the step: averaged over ranks and
    micro-steps, before clipping, without the loss scale.

    Returns:
        A new fp32 tensor in the parameter's shape; None if nothing was reduced yet, if no rank used
        the parameter, if it is frozen, or if it belongs to no engine.
    """
    place = _find(param)
    if place is None:
        return None
    gradients = place.gradients()
    shard = own_shard(gradients)
    if shard is None:
        return None
    used = torch.tensor([place.slot in gradients.used], device=shard.device, dtype=torch.uint8)
    if not bool(place.core.collectives.exchange(used).any()):
        return None
    layout = place.run.layout
    slot = layout.slots[place.slot]
    flat = torch.empty(layout.numel, dtype=shard.dtype, device=shard.device)
    flat[slice(*layout.shard_range(place.run.shard))] = shard
    place.core.collectives.gather(flat, layout.name).wait()
    return _unscaled(place, flat[slot.start : slot.stop]).view(place.shape)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the reduced gradient of a parameter before the step.  Collective.

    Args:
        param: A trained parameter whose gradient :func:`safe_get_full_grad` gives.
        value: In its shape, any float dtype, without the loss scale; the same on all ranks.

    Raises:
        EngineError: There is no reduced gradient, or the parameter is frozen or of no engine.
        EditError: ``value`` has another shape.
        DivergenceError: Ranks pass different values.
    """
    verb = "safe_set_full_grad"
    place = _must_find(param, verb)
    _check_value(place, value, verb, place.shape)
    _check_agreed(place, value, verb)
    gradients, target, (begin, end) = _reduced(place, verb)
    low, high = place.range_in(begin, end)
    start = place.run.layout.slots[place.slot].start
    part = value.detach().reshape(-1)[low - start : high - start]
    target[low - begin : high - begin].copy_(part).mul_(place.core.gradients.multiplier)
    gradients.used.add(place.slot)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the reduced gradients of several parameters by a function of them.  Collective.

    Args:
        params: Trained parameters; those without a reduced gradient are left out.
        update: ``update(gradient, parameter)`` gives the new gradient, the same on all ranks.

    Raises:
        EditError: A new gradient has another shape.
        DivergenceError: Ranks compute different gradients.
    """
    for param in params:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update(grad, param))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's reduced gradient; not collective.

    Returns:
        A new 1-D fp32 tensor, without the loss scale; None if nothing was reduced yet, or if the
        parameter is frozen or belongs to no engine.
    """
    place = _find(param)
    if place is None or own_shard(place.gradients()) is None:
        return None
    _, reduced, (begin, end) = _reduced(place, "safe_get_local_grad")
    low, high = place.range_in(begin, end)
    return _unscaled(place, reduced[low - begin : high - begin])


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of a parameter's reduced gradient; not collective.

    Args:
        param: A trained parameter whose gradient was reduced.
        value: 1-D, as long as :func:`safe_get_local_grad` gives it, without the loss scale.

    Raises:
        EngineError: There is no reduced gradient, or the parameter is frozen or of no engine.
        EditError: ``value`` has another shape.
    """
    verb = "safe_set_local_grad"
    place = _must_find(param, verb)
    gradients, reduced, (begin, end) = _reduced(place, verb)
    low, high = place.range_in(begin, end)
    _check_value(place, value, verb, (high - low,))
    reduced[low - begin : high - begin].copy_(value).mul_(place.core.gradients.multiplier)
    gradients.used.add(place.slot)


def _reduced(place: _Place, verb: str) -> tuple[RunGradients, Tensor, tuple[int, int]]:
    """The run's reduced gradients on this rank, and which elements of the run they are."""
    gradients = place.gradients()
    if gradients.reduced is None or not gradients.has_reduced:
        raise EngineError(
            f"{verb}: {place.name!r} has no reduced gradient; call it between the backward that "
            "ends the accumulation and the step"
        )
    layout = place.run.layout
    if gradients.reduced.numel() == layout.numel:
        return gradients, gradients.reduced, (0, layout.numel)
    return gradients, gradients.reduced, layout.shard_range(place.run.shard)


def _unscaled(place: _Place, grad: Tensor) -> Tensor:
    """A new tensor of at least 32 bits, without the loss scale."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(wide, copy=True).div_(place.core.gradients.multiplier)


# ---- optimiser states ------------------------------------------------------------------------


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One optimiser state of a parameter, whole.  Collective.

    Args:
        param: A parameter of an engine's model.
        optim_state_key: Name of the state, such as ``exp_avg``.

    Returns:
        A new tensor in the parameter's shape, or in the state's own where that differs; None before
        the parameter's first step, or if it is frozen or belongs to no engine.

    Raises:
        EngineError: The optimiser has other states; the message lists them.
    """
    place = _find(param)
    if place is None:
        return None
    states = _full_states(place)
    if states and optim_state_key not in states:
        raise EngineError(
            f"the optimiser keeps no {optim_state_key!r} for {place.name!r}, but {sorted(states)}"
        )
    return states.get(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set one optimiser state of a parameter.  Collective.

    Args:
        param: A trained parameter that was updated at least once.
        value: In the shape that :func:`safe_get_full_optimizer_state` gives; equal on all ranks.
        optim_state_key: Name of the state.

    Raises:
        EngineError: There is no such state yet, or the parameter is frozen or of no engine.
        EditError: ``value`` has another shape.
        DivergenceError: Ranks pass different values.
    """
    verb = "safe_set_full_optimizer_state"
    place = _must_find(param, verb)
    states = _full_states(place)
    _check_state(place, states, optim_state_key, verb)
    _check_value(place, value, verb, tuple(states[optim_state_key].shape))
    _check_agreed(place, value, verb)
    states[optim_state_key] = value
    whole = {kind: (0, state.reshape(-1)) for kind, state in states.items()}
    shapes = {kind: tuple(state.shape) for kind, state in states.items()}
    place.optimizer().load(_States(place, whole, shapes), names={place.name})


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of one optimiser state of a parameter; not collective.

    Returns:
        A new 1-D tensor; None before the first step, if this rank holds nothing of it, or if the
        parameter is frozen or belongs to no engine.
    """
    place = _find(param)
    if place is None:
        return None
    found = [part.data for part in place.ranges() if part.kind == optim_state_key]
    return found[0].clone() if found else None


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of one optimiser state of a parameter; not collective.

    Args:
        param: A trained parameter that was updated at least once, at stages 1 to 3.
        value: 1-D, as long as :func:`safe_get_local_optimizer_state` gives it.
        optim_state_key: Name of the state.

    Raises:
        EngineError: This rank has no such state, or keeps it whole (stage 0).
        EditError: ``value`` has another shape.
    """
    verb = "safe_set_local_optimizer_state"
    place = _must_find(param, verb)
    if place.run.master.numel() == place.run.layout.numel and place.run.layout.num_shards > 1:
        raise EngineError(
            f"{verb}: every rank keeps the whole state of {place.name!r} at stage 0; use "
            "safe_set_full_optimizer_state"
        )
    ranges = {part.kind: (part.start, part.data) for part in place.ranges()}
    _check_state(place, ranges, optim_state_key, verb)
    start, data = ranges[optim_state_key]
    _check_value(place, value, verb, tuple(data.shape))
    ranges[optim_state_key] = (start, value)
    odd = place.optimizer().state_shapes().get(place.name, {})
    shapes = {kind: odd.get(kind, place.shape) for kind in ranges}
    place.optimizer().load(_States(place, ranges, shapes), names={place.name})


def _check_state(place: _Place, found: Mapping[str, object], kind: str, verb: str) -> None:
    if kind not in found:
        known = f"there are {sorted(found)}" if found else "there are none before its first step"
        raise EngineError(f"{verb}: {place.name!r} has no state {kind!r} here; {known}")


def _full_states(place: _Place) -> dict[str, Tensor]:
    """Every state of a parameter, whole and in its shape.  Collective."""
    group = place.core.collectives.group
    ranges = place.ranges()
    shapes = place.optimizer().state_shapes().get(place.name, {})
    mine = {part.kind: tuple(shapes.get(part.kind, place.shape)) for part in ranges}
    known: dict[str, tuple[int, ...]] = {}
    for found in gather_objects(mine, group):
        known.update(found)
    states = {}
    for kind, shape in sorted(known.items()):
        # Each element is held by one rank: the others add zeros.
        whole = torch.zeros(shape, dtype=torch.float32, device=place.run.flat.device)
        flat = whole.view(-1)
        for part in ranges:
            if part.kind == kind:
                flat[part.start : part.start + part.data.numel()] = part.data
        all_reduce(whole, group)
        states[kind] = whole
    return states


class _States:
    """States of one parameter as an optimiser reads them; see ``StateSource``."""

    def __init__(
        self,
        place: _Place,
        ranges: Mapping[str, tuple[int, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Serve 1-D ``ranges`` (first element, values) by kind."""
        self._ranges = ranges
        self._shapes = shapes
        self._scalars = place.optimizer().scalars().get(place.name, {})

    def kinds(self, name: str) -> set[str]:
        return set(self._ranges)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        return self._shapes[kind]

    def read(self, kind: str, name: str, start: int, out: Tensor) -> None:
        first, values = self._ranges[kind]
        out.copy_(values.reshape(-1)[start - first : start - first + out.numel()])

    def scalars(self, name: str) -> Mapping[str, float]:
        return self._scalars
