"""What one parameter group has of one master, and which stretches of it a step updates.

[Note: rooms]
The part of a master that belongs to one parameter group is contiguous, since runs are ordered by
group.  Such a *room* has the states that its group needs and no others.  In a step, neighbouring
parameters of a room that have the same history are updated as one *stretch*.  A stretch ends on a
whole vector, inside of the padding, which is zero and stays zero: no element is updated by a
kernel's scalar tail, whose rounding may differ, so the result does not depend on where shards are
cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_zero.layout import Piece
from ds_zero.optim.base import OptimizedRun

__all__ = ["Room", "Segment", "Stretch", "make_rooms", "scaled", "widened"]


class Stretch(NamedTuple):
    """What one call of a kernel updates; all tensors are 1-D."""

    param: Tensor
    grad: Tensor
    """Any float dtype; may be used as working space."""
    states: Mapping[str, Tensor]
    """By name; equally long, unless the optimiser says otherwise."""
    copy: Tensor | None
    """Where the updated values go too, in the compute dtype."""


class Segment(NamedTuple):
    """A stretch of a room, in elements of its master."""

    start: int
    stop: int
    step: int
    """Updates applied before this one."""
    fresh: bool
    """Whether no update has written the states yet."""


@dataclass
class Room:
    """What one parameter group has of one master; see [Note: rooms]."""

    run: int
    """Index of the run."""
    group: int
    """Index of the parameter group."""
    start: int
    """First element, counted in the master."""
    stops: tuple[int, ...]
    """For each piece one past its last element, rounded up to whole vectors."""
    pieces: tuple[Piece, ...]
    slots: tuple[int, ...]
    """For each piece the index of its slot in the run."""
    steps: list[int]
    """For each piece the number of updates."""
    fresh: list[bool]
    """For each piece whether its states hold nothing but their initial values."""
    states: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[tuple[int, int], Stretch] = field(default_factory=dict)
    """Stretches of earlier steps, whose views serve again."""

    @property
    def stop(self) -> int:
        """One past the last element, whole vectors after ``start``."""
        return self.stops[-1]

    def segments(self, used: Sequence[bool]) -> Iterator[Segment]:
        """Join neighbouring used pieces that have the same history.

        Args:
            used: For each slot of the run, whether its parameter is updated.
        """
        steps, fresh = self.steps, self.fresh
        alike = steps.count(steps[0]) == len(steps) and fresh.count(fresh[0]) == len(fresh)
        if alike and all([used[slot] for slot in self.slots]):
            yield Segment(self.start, self.stops[-1], steps[0], fresh[0])
            return
        current: Segment | None = None
        for index, slot in enumerate(self.slots):
            history = (steps[index], fresh[index])
            if current is not None and not (used[slot] and current[2:] == history):
                yield current
                current = None
            if used[slot]:
                start = self.pieces[index].shard_start if current is None else current.start
                current = Segment(start, self.stops[index], *history)
        if current is not None:
            yield current

    def count(self, used: Sequence[bool]) -> None:
        """Note that an update happened."""
        for index, slot in enumerate(self.slots):
            if used[slot]:
                self.steps[index] += 1
                self.fresh[index] = False

    def add_states(self, states: Mapping[str, Tensor]) -> None:
        """Give the room further states, with their initial values."""
        self.states.update(states)
        self.parts.clear()
        self.fresh = [True] * len(self.pieces)


def make_rooms(index: int, run: OptimizedRun, granularity: int) -> Iterator[Room]:
    """Cut the master of run number ``index`` by parameter group.

    Args:
        index: Of the run.
        run: The run.
        granularity: Stretches begin and end at multiples of this many elements.
    """
    found: dict[int, list[tuple[Piece, int]]] = {}
    for piece, slot in zip(run.pieces(), run.slots_of_pieces(), strict=True):
        found.setdefault(piece.spec.group, []).append((piece, slot))
    for group, members in found.items():
        pieces, slots = zip(*members, strict=True)
        stops = tuple(
            -(-(piece.shard_start + piece.numel) // granularity) * granularity for piece in pieces
        )
        zeros, fresh = [0] * len(pieces), [True] * len(pieces)
        yield Room(index, group, pieces[0].shard_start, stops, pieces, slots, zeros, fresh)


def scaled(grad: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``grad`` times ``scale`` in ``dtype``, in place where it has that dtype already."""
    grad = grad.to(dtype)
    return grad.mul_(scale) if scale != 1.0 else grad


@contextmanager
def widened(stretch: Stretch) -> Iterator[Stretch]:
    """The stretch with parameters and states in one dtype of at least 32 bits.

    What had to be copied for that is rounded back, once, when the context ends.
    """
    tensors = (stretch.param, *stretch.states.values())
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    if all(tensor.dtype == wide for tensor in tensors):
        yield stretch
        return
    states = {kind: state.to(wide) for kind, state in stretch.states.items()}
    copied = stretch._replace(param=stretch.param.to(wide), states=states)
    yield copied
    stretch.param.copy_(copied.param)
    for kind, state in stretch.states.items():
        state.copy_(states[kind])
