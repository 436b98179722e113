"""Every algorithm against float64 sums worked out from the seeds; sizes, dtypes, order, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.collectives import (
    Call,
    Collectives,
    LocalCollectives,
    NativeCollectives,
    PairwiseCollectives,
    RecordingCollectives,
    barrier,
    broadcast_object,
    collectives_for,
    connect_shared,
    gather_objects,
)
from ds_comm.collectives.pairwise import ScratchPool, sum_in_rank_order
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks

WORLDS = (2, 3, 4)
SIZES = (0, 1, 7, 64, 4097)
ALGORITHMS = ("pairwise", "native", "shared")
RANK_ORDERED = ("pairwise", "shared")
"""Those whose sums are formed in rank order, in fp32 for 16-bit inputs."""


def _values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """The contribution of one rank; every rank can work out everybody's."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _exact_sum(world: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    rows = [_values(rank, numel, dtype, salt).double() for rank in range(world)]
    return torch.stack(rows).sum(dim=0)


def _served(algorithm: str, group: Group | None = None) -> Collectives:
    group = Group.world() if group is None else group
    if algorithm == "pairwise":
        return PairwiseCollectives(group)
    if algorithm == "native":
        return NativeCollectives(group)
    shared = connect_shared(group)
    if shared is None:
        pytest.skip("ranks cannot share memory here: ds-kernels is not built")
    return shared


def _own(flat: Tensor, group: Group) -> Tensor:
    size = flat.numel() // group.size
    return flat[group.rank * size : (group.rank + 1) * size]


# ---- reduce ------------------------------------------------------------------------------------


def _reduces(algorithm: str) -> None:
    served = _served(algorithm)
    world, rank = served.group.size, served.group.rank
    for size in SIZES:
        numel = size * world
        part = slice(rank * size, (rank + 1) * size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            exact = _exact_sum(world, numel, dtype)[part]
            # A sum of `world` fp32 terms of size about one.
            tolerance = {"rtol": 1e-6, "atol": 1e-6}
            out = torch.full((size,), 7.0)
            served.reduce(_values(rank, numel, dtype), out, "fresh").wait()
            if algorithm in RANK_ORDERED or dtype == torch.float32:
                torch.testing.assert_close(out.double(), exact, **tolerance)
            before = torch.arange(size, dtype=torch.float32)
            out = before.clone()
            served.reduce(_values(rank, numel, dtype), out, "more", accumulate=True).wait()
            if algorithm in RANK_ORDERED or dtype == torch.float32:
                wanted = before.double() + exact
                torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=2e-6)
            # out is a view of this rank's own shard, in the same dtype: rounded once.
            flat = _values(rank, numel, dtype)
            own = flat[part]
            served.reduce(flat, own, "in place").wait()
            if algorithm in RANK_ORDERED:
                assert torch.equal(own, _rank_ordered(world, numel, dtype)[part].to(dtype))
            elif dtype == torch.float32:
                torch.testing.assert_close(own.double(), exact, **tolerance)


def _rank_ordered(world: int, numel: int, dtype: torch.dtype) -> Tensor:
    """((v0 + v1) + v2) + ... in fp32."""
    total = _values(0, numel, dtype).float()
    for rank in range(1, world):
        total = total + _values(rank, numel, dtype).float()
    return total


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_equals_a_float64_sum(ranks: Ranks, world: int, algorithm: str) -> None:
    """Sizes 0 and odd, fp32 and 16-bit inputs with fp32 result, added, and in place."""
    ranks(world, _reduces, algorithm)


def _doubles(algorithm: str) -> None:
    served = _served(algorithm)
    world, rank = served.group.size, served.group.rank
    flat = torch.full((world,), 1.0 + (rank + 1) * 2.0**-40, dtype=torch.float64)
    out = torch.empty(1, dtype=torch.float64)
    served.reduce(flat, out, "fp64").wait()
    assert out.item() == world + sum(r + 1 for r in range(world)) * 2.0**-40


@pytest.mark.parametrize("algorithm", RANK_ORDERED)
@pytest.mark.parametrize("world", [2, 3])
def test_float64_sums_keep_their_precision(ranks: Ranks, world: int, algorithm: str) -> None:
    """Only 16-bit inputs are summed in fp32; ``1 + k 2^-40`` has no fp32 neighbour."""
    ranks(world, _doubles, algorithm)


