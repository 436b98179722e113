"""The usual collectives against sums and orders worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_comm.collectives import (
    Reduction,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    broadcast,
    broadcast_coalesced,
    reduce_scatter,
)
from ds_comm.errors import CommError
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks


def _reductions() -> None:
    group = Group.world()
    size, rank = group.size, group.rank
    x = torch.tensor([1.0, -2.0, 0.5]) * (rank + 1)
    total = size * (size + 1) / 2
    base = torch.tensor([1.0, -2.0, 0.5])
    assert torch.allclose(all_reduce(x.clone(), group), base * total)
    assert torch.allclose(all_reduce(x.clone(), group, Reduction.MEAN), base * total / size)
    high = torch.tensor([1.0 * size, -2.0, 0.5 * size])
    assert torch.equal(all_reduce(x.clone(), group, Reduction.MAX), high)
    low = torch.tensor([1.0, -2.0 * size, 0.5])
    assert torch.equal(all_reduce(x.clone(), group, Reduction.MIN), low)
    assert all_reduce(torch.zeros(0), group).numel() == 0
    with pytest.raises(CommError, match="contiguous"):
        all_reduce(torch.zeros(3, 2).t(), group)
    with pytest.raises(CommError, match="mean"):
        all_reduce(torch.zeros(3, dtype=torch.int64), group, Reduction.MEAN)


def _movements() -> None:
    group = Group.world()
    size, rank = group.size, group.rank
    mine = torch.full((2, 3), float(rank))
    assert torch.equal(
        all_gather(mine, group), torch.stack([torch.full((2, 3), float(r)) for r in range(size)])
    )
    # Row r of rank s is 10 s + r.
    rows = torch.tensor([[10.0 * rank + r] for r in range(size)])
    assert all_to_all(rows, group).flatten().tolist() == [10.0 * s + rank for s in range(size)]
    summed = reduce_scatter(rows, group)
    assert summed.tolist() == [[sum(10.0 * s + rank for s in range(size))]]
    assert reduce_scatter(rows, group, Reduction.MAX).tolist() == [[10.0 * (size - 1) + rank]]
    assert reduce_scatter(rows, group, Reduction.MIN).tolist() == [[float(rank)]]
    with pytest.raises(CommError, match="divides"):
        reduce_scatter(torch.zeros(size + 1), Group(tuple(range(size + 2)), rank))
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64):
        value = torch.ones(5).to(dtype) if rank == size - 1 else torch.zeros(5).to(dtype)
        assert bool((broadcast(value, group, size - 1) == 1).all())


def _coalesced() -> None:
    group = Group.world()
    size, rank = group.size, group.rank

    def make(scale: float) -> list[Tensor]:
        wide = torch.arange(6.0).view(2, 3).t() * scale
        return [wide, torch.zeros(0), torch.tensor(scale), torch.full((3,), int(scale))]

    tensors = make(rank + 1.0)
    all_reduce_coalesced(tensors, group)
    total = size * (size + 1) / 2
    for found, wanted in zip(tensors, make(total), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    tensors = make(rank + 1.0)
    broadcast_coalesced(tensors, group, size - 1)
    for found, wanted in zip(tensors, make(size), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_basic_collectives(ranks: Ranks, world: int) -> None:
    """Every reduction, movement and coalesced form, on every size of group."""
    ranks(world, _reductions)
    ranks(world, _movements)
    ranks(world, _coalesced)
