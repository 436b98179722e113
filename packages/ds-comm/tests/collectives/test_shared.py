"""When ranks share memory, when they do not, and what the log says then."""

from __future__ import annotations

import logging
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_comm import logging as ds_logging
from ds_comm.collectives import (
    Collectives,
    PairwiseCollectives,
    SharedCollectives,
    collectives_for,
    shared,
)
from ds_comm.collectives.shared import _disagreement, _Offer, _timeout_s
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks


class _Lines(logging.Handler):
    """Keeps the log of the module, and lets every line be new."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        ds_logging._seen.clear()
        logging.getLogger("ds_comm.collectives.shared").addHandler(self)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("ds_comm.collectives.shared").removeHandler(self)


def _works(served: Collectives) -> None:
    out = torch.empty(1)
    flat = torch.full((served.group.size,), float(served.group.rank))
    served.reduce(flat, out, "sum").wait()
    assert out.item() == sum(range(served.group.size))


def _native() -> bool:
    from ds_kernels import native_status

    return native_status().available


def _by_default() -> None:
    before = os.environ.pop("DS_COMM_SHM", None)
    try:
        served = collectives_for(Group.world())
        assert isinstance(served, SharedCollectives if _native() else PairwiseCollectives)
        _works(served)
    finally:
        if before is not None:
            os.environ["DS_COMM_SHM"] = before


def test_cpu_ranks_of_one_host_share_memory(ranks: Ranks) -> None:
    """Wherever the native module is built; nobody has to ask."""
    pytest.importorskip("ds_kernels")
    ranks(2, _by_default)


def _switched_off(odd: int, value: str) -> list[str]:
    rank = dist.get_rank()
    before = os.environ.pop("DS_COMM_SHM", None)
    if rank == odd or odd < 0:
        os.environ["DS_COMM_SHM"] = value
    try:
        with _Lines() as lines:
            for _ in range(2):
                served = collectives_for(Group.world())
                off = value == "0" or not _native()
                assert isinstance(served, PairwiseCollectives if off else SharedCollectives)
                _works(served)
        return lines
    finally:
        os.environ.pop("DS_COMM_SHM", None)
        if before is not None:
            os.environ["DS_COMM_SHM"] = before


@pytest.mark.parametrize("odd", [-1, 0, 1])
def test_the_switch_of_any_rank_counts_for_all(ranks: Ranks, odd: int) -> None:
    """One line on rank 0 that names the switch and the rank; nothing on the others."""
    pytest.importorskip("ds_kernels")
    lines = ranks(2, _switched_off, odd, "0")
    assert len(lines[0]) == 1 and lines[1] == []
    if _native():
        assert f"DS_COMM_SHM=0 (rank {max(odd, 0)})" in lines[0][0]


def test_other_values_leave_it_on(ranks: Ranks) -> None:
    """Only 0 turns it off."""
    pytest.importorskip("ds_kernels")
    if _native():
        assert ranks(2, _switched_off, -1, "1") == [[], []]


def _broken(what: str) -> list[str]:
    """Rank 1 is told that it is elsewhere, cannot tell, or cannot open its peer's memory."""
    rank = dist.get_rank()
    kept = shared._host_key, shared._open, shared._BOOT_ID
    if rank == 1 and what == "host":
        shared._host_key = lambda: ("another", "")
    if rank == 1 and what == "proc":
        shared._BOOT_ID = Path("/nowhere")
    if rank == 1 and what == "limit":
        kept_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, kept_limit[1]))
    if rank == 1 and what == "open":
        shared._open = lambda *_: (None, "no such thing (rank 1)")
    try:
        with _Lines() as lines:
            served = collectives_for(Group.world())
            assert isinstance(served, PairwiseCollectives)
            _works(served)
        return lines
    finally:
        shared._host_key, shared._open, shared._BOOT_ID = kept
        if rank == 1 and what == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, kept_limit)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("host", "ranks 0 and 1 are on different"),
        ("open", "no such thing"),
        ("proc", "which ranks are on one host"),
        ("limit", "no shared memory: .*[Ff]ile too large"),
    ],
)
def test_ranks_that_cannot_meet_all_talk_over_gloo(ranks: Ranks, what: str, text: str) -> None:
    """What one rank finds out decides for all, with its reason."""
    pytest.importorskip("ds_kernels")
    if not _native():
        pytest.skip("ds-kernels is not built")
    lines = ranks(2, _broken, what)
    assert len(lines[0]) == 1 and re.search(text, lines[0][0]) and lines[1] == []


def test_every_rank_comes_to_the_same_verdict() -> None:
    """It is a function of what all have been told."""
    group = Group((4, 6), 0)
    here = _Offer("a", "1:2:3", "")
    assert _disagreement([here, here], group) == ""
    assert "ranks 4 and 6" in _disagreement([here, _Offer("b", "1:2:3", "")], group)
    assert _disagreement([here, _Offer("a", "", "broken")], group) == "broken (rank 6)"


def _timeouts() -> float:
    from datetime import timedelta

    handle = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    return _timeout_s(Group((0, 1), dist.get_rank(), handle))


def test_the_timeout_is_that_of_the_group(ranks: Ranks) -> None:
    """Read from torch's group, 77 seconds."""
    assert ranks(2, _timeouts) == [77.0, 77.0]
