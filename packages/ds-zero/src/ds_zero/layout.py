"""Where every element of every parameter lives: pure arithmetic, no tensors.

[Note: layout]
A *unit* is what is gathered and reduced together, typically one transformer block.  It holds one
flat *run* per (dtype, trainable), ordered by optimiser parameter group, and one for each parameter
that is reduced by rows.  Inside a run each parameter has a *slot* whose start is aligned to 64
bytes; the run is padded so that it cuts into ``num_shards`` equal shards.  A shard boundary may
fall inside a parameter: the part of a slot that a shard holds is a *piece*.

The runtime, the checkpoint, the exporter and the tests share these objects.  The layout is the
same at every ZeRO stage, which is what makes the stages bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

__all__ = ["ModelLayout", "ParamSpec", "Piece", "Run", "Slot", "UnitLayout", "UnitSpec"]

VECTOR_NUMEL = 16
"""Slots also start at multiples of this many elements: 64 bytes of an fp32 master."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the layout sees it."""

    name: str
    """Fully-qualified name of its first registration."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    """Dtype it has in the forward pass."""
    trainable: bool
    """``requires_grad`` when the engine was built."""
    group: int = 0
    """Index of its optimiser parameter group; 0 for parameters that no group holds."""
    sparse: bool = False
    """Whether its gradient is reduced by rows; it then has a run of its own."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Slot(NamedTuple):
    """The place of one parameter in a run."""

    spec: ParamSpec
    start: int
    """First element, counted in the run."""

    @property
    def stop(self) -> int:
        """One past the last element, counted in the run."""
        return self.start + self.spec.numel


class Piece(NamedTuple):
    """The part of one parameter that one shard holds."""

    spec: ParamSpec
    param_start: int
    """First element, counted in the flattened parameter."""
    shard_start: int
    """First element, counted in the shard."""
    numel: int
    """Number of elements, at least one."""


@dataclass(frozen=True)
class Run:
    """A flat run of parameters of one dtype, cut into equal shards.  See [Note: layout]."""

    name: str
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    numel: int
    """Elements with padding: a multiple of ``num_shards``."""
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.num_shards

    def shard_range(self, shard: int) -> tuple[int, int]:
        """First element and one past the last of shard number ``shard``."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters that shard number ``shard`` holds, in order."""
        begin, end = self.shard_range(shard)
        return tuple(
            Piece(slot.spec, low - slot.start, low - begin, high - low)
            for slot in self.slots
            if (low := max(slot.start, begin)) < (high := min(slot.stop, end))
        )

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of padding: they belong to no parameter."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.stop)), self.numel]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


@dataclass(frozen=True)
class UnitSpec:
    """The parameters that are gathered and reduced together, before they have places."""

    name: str
    params: tuple[ParamSpec, ...]
    resident: bool = False
    """Kept whole between uses at every stage, because it is small or cannot be released."""


@dataclass(frozen=True)
class UnitLayout:
    """A unit whose parameters have places."""

    name: str
    resident: bool
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        """Elements of all runs, with padding."""
        return sum(run.numel for run in self.runs)


@dataclass(frozen=True)
class ModelLayout:
    """The places of all parameters of a model."""

    units: tuple[UnitLayout, ...]
    num_shards: int

    @staticmethod
    def build(units: Iterable[UnitSpec], num_shards: int, granularity: int = 1) -> ModelLayout:
        """Place the parameters of ``units``.

        Args:
            units: Disjoint sets of parameters, in the order of their use in the forward pass.
            num_shards: Into how many equal shards each run is cut; at least 1.
            granularity: Trainable parameters start, and shards of their runs are cut, at multiples
                of this many elements.
        """
        placed = tuple(
            UnitLayout(unit.name, unit.resident, tuple(_place(unit, num_shards, granularity)))
            for unit in units
        )
        return ModelLayout(placed, num_shards)

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """All parameters, in the order of units, runs and slots."""
        return tuple(slot.spec for run in self.runs() for slot in run.slots)

    def runs(self) -> Iterator[Run]:
        """All runs of all units."""
        for unit in self.units:
            yield from unit.runs


def _place(unit: UnitSpec, num_shards: int, granularity: int) -> Iterator[Run]:
    """Split a unit into runs by dtype, trainability and reduction; give each parameter a slot."""
    kinds: dict[tuple[torch.dtype, bool, str], list[ParamSpec]] = {}
    for spec in unit.params:
        alone = spec.name if spec.sparse else ""
        kinds.setdefault((spec.dtype, spec.trainable, alone), []).append(spec)
    for (dtype, trainable, alone), specs in kinds.items():
        ordered = sorted(specs, key=lambda spec: spec.group)
        alignment = max(VECTOR_NUMEL, 64 // dtype.itemsize)
        if trainable:
            alignment = math.lcm(alignment, granularity)
        slots, numel = _pack(ordered, alignment, num_shards)
        suffix = (
            "" if len(kinds) == 1 else f"[{_short(dtype)}{'' if trainable else ', frozen'}]{alone}"
        )
        yield Run(unit.name + suffix, dtype, trainable, slots, numel, num_shards)


def _pack(
    specs: Sequence[ParamSpec], alignment: int, num_shards: int
) -> tuple[tuple[Slot, ...], int]:
    """Lay ``specs`` one after another; return their slots and the padded number of elements."""
    slots: list[Slot] = []
    position = 0
    for spec in specs:
        slots.append(Slot(spec, position))
        position = _round_up(position + spec.numel, alignment)
    return tuple(slots), _round_up(position, alignment * num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
