"""The rank grid, against small tables and properties."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.errors import MeshError
from ds_comm.grid import (
    AXES,
    Axis,
    Coordinates,
    MeshShape,
    coordinates,
    group_ranks,
    rank_grid,
)

SHAPES = st.builds(
    MeshShape,
    pipe=st.integers(1, 3),
    replicate=st.integers(1, 3),
    shard=st.integers(1, 4),
    sequence=st.integers(1, 3),
    tensor=st.integers(1, 3),
)
AXIS_SETS = st.sets(st.sampled_from(AXES)).map(lambda axes: tuple(sorted(axes)))


def test_axes_are_ordered_slowest_first() -> None:
    assert AXES == ("pipe", "replicate", "shard", "sequence", "tensor")


def test_table_of_eight_ranks() -> None:
    shape = MeshShape.infer(world_size=8, pipe=2, tensor=2)
    assert shape == MeshShape(pipe=2, replicate=1, shard=2, sequence=1, tensor=2)
    assert rank_grid(shape).flatten().tolist() == list(range(8))
    assert group_ranks(shape, ["tensor"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert group_ranks(shape, ["shard"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert group_ranks(shape, ["pipe"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert group_ranks(shape, ["replicate"]) == [(rank,) for rank in range(8)]
    assert group_ranks(shape, ["pipe", "tensor"]) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert group_ranks(shape, AXES) == [tuple(range(8))]
    assert group_ranks(shape, []) == [(rank,) for rank in range(8)]
    assert coordinates(shape, 6) == Coordinates(pipe=1, replicate=0, shard=1, sequence=0, tensor=0)


def test_table_of_hierarchical_sharding_with_sequence() -> None:
    shape = MeshShape.infer(world_size=8, replicate=2, sequence=2)
    assert shape.shard == 2
    assert group_ranks(shape, ["shard", "sequence"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert group_ranks(shape, ["replicate"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert group_ranks(shape, ["replicate", "shard"]) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert group_ranks(shape, ["sequence"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]


@given(shape=SHAPES, axes=AXIS_SETS)
def test_groups_partition_the_world(shape: MeshShape, axes: tuple[Axis, ...]) -> None:
    groups = group_ranks(shape, axes)
    assert sorted(itertools.chain(*groups)) == list(range(shape.world_size))
    size = math.prod(shape.sizes[AXES.index(axis)] for axis in axes)
    assert {len(group) for group in groups} == {size}
    fixed = [index for index, axis in enumerate(AXES) if axis not in axes]
    for group in groups:
        assert list(group) == sorted(group)
        places = [coordinates(shape, rank) for rank in group]
        assert len({tuple(place[index] for index in fixed) for place in places}) == 1
        assert len(set(places)) == len(places)


@given(shape=SHAPES)
def test_coordinates_invert_the_grid(shape: MeshShape) -> None:
    grid = rank_grid(shape)
    assert tuple(grid.shape) == shape.sizes
    for rank in range(shape.world_size):
        assert int(grid[coordinates(shape, rank)]) == rank


@given(shape=SHAPES)
def test_infer_finds_the_shard_axis(shape: MeshShape) -> None:
    inferred = MeshShape.infer(
        world_size=shape.world_size,
        pipe=shape.pipe,
        replicate=shape.replicate,
        sequence=shape.sequence,
        tensor=shape.tensor,
    )
    assert inferred == shape


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_rank_outside(rank: int) -> None:
    with pytest.raises(MeshError, match=r"4 ranks \(pipe 1 x replicate 2 x shard 2 x"):
        coordinates(MeshShape(replicate=2, shard=2), rank)


def test_sizes_that_do_not_fit_are_all_printed() -> None:
    message = "world size 6 .* pipe 2 x replicate 1 x sequence 1 x tensor 2 = 4"
    with pytest.raises(MeshError, match=message):
        MeshShape.infer(world_size=6, pipe=2, tensor=2)
    with pytest.raises(MeshError, match="world size 0"):
        MeshShape.infer(world_size=0)
    with pytest.raises(MeshError, match="world size 2"):
        MeshShape.infer(world_size=2, tensor=4)
    with pytest.raises(MeshError, match="at least one rank: .*tensor -2"):
        MeshShape.infer(world_size=4, tensor=-2, pipe=-2)
    with pytest.raises(MeshError, match="at least one rank: .*sequence 0"):
        MeshShape(sequence=0)


def test_axes_that_do_not_exist() -> None:
    with pytest.raises(MeshError, match="distinct and among"):
        group_ranks(MeshShape(shard=2), ["expert"])  # type: ignore[list-item]
    with pytest.raises(MeshError, match="distinct and among"):
        group_ranks(MeshShape(shard=2), ["shard", "shard"])
