"""Rows that are used again, and the order in which copies come back from the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_zero.checkpointing.memory import Arena, DevicePlace, FreshMemory, HostPlace

CPU = torch.device("cpu")


def test_a_row_is_used_again_when_its_copy_is_gone() -> None:
    arena = Arena(FreshMemory(CPU), 2)
    place = DevicePlace(arena)
    first, second = place.keep(torch.ones(3)), place.keep(torch.full((3,), 2.0))
    rows = {first.fetch().data_ptr(), second.fetch().data_ptr()}
    assert abs(first.fetch().data_ptr() - second.fetch().data_ptr()) == 3 * 4
    del first
    third = place.keep(torch.full((3,), 3.0))
    assert {third.fetch().data_ptr(), second.fetch().data_ptr()} == rows
    assert third.fetch().tolist() == [3.0] * 3 and second.fetch().tolist() == [2.0] * 3


def test_sizes_and_dtypes_have_blocks_of_their_own() -> None:
    place = DevicePlace(Arena(FreshMemory(CPU), 1))
    kept = [place.keep(torch.arange(n).to(d)) for n in (2, 3) for d in (torch.float32, torch.half)]
    assert [k.fetch().tolist() for k in kept] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_more_copies_than_rows(caplog: pytest.LogCaptureFixture) -> None:
    """They are right, they are told once, and no row is lost."""
    place = DevicePlace(Arena(FreshMemory(CPU), 1))
    with caplog.at_level("WARNING"):
        kept = [place.keep(torch.full((5,), float(i))) for i in range(4)]
    assert [k.fetch()[0].item() for k in kept] == [0.0, 1.0, 2.0, 3.0]
    assert [record.message for record in caplog.records if "number_checkpoints" in record.message]
    kept.clear()
    assert place.keep(torch.ones(5)).fetch().tolist() == [1.0] * 5


class Recorder:
    """A mover that only notes what it is told; both sides are the CPU."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def to_host(self, memory: Tensor, values: Tensor) -> Any:
        memory.copy_(values)
        self.log.append(("out", values[0].item()))
        return values[0].item()

    def to_device(self, memory: Tensor, stored: Any) -> tuple[Tensor, Any]:
        assert memory[0].item() == stored
        self.log.append(("in", stored))
        return memory.clone(), stored

    def arrive(self, values: Tensor, mark: Any) -> None:
        self.log.append(("arrived", mark))


def test_the_predecessor_is_fetched_ahead() -> None:
    """Stored 0, 1, 2; fetched 2, 1, 0: each return starts one copy ahead, and none twice."""
    mover = Recorder()
    place = HostPlace(FreshMemory(CPU), mover)
    kept = [place.keep(torch.full((2,), float(i))) for i in range(3)]
    assert mover.log == [("out", 0.0), ("out", 1.0), ("out", 2.0)]
    mover.log.clear()
    for index in (2, 1, 0):
        assert kept.pop().fetch().tolist() == [index] * 2
    assert mover.log == [
        ("in", 2.0),
        ("arrived", 2.0),
        ("in", 1.0),
        ("arrived", 1.0),
        ("in", 0.0),
        ("arrived", 0.0),
    ]


def test_what_is_gone_is_not_fetched_ahead() -> None:
    mover = Recorder()
    place = HostPlace(FreshMemory(CPU), mover)
    kept = [place.keep(torch.full((2,), float(i))) for i in range(3)]
    del kept[1]
    mover.log.clear()
    assert kept[1].fetch().tolist() == [2.0, 2.0]
    assert kept[1].fetch().tolist() == [2.0, 2.0]  # retain_graph: fetched once more
    assert mover.log == [("in", 2.0), ("arrived", 2.0)] * 2
