"""Maps a Megatron-style model-parallel unit (object or module) onto the mesh.

Only the verbs below are called; which of the optional ones exist decides the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from ds_comm.errors import MeshError
from ds_comm.grid import MeshShape
from ds_comm.group import Group

__all__ = ["MpuGroups", "groups_of"]


@runtime_checkable
class _DataParallel(Protocol):
    def get_data_parallel_group(self) -> dist.ProcessGroup: ...
    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_world_size(self) -> int: ...


@runtime_checkable
class _TensorModelParallel(Protocol):
    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup: ...
    def get_tensor_model_parallel_rank(self) -> int: ...
    def get_tensor_model_parallel_world_size(self) -> int: ...


@runtime_checkable
class _ModelParallel(Protocol):
    def get_model_parallel_group(self) -> dist.ProcessGroup: ...
    def get_model_parallel_rank(self) -> int: ...
    def get_model_parallel_world_size(self) -> int: ...


@runtime_checkable
class _PipelineModelParallel(Protocol):
    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup: ...
    def get_pipeline_model_parallel_rank(self) -> int: ...
    def get_pipeline_model_parallel_world_size(self) -> int: ...


@runtime_checkable
class _PipeParallel(Protocol):
    def get_pipe_parallel_group(self) -> dist.ProcessGroup: ...
    def get_pipe_parallel_rank(self) -> int: ...
    def get_pipe_parallel_world_size(self) -> int: ...


@runtime_checkable
class _SequenceParallel(Protocol):
    def get_sequence_parallel_group(self) -> dist.ProcessGroup: ...
    def get_sequence_parallel_rank(self) -> int: ...
    def get_sequence_parallel_world_size(self) -> int: ...
    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup: ...


@dataclass(frozen=True)
class MpuGroups:
    """The groups of an ``mpu`` under the names of the mesh; its replicate axis has size 1."""

    shape: MeshShape
    world: Group
    pipe: Group
    shard: Group
    data: Group
    sequence: Group
    tensor: Group


def groups_of(mpu: object) -> MpuGroups:
    """Read the groups that an ``mpu`` (object or module) already has; local, makes no group.

    Needed: ``get_data_parallel_{group,rank,world_size}``.  Taken where present:
    ``get_tensor_model_parallel_*``, else ``get_model_parallel_*`` (tensor);
    ``get_pipeline_model_parallel_*``, else ``get_pipe_parallel_*`` (pipe);
    ``get_sequence_parallel_*`` with ``get_sequence_data_parallel_group`` (sequence and shard).

    Raises:
        MeshError: the data-parallel verbs are missing, or answers contradict each other.
    """
    if not isinstance(mpu, _DataParallel):
        raise MeshError(
            f"mpu of type {type(mpu).__name__} needs get_data_parallel_group, "
            "get_data_parallel_rank and get_data_parallel_world_size"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise MeshError("an mpu needs the default process group: call init_distributed first")
    rank = dist.get_rank()
    data = _group(
        "data_parallel",
        mpu.get_data_parallel_group(),
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
    )
    tensor, pipe = _tensor(mpu, rank), _pipe(mpu, rank)
    sequence, shard = Group.solo(rank), data
    if isinstance(mpu, _SequenceParallel):
        sequence = _group(
            "sequence_parallel",
            mpu.get_sequence_parallel_group(),
            mpu.get_sequence_parallel_rank(),
            mpu.get_sequence_parallel_world_size(),
        )
        shard = Group.of(mpu.get_sequence_data_parallel_group())
    shape = MeshShape(pipe=pipe.size, shard=data.size, sequence=sequence.size, tensor=tensor.size)
    world = Group.world()
    if shape.world_size != world.size or shard.size != data.size * sequence.size:
        raise MeshError(
            f"the mpu's groups do not fill the world of {world.size} ranks: {shape}, "
            f"sequence x data group of {shard.size}"
        )
    return MpuGroups(
        shape=shape,
        world=world,
        pipe=pipe,
        shard=shard,
        data=data,
        sequence=sequence,
        tensor=tensor,
    )


def _tensor(mpu: object, rank: int) -> Group:
    if isinstance(mpu, _TensorModelParallel):
        return _group(
            "tensor_model_parallel",
            mpu.get_tensor_model_parallel_group(),
            mpu.get_tensor_model_parallel_rank(),
            mpu.get_tensor_model_parallel_world_size(),
        )
    if isinstance(mpu, _ModelParallel):
        return _group(
            "model_parallel",
            mpu.get_model_parallel_group(),
            mpu.get_model_parallel_rank(),
            mpu.get_model_parallel_world_size(),
        )
    return Group.solo(rank)


def _pipe(mpu: object, rank: int) -> Group:
    if isinstance(mpu, _PipelineModelParallel):
        return _group(
            "pipeline_model_parallel",
            mpu.get_pipeline_model_parallel_group(),
            mpu.get_pipeline_model_parallel_rank(),
            mpu.get_pipeline_model_parallel_world_size(),
        )
    if isinstance(mpu, _PipeParallel):
        return _group(
            "pipe_parallel",
            mpu.get_pipe_parallel_group(),
            mpu.get_pipe_parallel_rank(),
            mpu.get_pipe_parallel_world_size(),
        )
    return Group.solo(rank)


def _group(name: str, handle: dist.ProcessGroup, rank: int, world_size: int) -> Group:
    group = Group.of(handle)
    if (group.rank, group.size) != (rank, world_size):
        raise MeshError(
            f"the mpu contradicts itself: get_{name}_group has {group.size} ranks and this is "
            f"number {group.rank}, but get_{name}_world_size is {world_size} and "
            f"get_{name}_rank is {rank}"
        )
    return group