def _cut_bits(algorithm: str) -> list[bytes]:
    """The sum of the same 1260 values, reduced whole and in pieces of several sizes."""
    served = _served(algorithm)
    world, rank = served.group.size, served.group.rank
    values = _values(rank, 1260, torch.float32) * 10.0 ** (rank * 3 - 4)
    found = []
    for parts in (1, 3, 5, 7):
        pieces = []
        for part in values.chunk(parts):
            padded = torch.zeros(-(-part.numel() // world) * world)
            padded[: part.numel()] = part
            served.reduce(padded, _own(padded, served.group), "cut").wait()
            served.gather(padded, "cut").wait()
            pieces.append(padded[: part.numel()])
        found.append(torch.cat(pieces).numpy().tobytes())
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_the_sum_has_the_same_bits_for_any_cut(ranks: Ranks, world: int) -> None:
    """Rank order everywhere: whichever rank owns an element, on all ranks."""
    results = [
        bits
        for algorithm in RANK_ORDERED
        for found in ranks(world, _cut_bits, algorithm)
        for bits in found
    ]
    assert len(set(results)) == 1
    scaled = [_values(r, 1260, torch.float32) * 10.0 ** (r * 3 - 4) for r in range(world)]
    total = scaled[0]
    for part in scaled[1:]:
        total = total + part
    assert results[0] == total.numpy().tobytes()


# ---- gather ------------------------------------------------------------------------------------


def _gathers(algorithm: str) -> None:
    served = _served(algorithm)
    world, rank = served.group.size, served.group.rank
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            rows = [(_values(r, size, torch.float32) * 50).to(dtype) for r in range(world)]
            flat = torch.zeros(size * world, dtype=dtype)
            _own(flat, served.group).copy_(rows[rank])
            address = flat.data_ptr()
            work = served.gather(flat, "all")
            work.wait()
            work.wait()
            assert torch.equal(flat, torch.cat(rows)) and flat.data_ptr() == address
            flat.zero_()
            served.gather(flat, "from shards", rows[rank].clone()).wait()
            assert torch.equal(flat, torch.cat(rows))
        masters = [_values(r, size, torch.float32) for r in range(world)]
        rounded = torch.zeros(size * world, dtype=torch.bfloat16)
        served.gather(rounded, "rounded", masters[rank].clone()).wait()
        assert torch.equal(rounded, torch.cat(masters).bfloat16())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_gather_fills_every_shard_in_place(ranks: Ranks, world: int, algorithm: str) -> None:
    """Any dtype; the buffer stays where it is; a second wait does nothing."""
    ranks(world, _gathers, algorithm)


# ---- all to all --------------------------------------------------------------------------------


def _uneven(algorithm: str) -> None:
    """Rank r sends r + 2 p elements of value 100 r + p to rank p; nobody sends from 0 to 0."""
    served = _served(algorithm)
    log = RecordingCollectives(served)
    world, rank = served.group.size, served.group.rank
    for dtype in (torch.float32, torch.int64, torch.uint8):
        send = [torch.full((rank + 2 * p,), 100 * rank + p).to(dtype) for p in range(world)]
        receive = [torch.zeros(r + 2 * rank, dtype=dtype) for r in range(world)]
        works = [log.all_to_all(send, receive, "rows"), log.all_to_all(send, receive, "again")]
        for work in (*reversed(works), *works):
            work.wait()
        for source, part in enumerate(receive):
            wanted = torch.full((source + 2 * rank,), 100 * source + rank).to(dtype)
            assert torch.equal(part, wanted)
        others = sum(rank + 2 * p for p in range(world) if p != rank)
        assert set(log.calls) == {
            Call("all_to_all", name, others * dtype.itemsize) for name in ("rows", "again")
        }
        log.calls.clear()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_moves_uneven_parts(ranks: Ranks, world: int, algorithm: str) -> None:
    """Empty parts, several dtypes, two in flight, and the bytes that leave each rank."""
    ranks(world, _uneven, algorithm)


# ---- several in flight -------------------------------------------------------------------------


def _in_flight(algorithm: str) -> None:
    served = _served(algorithm)
    world, rank = served.group.size, served.group.rank
    sizes = (5, 300, 1, 64, 2048)
    for backwards in (False, True):
        works: list[tuple[Any, Tensor, Tensor]] = []
        for salt, size in enumerate(sizes):
            flat = _values(rank, size * world, torch.float32, salt)
            out = torch.empty(size)
            full = torch.zeros(size * world)
            _own(full, served.group).fill_(100 * salt + rank)
            works.append((served.reduce(flat, out, f"reduce {salt}"), out, torch.empty(0)))
            works.append((served.gather(full, f"gather {salt}"), torch.empty(0), full))
        order = list(range(len(works)))
        # Half of the ranks wait in the opposite order, too.
        if backwards != bool(rank % 2):
            order.reverse()
        for index in order:
            works[index][0].wait()
        for salt, size in enumerate(sizes):
            exact = _exact_sum(world, size * world, torch.float32, salt)
            out, full = works[2 * salt][1], works[2 * salt + 1][2]
            torch.testing.assert_close(
                out.double(), exact[rank * size : (rank + 1) * size], rtol=1e-6, atol=1e-6
            )
            wanted = torch.arange(world).repeat_interleave(size).float() + 100 * salt
            assert torch.equal(full, wanted)
    # Buffers of the pool are handed out again, and hold nothing of their past.
    for salt in range(6):
        out = torch.ones(9)
        work = served.reduce(
            _values(rank, 9 * world, torch.float32, salt), out, "again", accumulate=True
        )
        work.wait()
        work.wait()
        exact = _own(_exact_sum(world, 9 * world, torch.float32, salt), served.group) + 1
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("algorithm", RANK_ORDERED)
@pytest.mark.parametrize("world", WORLDS)
def test_many_in_flight_are_waited_for_in_any_order(
    ranks: Ranks, world: int, algorithm: str
) -> None:
    """Ten at a time, waited in opposite orders on odd and even ranks; wait twice adds once."""
    ranks(world, _in_flight, algorithm)


# ---- the small ones ----------------------------------------------------------------------------


def _small(algorithm: str) -> None:
    served = _served(algorithm)
    group = served.group
    world, rank = group.size, group.rank
    rows = served.exchange(torch.tensor([rank, 10 * rank + 1], dtype=torch.int64))
    assert rows.tolist() == [[r, 10 * r + 1] for r in range(world)]
    raw = served.exchange(torch.arange(3, dtype=torch.uint8) + rank)
    assert raw.shape == (world, 3) and raw[:, 0].tolist() == list(range(world))
    for source in range(world):
        tensor = torch.full((2, 3), float(rank))
        served.broadcast(tensor, source)
        assert torch.equal(tensor, torch.full((2, 3), float(source)))
    empty = torch.empty(0)
    served.broadcast(empty, 0)
    assert gather_objects({"rank": rank}, group) == [{"rank": r} for r in range(world)]
    for source in range(world):
        assert broadcast_object(("from", rank), group, source) == ("from", source)
    barrier(group)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_broadcast_and_objects(ranks: Ranks, world: int, algorithm: str) -> None:
    """``exchange``, ``broadcast`` from every source, objects, barrier."""
    ranks(world, _small, algorithm)


def _subgroups(algorithm: str) -> None:
    """Two groups whose group ranks differ from the global ones."""
    rank = dist.get_rank()
    members = [(0, 2), (1, 3)][rank % 2]
    handles = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = Group(members, members.index(rank), handles[rank % 2])
    served = _served(algorithm, group)
    flat = torch.zeros(2)
    flat[group.rank] = rank
    served.gather(flat, f"of {members}").wait()
    assert flat.tolist() == list(members)
    out = torch.empty(1)
    served.reduce(torch.tensor([float(rank), 10.0 * rank]), out, "sum").wait()
    assert out.item() == sum(members) * (10 if group.rank else 1)
    tensor = torch.tensor([rank])
    served.broadcast(tensor, 1)
    assert tensor.item() == members[1]
    assert broadcast_object(rank, group, 1) == members[1]
    assert gather_objects(rank, group) == list(members)
    assert served.exchange(torch.tensor([rank])).flatten().tolist() == list(members)


@pytest.mark.parametrize("algorithm", RANK_ORDERED)
def test_sources_count_within_the_group(ranks: Ranks, algorithm: str) -> None:
    """Groups {0, 2} and {1, 3} at the same time."""
    ranks(4, _subgroups, algorithm)


# ---- one rank ----------------------------------------------------------------------------------


def test_a_group_of_one_needs_no_process_group() -> None:
    """Copies, adds and aliases, without ``torch.distributed``."""
    served = collectives_for(Group.solo(5))
    assert isinstance(served, LocalCollectives) and served.group.ranks == (5,)
    flat = torch.tensor([1.5, -2.25, 3.0])
    served.gather(flat, "x").wait()
    assert flat.tolist() == [1.5, -2.25, 3.0]
    out = torch.zeros(3)
    served.reduce(flat, out, "x").wait()
    served.reduce(flat, out, "x", accumulate=True).wait()
    assert out.tolist() == [3.0, -4.5, 6.0]
    served.reduce(flat, flat, "x").wait()
    assert flat.tolist() == [1.5, -2.25, 3.0]
    wide = torch.empty(3)
    served.reduce(flat.bfloat16(), wide, "x").wait()
    assert wide.dtype == torch.float32 and wide.tolist() == [1.5, -2.25, 3.0]
    nothing = torch.empty(0)
    served.reduce(nothing, torch.empty(0), "x").wait()
    served.broadcast(flat, 0)
    received = torch.zeros(3)
    served.all_to_all([flat], [received], "x").wait()
    assert torch.equal(received, flat)
    assert served.exchange(torch.tensor([4, 5])).tolist() == [[4, 5]]
    assert gather_objects("a", served.group) == ["a"]
    assert broadcast_object("b", served.group) == "b"
    barrier(served.group)


# ---- memory that peers read in place -----------------------------------------------------------


def _lent() -> None:
    served = _served("shared")
    world, rank = served.group.size, served.group.rank
    allocate = served.allocator
    assert allocate is not None and PairwiseCollectives(served.group).allocator is None
    assert RecordingCollectives(served).allocator is not None
    for size in (1, 4097, 700_000):
        flat = allocate(size * world, torch.float32)
        assert flat.shape == (size * world,) and flat.dtype == torch.float32
        flat.copy_(_values(rank, size * world, torch.float32))
        out = torch.empty(size)
        served.reduce(flat, out, "lent").wait()
        # The wait has given the buffer back.
        flat.fill_(rank)
        exact = _exact_sum(world, size * world, torch.float32)[rank * size : (rank + 1) * size]
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
        shard = allocate(size, torch.float32).fill_(10 + rank)
        served.gather(flat, "from lent shards", shard).wait()
        shard.zero_()
        wanted = torch.arange(10, 10 + world).repeat_interleave(size).float()
        assert torch.equal(flat, wanted)


@pytest.mark.parametrize("world", WORLDS)
def test_lent_memory_is_given_back_by_the_wait(ranks: Ranks, world: int) -> None:
    """What is written after the wait is not what peers read."""
    ranks(world, _lent)


# ---- parts -------------------------------------------------------------------------------------


def test_rank_order_decides_the_bits() -> None:
    """(1 + 2^-24) + 2^-24 rounds to 1 in fp32, any other order does not."""
    tiny = 2.0**-24
    for count in (2, 3):
        pieces = [torch.tensor([1.0])] + [torch.tensor([tiny]) for _ in range(count - 1)]
        out = torch.empty(1)
        sum_in_rank_order(pieces, out, accumulate=False)
        assert out.item() == 1.0
    pieces = [torch.tensor([tiny]), torch.tensor([tiny]), torch.tensor([1.0])]
    sum_in_rank_order(pieces, out, accumulate=False)
    assert out.item() == 1.0 + 2.0**-23


def test_16_bit_pieces_are_rounded_once() -> None:
    """256 + 1 + 1 is 258 in fp32, but 256 if every partial sum were rounded to bf16."""
    pieces = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_in_rank_order([piece.clone() for piece in pieces], out, accumulate=False)
    assert out.item() == 258.0
    wide = torch.tensor([0.5])
    sum_in_rank_order(pieces, wide, accumulate=True)
    assert wide.item() == 258.5


def test_scratch_buffers_are_reused_for_what_fits() -> None:
    """The smallest that is large enough; other dtypes see the same bytes."""
    pool, cpu = ScratchPool(), torch.device("cpu")
    large, small = (pool.take(n, torch.float32, cpu) for n in (100, 10))
    addresses = large.data_ptr(), small.data_ptr()
    pool.give(large)
    pool.give(small)
    again = pool.take(20, torch.bfloat16, cpu)
    assert again.data_ptr() == addresses[1] and again.numel() == 20
    assert pool.take(11, torch.float32, cpu).data_ptr() == addresses[0]
    fresh = pool.take(1, torch.float32, cpu)
    assert fresh.data_ptr() not in addresses
    pool.give(again)
    pool.clear()
    assert pool.take(3, torch.float64, cpu).numel() == 3


# ---- recording ---------------------------------------------------------------------------------


def _recorded(algorithm: str) -> list[Call]:
    log = RecordingCollectives(_served(algorithm))
    world = log.group.size
    log.gather(torch.zeros(6 * world), "weights").wait()
    log.reduce(torch.zeros(10 * world, dtype=torch.bfloat16), torch.empty(10), "grads").wait()
    log.reduce(torch.zeros(0), torch.empty(0), "nothing").wait()
    log.exchange(torch.zeros(5, dtype=torch.uint8))
    log.broadcast(torch.zeros(3, dtype=torch.float64), 1)
    return log.calls


@pytest.mark.parametrize("algorithm", RANK_ORDERED)
@pytest.mark.parametrize("world", WORLDS)
def test_recording_counts_what_leaves_this_rank(ranks: Ranks, world: int, algorithm: str) -> None:
    """A shard or row to each of the others: 24, 20 and 5 bytes; a broadcast from its source."""
    for rank, calls in enumerate(ranks(world, _recorded, algorithm)):
        others = world - 1
        assert calls == [
            ("gather", "weights", 24 * others),
            ("reduce", "grads", 20 * others),
            ("reduce", "nothing", 0),
            ("exchange", "row", 5 * others),
            ("broadcast", "from 1", 24 if rank == 1 else 0),
        ]
