"""Ranks that diverge, stay away, die or fork: a typed error on every survivor, soon."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.shm import (
    SharedGroup,
    SharedSegment,
    ShmDivergenceError,
    ShmPeerError,
    ShmTimeoutError,
)

STATUS = native_status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)

Run = Callable[..., list[Any]]


# ---- divergence --------------------------------------------------------------------------------


def _start(group: SharedGroup, kind: str, label: str, numel: int = 4) -> None:
    """Run one collective to its end."""
    flat = torch.zeros(group.size * numel)
    if kind == "gather":
        group.gather(flat, label).wait()
    elif kind == "reduce":
        group.reduce(flat, torch.zeros(numel), label).wait()
    elif kind == "all_to_all":
        group.all_to_all(flat.chunk(group.size), flat.clone().chunk(group.size), label).wait()
    elif kind == "all_gather":
        group.all_gather(flat, what=label)
    else:
        group.broadcast(flat, 0, label)


def _diverges(rank: Any, odd: int, here: tuple[str, str, int], there: tuple[str, str, int]) -> Any:
    group = rank.group
    _start(group, "gather", "common")
    _start(group, "reduce", "common")
    with pytest.raises(ShmDivergenceError) as caught:
        _start(group, *(there if group.rank == odd else here))
    with pytest.raises(ShmDivergenceError):
        _start(group, *here)  # the group is of no use any more
    rank.meet()
    return caught.value.peer, caught.value.mine, caught.value.theirs, str(caught.value)


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_to_all", "all_gather", "broadcast"])
@pytest.mark.parametrize(("world", "odd"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_another_label_is_named_with_ours(shm_ranks: Run, world: int, odd: int, kind: str) -> None:
    """Every rank names both operations and who runs the other one."""
    began = time.monotonic()
    found = shm_ranks(world, _diverges, odd, (kind, "layers.3", 4), (kind, "layers.7", 4))
    assert time.monotonic() - began < 10
    for rank, (peer, mine, theirs, text) in enumerate(found):
        labels = ("layers.7", "layers.3") if rank == odd else ("layers.3", "layers.7")
        assert mine.what.startswith(labels[0]) and theirs.what.startswith(labels[1])
        assert peer != odd if rank == odd else peer == odd
        assert mine.index == theirs.index == int(kind in ("gather", "reduce"))
        assert f"rank {rank} runs {labels[0]}" in text and f"rank {peer} runs {labels[1]}" in text


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (("gather", "a", 4), ("reduce", "b", 4)),
        (("all_gather", "a", 4), ("gather", "b", 4)),
        (("reduce", "a", 4), ("broadcast", "b", 4)),
        (("gather", "same", 4), ("gather", "same", 5)),
        (("reduce", "same", 4), ("reduce", "same", 3)),
        (("all_to_all", "same", 4), ("all_to_all", "same", 3)),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_another_kind_or_size_is_found_at_once(
    shm_ranks: Run, world: int, here: Any, there: Any
) -> None:
    """Ranks that wait for each other in different channels, long before the time-out."""
    began = time.monotonic()
    for rank, (_, mine, theirs, _) in enumerate(
        shm_ranks(world, _diverges, world - 1, here, there, timeout_s=30)
    ):
        ours, other = (there, here) if rank == world - 1 else (here, there)
        assert mine.what.startswith(ours[1]) and theirs.what.startswith(other[1])
    assert time.monotonic() - began < 15


def _skips(rank: Any) -> Any:
    group = rank.group
    with pytest.raises(ShmDivergenceError) as caught:
        for label in ["a", "b", "c"] if group.rank == 0 else ["a", "c"]:
            _start(group, "gather", label)
    rank.meet()
    return caught.value.mine, caught.value.theirs


def test_a_left_out_operation_is_found_where_sequences_part(shm_ranks: Run) -> None:
    """At index 1, where one rank runs b and the other c."""
    (mine0, theirs0), (mine1, theirs1) = shm_ranks(2, _skips)
    assert (mine0.what, theirs0.what, mine0.index) == ("b", "c", 1)
    assert (mine1, theirs1) == (theirs0, mine0)
    assert str(mine0) == "b (#1, 16 bytes)"


def _long_label(rank: Any) -> None:
    group = rank.group
    with pytest.raises(ShmDivergenceError, match="éé"):
        _start(group, "gather", "é" * 300 + str(group.rank))
    rank.meet()


def test_labels_that_differ_after_what_is_kept(shm_ranks: Run) -> None:
    """The hash covers all of a label; a cut character is no error of its own."""
    shm_ranks(2, _long_label)


# ---- absence and death -------------------------------------------------------------------------


def _waits_in_vain(rank: Any, kind: str) -> None:
    group = rank.group
    _start(group, kind, "warm")
    if group.rank == 0:
        began = time.monotonic()
        with pytest.raises(ShmTimeoutError, match="lonely.* on rank 0 timed out: rank 1") as caught:
            _start(group, kind, "lonely")
        assert 0.9 < time.monotonic() - began < 5
        assert caught.value.peer == 1 and isinstance(caught.value, TimeoutError)
    rank.meet()


@pytest.mark.parametrize("kind", ["gather", "reduce", "broadcast"])
def test_a_peer_that_stays_away_is_a_timeout(shm_ranks: Run, kind: str) -> None:
    """After the time-out of one second, naming the operation and both ranks."""
    shm_ranks(2, _waits_in_vain, kind, timeout_s=1.0)


def _shared_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def _dies(rank: Any, kind: str) -> Any:
    group = rank.group
    _start(group, kind, "warm")
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ShmPeerError, match=f"last words.* on rank {group.rank}.*rank 1 died"):
        _start(group, kind, "last words")
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_killed_peer_is_an_error_within_a_second(shm_ranks: Run, world: int, kind: str) -> None:
    """Found through its process, long before the time-out; nothing stays in /dev/shm."""
    before = _shared_files()
    ended = shm_ranks(world, _dies, kind, may_die=True)
    assert ended[1].exit_code == -signal.SIGKILL
    for rank, one in enumerate(ended):
        assert rank == 1 or (one.error is None and one.result < 3), one.error
    assert _shared_files() <= before


def _announces_and_dies(rank: Any) -> Any:
    group = rank.group
    flat = torch.zeros(2)
    flat[group.rank] = 5.0 + group.rank
    work = group.gather(flat, "both")
    rank.meet()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    work.wait()
    return flat.tolist()


def test_what_a_dead_peer_had_announced_still_counts(shm_ranks: Run) -> None:
    """Its memory lives on where it is mapped."""
    ended = shm_ranks(2, _announces_and_dies, may_die=True)
    assert ended[0].result == [5.0, 6.0], ended[0].error


def _leaves(rank: Any) -> None:
    group = rank.group
    _start(group, "reduce", "warm")
    if group.rank == 0:
        group.close()
        group.close()
    else:
        with pytest.raises(ShmPeerError, match="rank 0 left the group"):
            _start(group, "reduce", "late")
    rank.meet()


def test_a_peer_that_left_is_an_error(shm_ranks: Run) -> None:
    """An engine that was destroyed on one rank only."""
    shm_ranks(2, _leaves)


def _interrupted(rank: Any) -> float:
    group = rank.group
    if group.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            _start(group, "gather", "endless")
        took = time.monotonic() - began
        rank.meet()
        return took
    rank.meet()
    return 0.0


def test_a_wait_can_be_interrupted(shm_ranks: Run) -> None:
    """Python's signal handlers run while native code waits."""
    assert shm_ranks(2, _interrupted)[0] < 2


