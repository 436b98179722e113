"""Ranks that diverge, stay away or die: a typed error on every survivor, soon."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_comm.collectives import Collectives, PairwiseCollectives, connect_shared
from ds_comm.collectives.pairwise import _describe, _encode_header
from ds_comm.errors import CommError, CommTimeoutError, DivergenceError
from ds_comm.group import Group
from ds_comm.testing import RankError, RankPool
from ds_comm.testing.plugin import Ranks


@pytest.fixture(params=["pairwise", "shared"])
def algorithm(request: pytest.FixtureRequest) -> str:
    """Every failure is tried over gloo and through shared memory."""
    return str(request.param)


def _short(algorithm: str, timeout_s: float) -> Collectives:
    """Collectives over all ranks, on a group of its own with a short time-out."""
    ranks = tuple(range(dist.get_world_size()))
    handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    group = Group(ranks, dist.get_rank(), handle)
    if algorithm == "pairwise":
        return PairwiseCollectives(group)
    shared = connect_shared(group)
    if shared is None:
        pytest.skip("ranks cannot share memory here: ds-kernels is not built")
    return shared


# ---- divergence --------------------------------------------------------------------------------


def _diverge(algorithm: str, kind: str, odd_rank: int, sizes_differ: bool) -> str:
    served = _short(algorithm, 20)
    rank, world = served.group.rank, served.group.size
    served.gather(torch.zeros(world), "common").wait()
    label = "layers.7" if rank == odd_rank else "layers.3"
    numel = world * (12 if sizes_differ and rank == odd_rank else 5)
    flat = torch.full((numel,), float(rank))
    with pytest.raises(DivergenceError) as caught:
        if kind == "gather":
            served.gather(flat, label).wait()
        elif kind == "all_to_all":
            parts = list(flat.chunk(world))
            served.all_to_all(parts, [torch.empty_like(part) for part in parts], label).wait()
        else:
            served.reduce(flat, torch.empty(numel // world), label).wait()
    # Nobody leaves, and so closes connections, before all have seen their error.
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_to_all"])
@pytest.mark.parametrize(("world", "odd_rank"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_another_label_is_named_with_ours(
    algorithm: str, ranks: Ranks, world: int, odd_rank: int, kind: str
) -> None:
    """Every rank names both, with the ranks that run them."""
    for rank, message in enumerate(ranks(world, _diverge, algorithm, kind, odd_rank, False)):
        assert "layers.3" in message and "layers.7" in message and kind in message
        assert f"rank {rank} runs" in message
        assert message.index("layers.7") < message.index("layers.3") if rank == odd_rank else True
    assert f"rank {odd_rank} runs {kind} of 'layers.7'" in message or rank == odd_rank


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_to_all"])
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_units_of_other_sizes_diverge_too(
    algorithm: str, ranks: Ranks, odd_rank: int, kind: str
) -> None:
    """Different modules mostly have different sizes: the same error, no crash."""
    for message in ranks(2, _diverge, algorithm, kind, odd_rank, True):
        assert "layers.3" in message and "layers.7" in message


def _same_label_other_size(algorithm: str) -> None:
    served = _short(algorithm, 20)
    numel = 2 * (5 + 4 * served.group.rank)
    with pytest.raises(CommError):
        served.gather(torch.zeros(numel), "blocks.0").wait()
    dist.barrier()


def test_equal_labels_of_other_sizes_are_an_error(algorithm: str, ranks: Ranks) -> None:
    """Ranks whose models differ in width: a typed error, no crash and no mixed weights."""
    ranks(2, _same_label_other_size, algorithm)


def _skipped(algorithm: str) -> str:
    """Rank 1 leaves one gather out: its next one has the wrong number and label."""
    served = _short(algorithm, 20)
    labels = ["a", "b", "c"] if served.group.rank == 0 else ["a", "c"]
    with pytest.raises(DivergenceError) as caught:
        for label in labels:
            served.gather(torch.zeros(4), label).wait()
    dist.barrier()
    return str(caught.value)


def test_a_left_out_collective_is_found_at_once(algorithm: str, ranks: Ranks) -> None:
    """At the first place where the sequences part."""
    for message in ranks(2, _skipped, algorithm):
        assert "'b' (#1," in message and "'c' (#1," in message


def _long_labels(algorithm: str) -> str:
    served = _short(algorithm, 20)
    label = "x" * 300 + str(served.group.rank)
    with pytest.raises(DivergenceError) as caught:
        served.gather(torch.zeros(2), label).wait()
    dist.barrier()
    return str(caught.value)


def test_labels_that_differ_after_what_fits_the_header(algorithm: str, ranks: Ranks) -> None:
    """The hash covers the whole label, and no multi-byte character is cut into an error."""
    assert all("gather of 'xxx" in message for message in ranks(2, _long_labels, algorithm))
    described = _describe(_encode_header(3, 4096, "é" * 90))
    assert "é" in described and "(#3, 4,096 bytes)" in described


# ---- absence and death -------------------------------------------------------------------------


def _late(algorithm: str, kind: str) -> None:
    served = _short(algorithm, 3)
    served.gather(torch.zeros(2), "warm").wait()
    if served.group.rank == 0:
        began = time.monotonic()
        with pytest.raises(CommTimeoutError, match="'lonely'.*rank 0"):
            if kind == "gather":
                served.gather(torch.zeros(2), "lonely").wait()
            else:
                served.reduce(torch.zeros(2), torch.empty(1), "lonely").wait()
        assert time.monotonic() - began < 30
    dist.barrier()


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_to_all"])
def test_a_peer_that_stays_away_is_a_timeout(algorithm: str, ranks: Ranks, kind: str) -> None:
    """After the group's time-out, naming the operation and the rank that waited."""
    ranks(2, _late, algorithm, kind)


def _other_kinds(algorithm: str) -> None:
    served = _short(algorithm, 3)
    served.gather(torch.zeros(2), "warm").wait()
    with pytest.raises(CommError, match="'a'|'b'"):
        if served.group.rank == 0:
            served.gather(torch.zeros(2), "a").wait()
        else:
            served.reduce(torch.zeros(2), torch.empty(1), "b").wait()
    dist.barrier()


def test_a_gather_that_meets_a_reduction_is_an_error(algorithm: str, ranks: Ranks) -> None:
    """They travel on channels of their own, so it is at the latest a time-out on both."""
    ranks(2, _other_kinds, algorithm)


def _dies(algorithm: str) -> None:
    served = _short(algorithm, 20)
    served.gather(torch.zeros(2), "warm").wait()
    if served.group.rank == 1:
        os._exit(17)
    served.reduce(torch.zeros(2), torch.empty(1), "last words").wait()


def test_a_peer_that_dies_is_an_error(algorithm: str) -> None:
    """Its closed connection is seen long before the time-out."""
    began = time.monotonic()
    with RankPool(2) as pool, pytest.raises(RankError) as caught:
        pool.run(2, _dies, algorithm)
    assert time.monotonic() - began < 60
    failures = {failure.rank: failure for failure in caught.value.failures}
    assert failures[1].kind == "crashed"
    assert isinstance(failures[0].exception, CommError)
    assert "'last words'" in failures[0].summary and "rank 0" in failures[0].summary
