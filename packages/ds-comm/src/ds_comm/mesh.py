"""The process groups of the rank grid, made once and passed explicitly.

Which ranks form which group is arithmetic, in ``ds_comm.grid``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ds_comm.errors import MeshError
from ds_comm.grid import Axis, Coordinates, MeshShape, coordinates, group_ranks
from ds_comm.group import Group
from ds_comm.mpu import groups_of

__all__ = ["Mesh"]

# What each group of a mesh varies along. Also the order in which groups are made.
_GROUP_AXES: dict[str, tuple[Axis, ...]] = {
    "pipe": ("pipe",),
    "replicate": ("replicate",),
    "shard": ("shard", "sequence"),
    "data": ("replicate", "shard"),
    "sequence": ("sequence",),
    "tensor": ("tensor",),
}


@dataclass(frozen=True)
class Mesh:
    """The groups this rank belongs to, made once and passed to whoever communicates.

    A group of one rank has no handle; one that is the whole world uses the default group.
    """

    shape: MeshShape
    rank: int
    """Global rank of this process."""
    world: Group
    """All ranks."""
    pipe: Group
    """Stages of one pipeline, in order."""
    replicate: Group
    """Ranks that hold the same shard (hierarchical sharding: hpZ, MiCS)."""
    shard: Group
    """Shard x sequence: the ranks over which ZeRO shards parameters, gradients and states."""
    data: Group
    """Replicate x shard: ranks that read different samples; its size is the data-parallel size."""
    sequence: Group
    """Ranks that hold different parts of the same sequences."""
    tensor: Group
    """Ranks that hold different parts of the same layers."""

    @property
    def coordinates(self) -> Coordinates:
        """Position of this rank on each axis."""
        return Coordinates(
            pipe=self.pipe.rank,
            replicate=self.replicate.rank,
            shard=self.data.rank % self.shape.shard,
            sequence=self.sequence.rank,
            tensor=self.tensor.rank,
        )

    @staticmethod
    def build(
        *,
        world_size: int,
        rank: int,
        pipe: int = 1,
        replicate: int = 1,
        sequence: int = 1,
        tensor: int = 1,
    ) -> Mesh:
        """Make the process groups of a grid; collective over the world, same arguments on all.

        Args:
            world_size: number of ranks; the shard axis takes what the other axes leave of it.
            rank: global rank of this process.
            pipe: pipeline stages.
            replicate: copies of the sharded state.
            sequence: ranks that share each sequence.
            tensor: ranks that share each layer.

        Raises:
            MeshError: the sizes do not fit each other, the rank, or the default process group.
        """
        shape = MeshShape.infer(
            world_size=world_size, pipe=pipe, replicate=replicate, sequence=sequence, tensor=tensor
        )
        coordinates(shape, rank)  # refuses a rank outside
        _check_default_group(shape, rank)
        maker = _GroupMaker(rank, world_size)
        groups = {name: maker.make(group_ranks(shape, axes)) for name, axes in _GROUP_AXES.items()}
        world = maker.make([tuple(range(world_size))])
        return Mesh(shape=shape, rank=rank, world=world, **groups)

    @staticmethod
    def from_mpu(mpu: object) -> Mesh:
        """Take the groups of a Megatron-style object or module; local, makes no group.

        Which verbs are read is told in ``ds_comm.mpu.groups_of``.  Ranks come from the groups
        themselves, so any rank order of the ``mpu`` is kept.

        Raises:
            MeshError: a verb is missing, or its answers contradict each other.
        """
        found = groups_of(mpu)
        return Mesh(
            shape=found.shape,
            rank=found.world.ranks[found.world.rank],
            world=found.world,
            pipe=found.pipe,
            replicate=Group.solo(found.world.rank),
            shard=found.shard,
            data=found.data,
            sequence=found.sequence,
            tensor=found.tensor,
        )


def _check_default_group(shape: MeshShape, rank: int) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        if shape.world_size > 1:
            raise MeshError(
                f"a mesh of {shape.world_size} ranks ({shape}) needs the default process group: "
                "call init_distributed first"
            )
        return
    actual = (dist.get_world_size(), dist.get_rank())
    if actual != (shape.world_size, rank):
        raise MeshError(
            f"a mesh of {shape.world_size} ranks ({shape}) was asked for as rank {rank}, but the "
            f"default process group has {actual[0]} ranks and this is rank {actual[1]}"
        )


class _GroupMaker:
    """Makes torch groups; a partition that was made before, or is the world, is not made again."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._made: dict[tuple[tuple[int, ...], ...], Group] = {}

    def make(self, partition: Sequence[tuple[int, ...]]) -> Group:
        """Return this rank's group of a partition of the world; collective over the world."""
        key = tuple(partition)
        if key not in self._made:
            self._made[key] = self._new(key)
        return self._made[key]

    def _new(self, partition: tuple[tuple[int, ...], ...]) -> Group:
        mine = next(ranks for ranks in partition if self._rank in ranks)
        handle: dist.ProcessGroup | None = None
        if len(mine) == self._world_size > 1:
            handle = dist.group.WORLD
        elif len(mine) > 1:
            # torch wants every rank to take part in the making of every group, in one order.
            for ranks in partition:
                made = dist.new_group(list(ranks))
                if ranks == mine:
                    handle = made
        return Group(ranks=mine, rank=mine.index(self._rank), handle=handle)
