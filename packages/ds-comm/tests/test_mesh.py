"""Process groups of the mesh, and the mapping of a Megatron-style mpu."""

from __future__ import annotations

import types
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from ds_comm import Group, Mesh, MeshError
from ds_comm.grid import Coordinates, MeshShape
from ds_comm.testing.plugin import Ranks

NAMES = ("pipe", "replicate", "shard", "data", "sequence", "tensor", "world")
World = tuple[dict[str, tuple[int, ...]], dict[str, float], Coordinates]


def groups_of(mesh: Mesh) -> dict[str, Group]:
    return {
        "pipe": mesh.pipe,
        "replicate": mesh.replicate,
        "shard": mesh.shard,
        "data": mesh.data,
        "sequence": mesh.sequence,
        "tensor": mesh.tensor,
        "world": mesh.world,
    }


def measure(mesh: Mesh) -> World:
    """Return each group's ranks, the sum of its ranks by all-reduce, and the coordinates."""
    sums = {}
    for name, group in groups_of(mesh).items():
        assert group.ranks[group.rank] == dist.get_rank()
        assert (group.handle is None) == (group.size == 1)
        tensor = torch.tensor([float(dist.get_rank())])
        if group.handle is not None:
            dist.all_reduce(tensor, group=group.handle)
        sums[name] = float(tensor)
    ranks = {name: group.ranks for name, group in groups_of(mesh).items()}
    return ranks, sums, mesh.coordinates


def build(**sizes: int) -> World:
    return measure(Mesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), **sizes))


def handles() -> tuple[bool, bool, int]:
    mesh = Mesh.build(world_size=dist.get_world_size(), rank=dist.get_rank())
    first = len(dist.distributed_c10d._world.pg_map)
    mesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), replicate=2, tensor=2)
    return (
        mesh.shard.handle is dist.group.WORLD and mesh.data.handle is dist.group.WORLD,
        mesh.tensor.handle is None,
        len(dist.distributed_c10d._world.pg_map) - first,
    )


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (4, {}, {"shard": (0, 1, 2, 3), "data": (0, 1, 2, 3)}),
        (4, {"replicate": 2}, {"shard": (2, 3), "replicate": (1, 3), "data": (0, 1, 2, 3)}),
        (4, {"tensor": 2}, {"shard": (1, 3), "data": (1, 3), "tensor": (2, 3)}),
        (4, {"pipe": 2}, {"shard": (2, 3), "data": (2, 3), "pipe": (1, 3)}),
        (4, {"sequence": 2}, {"shard": (0, 1, 2, 3), "data": (1, 3), "sequence": (2, 3)}),
        (4, {"pipe": 2, "tensor": 2}, {"pipe": (1, 3), "tensor": (2, 3)}),
        (3, {}, {"shard": (0, 1, 2), "data": (0, 1, 2)}),
        (2, {"sequence": 2}, {"shard": (0, 1), "sequence": (0, 1)}),
        (1, {}, {}),
    ],
)
def test_groups_of_the_last_rank(
    ranks: Ranks, world_size: int, sizes: dict[str, int], expected: dict[str, tuple[int, ...]]
) -> None:
    results = ranks(world_size, build, **sizes)
    last = world_size - 1
    shown, _, place = results[last]
    solo = {name: (last,) for name in NAMES}
    assert shown == {**solo, "world": tuple(range(world_size)), **expected}
    for rank, (members, sums, _) in enumerate(results):
        for name in NAMES:
            assert rank in members[name]
            # the group really consists of these ranks, on every one of them
            assert sums[name] == sum(members[name])
            assert results[members[name][0]][0][name] == members[name]
    shape = MeshShape.infer(world_size=world_size, **sizes)
    assert place == tuple(size - 1 for size in shape.sizes)


def test_world_group_is_reused_and_equal_partitions_are_made_once(ranks: Ranks) -> None:
    # replicate = tensor = 2: the tensor and the replicate (= data) groups, one handle on each rank
    assert ranks(4, handles) == [(True, True, 2)] * 4


def ask(world_size: int, rank: int) -> str:
    with pytest.raises(MeshError) as caught:
        Mesh.build(world_size=world_size, rank=rank)
    return str(caught.value)


def test_mesh_that_contradicts_the_default_group(ranks: Ranks) -> None:
    (first, second) = ranks(2, ask, 4, 0)
    assert "mesh of 4 ranks" in first and "has 2 ranks and this is rank 0" in first
    assert "this is rank 1" in second


