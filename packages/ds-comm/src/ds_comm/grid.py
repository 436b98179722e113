"""Arithmetic of the rank grid; no process groups, no devices.

The grid is ``arange(world_size).view(pipe, replicate, shard, sequence, tensor)``: row-major, last
axis fastest, so ranks that exchange most (tensor) are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from ds_comm.errors import MeshError

__all__ = ["AXES", "Axis", "Coordinates", "MeshShape", "coordinates", "group_ranks", "rank_grid"]

Axis = Literal["pipe", "replicate", "shard", "sequence", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Axes of the grid, slowest first."""


class Coordinates(NamedTuple):
    """Position of one rank on each axis."""

    pipe: int
    replicate: int
    shard: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class MeshShape:
    """Size of each axis; all at least 1."""

    pipe: int = 1
    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        if min(self.sizes) < 1:
            raise MeshError(f"every axis of a mesh has at least one rank: {self}")

    def __str__(self) -> str:
        """Return all sizes, ``pipe 1 x replicate 2 x …``."""
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes in the order of ``AXES``."""
        return (self.pipe, self.replicate, self.shard, self.sequence, self.tensor)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @staticmethod
    def infer(
        *, world_size: int, pipe: int = 1, replicate: int = 1, sequence: int = 1, tensor: int = 1
    ) -> MeshShape:
        """Return the shape whose shard axis takes the ranks that the other axes leave.

        Raises:
            MeshError: a size is below 1, or the others do not divide the world size.
        """
        others = MeshShape(pipe, replicate, 1, sequence, tensor)
        if world_size < 1 or world_size % others.world_size:
            raise MeshError(
                f"world size {world_size} is not a multiple of pipe {pipe} x replicate "
                f"{replicate} x sequence {sequence} x tensor {tensor} = {others.world_size}; "
                "the shard axis takes the quotient"
            )
        shard = world_size // others.world_size
        return MeshShape(pipe, replicate, shard, sequence, tensor)


def rank_grid(shape: MeshShape) -> torch.Tensor:
    """Return the ranks as an int64 CPU tensor ``[pipe, replicate, shard, sequence, tensor]``."""
    return torch.arange(shape.world_size, device="cpu").view(shape.sizes)


def coordinates(shape: MeshShape, rank: int) -> Coordinates:
    """Return the position of a rank.

    Raises:
        MeshError: the rank is not in the grid.
    """
    if not 0 <= rank < shape.world_size:
        raise MeshError(f"rank {rank} is not in a mesh of {shape.world_size} ranks ({shape})")
    index: list[int] = []
    for size in reversed(shape.sizes):
        rank, position = divmod(rank, size)
        index.append(position)
    return Coordinates(*reversed(index))


def group_ranks(shape: MeshShape, axes: Iterable[Axis]) -> list[tuple[int, ...]]:
    """Return all groups of ranks that differ only along ``axes``.

    The groups partition the world.  Within a group ranks ascend, which is row-major order of the
    given axes; the groups themselves are ordered by their first rank.

    Raises:
        MeshError: an axis is unknown or given twice.
    """
    chosen = tuple(axes)
    unknown = [axis for axis in chosen if axis not in AXES]
    if unknown or len(set(chosen)) != len(chosen):
        raise MeshError(f"axes {chosen} must be distinct and among {AXES}")
    inside = [index for index, axis in enumerate(AXES) if axis in chosen]
    outside = [index for index, axis in enumerate(AXES) if axis not in chosen]
    size = math.prod(shape.sizes[index] for index in inside)
    rows = rank_grid(shape).permute(*outside, *inside).reshape(-1, size)
    return sorted(tuple(row) for row in rows.tolist())