def _forks(rank: Any) -> None:
    """A data-loader worker that ends must not take the group with it."""
    group = rank.group
    tensor = group.segment.allocate(1 << 20, torch.float32)
    tensor.fill_(3.0)
    child = os.fork()
    if child == 0:
        code = 0
        try:
            group.segment.allocate(10, torch.float32)
            code = 1
        except MemoryError:
            pass
        try:
            group.gather(torch.zeros(group.size), "from a child")
            code = 2
        except RuntimeError:
            pass
        group.close()
        del tensor
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    rank.meet()
    _start(group, "reduce", "after")
    assert bool((tensor == 3.0).all())
    rank.meet()


def test_a_forked_child_neither_closes_nor_frees(shm_ranks: Run) -> None:
    """It may look, but not announce or allocate, and to free and close does nothing there."""
    shm_ranks(2, _forks)


# ---- addresses ---------------------------------------------------------------------------------


def test_an_address_of_something_else_is_refused(tmp_path: Path) -> None:
    """Another file, another segment, no file, no address."""
    segment = SharedSegment(1 << 30)
    pid, fd, nonce = segment.address.split(":")
    with pytest.raises(RuntimeError, match="another segment"):
        SharedGroup(segment, [segment.address, f"{pid}:{fd}:{int(nonce, 16) ^ 1:x}"], 0)
    with open(tmp_path / "file", "w+") as file:
        with pytest.raises(RuntimeError, match="not a segment"):
            SharedGroup(segment, [segment.address, f"{pid}:{file.fileno()}:1"], 0)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        SharedGroup(segment, [segment.address, f"{pid}:99999:1"], 0)
    with pytest.raises(RuntimeError, match="not the address"):
        SharedGroup(segment, [segment.address, "nonsense"], 0)
    with pytest.raises(KernelArgumentError, match="addresses: number 0"):
        SharedGroup(segment, ["nonsense"], 0)


def test_a_system_that_refuses_is_an_os_error() -> None:
    """A limit on the size of files counts for anonymous ones, too."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, kept[1]))
    try:
        with pytest.raises(OSError, match="sizing a memfd: File too large") as caught:
            SharedSegment(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert caught.value.errno == errno.EFBIG