def test_mesh_without_process_group() -> None:
    mesh = Mesh.build(world_size=1, rank=0)
    assert all(group == Group.solo() for group in groups_of(mesh).values())
    with pytest.raises(MeshError, match="call init_distributed first"):
        Mesh.build(world_size=2, rank=0)
    with pytest.raises(MeshError, match="rank 1 is not in a mesh of 1 ranks"):
        Mesh.build(world_size=1, rank=1)


@dataclass
class Mpu:
    """Old Megatron: data and model parallel, ranks given freely."""

    data: list[list[int]]
    model: list[list[int]]

    def __post_init__(self) -> None:
        self._data = self._make(self.data)
        self._model = self._make(self.model)

    @staticmethod
    def _make(partition: list[list[int]]) -> dist.ProcessGroup:
        made = [dist.new_group(ranks) for ranks in partition]
        (mine,) = [i for i, ranks in enumerate(partition) if dist.get_rank() in ranks]
        handle = made[mine]
        assert isinstance(handle, dist.ProcessGroup)
        return handle

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)


class SequenceMpu(Mpu):
    """Data and sequence parallel, as Ulysses makes it."""

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


@dataclass
class ModernMpu:
    """Megatron-Core verbs for tensor and pipeline; `model` is their product there."""

    old: Mpu
    lie: int = 0

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.old.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        return self.old.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return self.old.get_data_parallel_world_size() + self.lie

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self.old.get_model_parallel_group()

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.old.get_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.old.get_model_parallel_world_size()


def from_mpu(data: list[list[int]], model: list[list[int]]) -> World:
    return measure(Mesh.from_mpu(Mpu(data, model)))


def from_modern_mpu(data: list[list[int]], model: list[list[int]]) -> World:
    return measure(Mesh.from_mpu(ModernMpu(Mpu(data, model))))


def from_module(data: list[list[int]], model: list[list[int]]) -> World:
    mpu, module = Mpu(data, model), types.ModuleType("parallel_state")
    for verb in ("group", "rank", "world_size"):
        for kind in ("data", "model"):
            name = f"get_{kind}_parallel_{verb}"
            module.__dict__[name] = getattr(mpu, name)
    return measure(Mesh.from_mpu(module))


def from_lying_mpu(data: list[list[int]], model: list[list[int]]) -> str:
    with pytest.raises(MeshError) as caught:
        Mesh.from_mpu(ModernMpu(Mpu(data, model), lie=1))
    return str(caught.value)


def from_small_mpu(data: list[list[int]], model: list[list[int]]) -> str:
    with pytest.raises(MeshError) as caught:
        Mesh.from_mpu(Mpu(data, model))
    return str(caught.value)


TENSOR_FAST = ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
TENSOR_SLOW = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


@pytest.mark.parametrize(("data", "model"), [TENSOR_FAST, TENSOR_SLOW])
def test_mpu_keeps_its_own_rank_order(
    ranks: Ranks, data: list[list[int]], model: list[list[int]]
) -> None:
    for function in (from_mpu, from_module):
        results = ranks(4, function, data, model)
        for rank, (members, sums, place) in enumerate(results):
            (mine,) = [group for group in data if rank in group]
            (tensor,) = [group for group in model if rank in group]
            assert members["data"] == members["shard"] == tuple(mine)
            assert members["tensor"] == tuple(tensor)
            assert members["pipe"] == members["replicate"] == (rank,)
            assert sums["tensor"] == sum(tensor)
            assert place == (0, 0, mine.index(rank), 0, tensor.index(rank))


def test_mpu_with_pipeline_verbs(ranks: Ranks) -> None:
    results = ranks(4, from_modern_mpu, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    members, _, place = results[3]
    assert members["pipe"] == (1, 3) and members["tensor"] == (3,)
    assert place == Coordinates(pipe=1, replicate=0, shard=1, sequence=0, tensor=0)


def test_mpu_that_contradicts_itself_or_the_world(ranks: Ranks) -> None:
    text = ranks(2, from_lying_mpu, [[0, 1]], [[0], [1]])[0]
    assert "get_data_parallel_group has 2 ranks" in text
    assert "get_data_parallel_world_size is 3" in text
    text = ranks(2, from_small_mpu, [[0], [1]], [[0], [1]])[1]
    assert "do not fill the world of 2 ranks: pipe 1 x replicate 1 x shard 1" in text


def test_mpu_without_the_verbs() -> None:
    with pytest.raises(MeshError, match="mpu of type object needs get_data_parallel_group"):
        Mesh.from_mpu(object())
