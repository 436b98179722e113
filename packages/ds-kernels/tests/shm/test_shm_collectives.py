"""Collectives through shared memory against sums and orders worked out from the seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.shm import SharedGroup, SharedSegment, ShmWork

STATUS = native_status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)

Run = Callable[..., list[Any]]

WORLDS = (1, 2, 3, 4)
SIZES = (0, 1, 7, 64, 4097, 9000)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SMALL_CHUNK = 4096
"""Bytes; so that a few thousand elements pass through both buffers several times."""


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """The contribution of one rank; every rank can work out everybody's."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float64
        return (torch.randn(numel, generator=generator, dtype=wide) * 10.0 ** (rank % 3)).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def ordered_sum(world: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """((v0 + v1) + v2) + ... by torch, in fp32 for 16-bit floats."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values(0, numel, dtype, salt).to(wide)
    for rank in range(1, world):
        total = total + values(rank, numel, dtype, salt).to(wide)
    return total


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Whether dtype, shape and bytes agree."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(
        found.contiguous().view(-1).view(torch.uint8),
        wanted.contiguous().view(-1).view(torch.uint8),
    )


def in_segment(group: SharedGroup, tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` where peers see it in place."""
    placed = group.segment.allocate(tensor.numel(), tensor.dtype)
    placed.copy_(tensor)
    assert tensor.numel() == 0 or group.segment.contains(placed)
    return placed


# ---- blocking ----------------------------------------------------------------------------------


def _all_reduces(rank: Any) -> None:
    group = rank.group
    for dtype in (*FLOATS, *INTEGERS, torch.complex64):
        for size in SIZES:
            found = group.all_reduce(values(group.rank, size, dtype))
            assert same_bits(found, ordered_sum(group.size, size, dtype).to(dtype)), (dtype, size)
    matrix = values(group.rank, 12, torch.float32).view(3, 4)
    assert group.all_reduce(matrix) is matrix
    assert same_bits(matrix, ordered_sum(group.size, 12, torch.float32).view(3, 4))


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_has_the_bits_of_a_rank_ordered_sum(shm_ranks: Run, world: int) -> None:
    """Every dtype, empty and odd sizes, in chunks and with a remainder."""
    shm_ranks(world, _all_reduces, chunk_bytes=SMALL_CHUNK)


def _large_all_reduce(rank: Any) -> None:
    group = rank.group
    size = 3_000_001
    found = group.all_reduce(values(group.rank, size, torch.float32))
    assert same_bits(found, ordered_sum(group.size, size, torch.float32))


@pytest.mark.parametrize("world", [2, 3])
def test_all_reduce_of_many_chunks(shm_ranks: Run, world: int) -> None:
    """12 MB, at the size of chunks that is the default."""
    shm_ranks(world, _large_all_reduce)


def _reduce_scatters(rank: Any) -> None:
    group = rank.group
    world = group.size
    for dtype in (*FLOATS, torch.int32):
        for size in SIZES:
            part = slice(group.rank * size, (group.rank + 1) * size)
            flat = values(group.rank, size * world, dtype)
            total = ordered_sum(world, size * world, dtype)[part]
            out = torch.ones(size, dtype=dtype)
            assert group.reduce_scatter(flat, out) is out
            assert same_bits(out, total.to(dtype))
            group.reduce_scatter(flat, out, accumulate=True)
            wide = total.to(dtype).to(total.dtype)
            assert same_bits(out, (wide + total).to(dtype))
            assert same_bits(flat, values(group.rank, size * world, dtype))
            own = flat[part]
            group.reduce_scatter(flat, own)
            assert same_bits(own, total.to(dtype))


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(shm_ranks: Run, world: int) -> None:
    """Replaced, added, and into this rank's own part; the input is left as it was."""
    shm_ranks(world, _reduce_scatters, chunk_bytes=SMALL_CHUNK)


def _gathers_and_broadcasts(rank: Any) -> None:
    group = rank.group
    world = group.size
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        for size in SIZES:
            rows = [values(r, size, torch.float32).to(dtype) for r in range(world)]
            found = group.all_gather(rows[group.rank])
            assert same_bits(found, torch.stack(rows))
            whole = torch.zeros(size * world, dtype=dtype)
            own = whole[group.rank * size : (group.rank + 1) * size]
            own.copy_(rows[group.rank])
            assert group.all_gather(own, whole) is whole
            assert same_bits(whole, torch.cat(rows))
            for source in range(world):
                tensor = rows[group.rank].clone()
                assert group.broadcast(tensor, source) is tensor
                assert same_bits(tensor, rows[source])


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_and_broadcast(shm_ranks: Run, world: int) -> None:
    """Any dtype as bytes; with and without a place for the result; every source."""
    shm_ranks(world, _gathers_and_broadcasts, chunk_bytes=SMALL_CHUNK)


# ---- asynchronous ------------------------------------------------------------------------------


def _reduces(rank: Any, placed: bool) -> None:
    group = rank.group
    world = group.size
    for dtype in (*FLOATS, torch.int64, torch.complex64):
        for size in SIZES:
            part = slice(group.rank * size, (group.rank + 1) * size)
            total = ordered_sum(world, size * world, dtype)[part]
            flat = values(group.rank, size * world, dtype)
            if placed:
                flat = in_segment(group, flat)
            out = torch.ones(size, dtype=total.dtype)
            group.reduce(flat, out, "fresh").wait()
            assert same_bits(out, total)
            group.reduce(flat, out, "more", accumulate=True).wait()
            assert same_bits(out, total + total)
            work = group.reduce(flat, flat[part], "in place")
            work.wait()
            work.wait()
            assert same_bits(flat[part], total.to(dtype))
            # The wait has given the buffer back: peers do not see what comes next.
            flat.zero_()


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_reduce(shm_ranks: Run, world: int, placed: bool) -> None:
    """Copied in or read in place; into fp32, added, and into this rank's own part."""
    shm_ranks(world, _reduces, placed)


def _gathers(rank: Any, placed: bool) -> None:
    group = rank.group
    world = group.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for size in SIZES:
            rows = [(values(r, size, torch.float32) * 5).to(dtype) for r in range(world)]
            flat = torch.zeros(size * world, dtype=dtype)
            if placed:
                flat = in_segment(group, flat)
            flat[group.rank * size : (group.rank + 1) * size] = rows[group.rank]
            address = flat.data_ptr()
            group.gather(flat, "all").wait()
            assert same_bits(flat, torch.cat(rows)) and flat.data_ptr() == address
            flat.zero_()  # after the wait this rank's part is its own again
            shard = in_segment(group, rows[group.rank]) if placed else rows[group.rank]
            group.gather(flat, "from shards", shard).wait()
            assert same_bits(flat, torch.cat(rows))
            shard.zero_()


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_gather(shm_ranks: Run, world: int, placed: bool) -> None:
    """In place and from shards elsewhere; copied in or read in place."""
    shm_ranks(world, _gathers, placed)


def _converted(rank: Any) -> None:
    group = rank.group
    numel = 5001
    special = [float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 65520.0, 1e-8, 6e-8, 3.3e38]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        rows = [values(r, numel, torch.float32) * 1e-3 for r in range(group.size)]
        for row in rows:
            row[: len(special)] = torch.tensor(special)
        flat = torch.empty(numel * group.size, dtype=dtype)
        group.gather(flat, "narrowed", in_segment(group, rows[group.rank])).wait()
        assert same_bits(flat, torch.cat(rows).to(dtype))


@pytest.mark.parametrize("world", [1, 2])
def test_gather_rounds_masters_as_torch_does(shm_ranks: Run, world: int) -> None:
    """fp32 shards into bf16, fp16 and fp64 buffers, with infinities, ties and subnormals."""
    shm_ranks(world, _converted)


def _every_half(rank: Any) -> None:
    group = rank.group
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        halves = patterns.view(dtype)
        wide = torch.empty(halves.numel())
        group.gather(wide, "widened", halves).wait()
        number = ~halves.isnan()
        assert torch.equal(wide[number], halves[number].float())
        assert bool(wide[~number].isnan().all())
        back = torch.empty_like(halves)
        group.gather(back, "narrowed", wide).wait()
        assert torch.equal(back.view(torch.int16)[number], patterns[number])
        assert bool(back[~number].isnan().all())
    # Everything between two neighbours of fp16: the ties, and one step beside them.
    low = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    high = torch.arange(1, 0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middle = ((low.double() + high.double()) / 2).float()[:-1]
    for wide in (middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))):
        half = torch.empty(wide.numel(), dtype=torch.float16)
        group.gather(half, "ties", wide.contiguous()).wait()
        assert torch.equal(half, wide.half())


def test_every_16_bit_pattern_converts_as_in_torch(shm_ranks: Run) -> None:
    """All 65536 patterns of bf16 and fp16 there and back; all ties of fp16."""
    shm_ranks(1, _every_half)


def _pieces(rank: Any) -> None:
    group = rank.group
    world, me = group.size, group.rank
    for salt in range(3):
        # Rank s sends 3 s + r + 7 salt elements to rank r; the last rank sends nothing.
        sizes = [
            [0 if s == world - 1 else 3 * s + r + 700 * salt for r in range(world)]
            for s in range(world)
        ]
        whole = in_segment(group, values(me, sum(sizes[me]), torch.float32, salt))
        send = list(whole.split(sizes[me]))
        if send[0].numel():
            send[0] = send[0].clone()  # one that is copied in, beside those read in place
        receive = [torch.empty(sizes[s][me]) for s in range(world)]
        group.all_to_all(send, receive, "pieces").wait()
        for source in range(world):
            begin = sum(sizes[source][:me])
            wanted = values(source, sum(sizes[source]), torch.float32, salt)
            assert same_bits(receive[source], wanted[begin : begin + sizes[source][me]])
        whole.zero_()


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_of_uneven_pieces(shm_ranks: Run, world: int) -> None:
    """Sizes that differ by sender and receiver, and ranks that send nothing."""
    shm_ranks(world, _pieces)


def _in_flight(rank: Any) -> None:
    group = rank.group
    world, me = group.size, group.rank
    sizes = (5, 300, 1, 64, 2048)
    for backwards in (False, True):
        works: list[ShmWork] = []
        outs, fulls = [], []
        for salt, size in enumerate(sizes):
            flat = values(me, size * world, torch.float32, salt)
            if salt % 2:
                flat = in_segment(group, flat)
            outs.append(torch.empty(size))
            fulls.append(in_segment(group, torch.zeros(size * world)))
            fulls[-1][me * size : (me + 1) * size] = 100 * salt + me
            # Channels are independent: odd ranks announce in another order.
            for kind in ("reduce", "gather") if me % 2 else ("gather", "reduce"):
                if kind == "reduce":
                    works.append(group.reduce(flat, outs[salt], f"reduce {salt}"))
                else:
                    works.append(group.gather(fulls[salt], f"gather {salt}"))
        order = list(range(len(works)))
        if backwards != bool(me % 2):
            order.reverse()
        for index in order:
            works[index].wait()
        for salt, size in enumerate(sizes):
            total = ordered_sum(world, size * world, torch.float32, salt)
            assert same_bits(outs[salt], total[me * size : (me + 1) * size])
            wanted = torch.arange(world).repeat_interleave(size).float() + 100 * salt
            assert torch.equal(fulls[salt], wanted)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_in_flight_are_waited_for_in_any_order(shm_ranks: Run, world: int) -> None:
    """Ten at a time, waited in opposite orders on odd and even ranks."""
    shm_ranks(world, _in_flight)


def _forgotten(rank: Any) -> None:
    group = rank.group
    for turn in range(700):
        flat = torch.full((group.size,), float(turn + group.rank))
        out = torch.empty(1)
        work = group.reduce(flat, out, "often")
    work.wait()
    assert out.item() == sum(699.0 + r for r in range(group.size))
    works = []
    for turn in range(300):
        flat = torch.zeros(group.size)
        flat[group.rank] = turn
        works.append((group.gather(flat, "often"), flat))
    for turn, (work, flat) in enumerate(works):
        work.wait()
        assert flat.tolist() == [float(turn)] * group.size


@pytest.mark.parametrize("world", [2, 4])
def test_more_operations_than_the_ring_holds(shm_ranks: Run, world: int) -> None:
    """Works that nobody waits for are done all the same, and do not stop the next ones."""
    shm_ranks(world, _forgotten)


def _swapped_slowly(rank: Any) -> None:
    """Rank 0 announces again after everybody else, but not itself, has pulled what it sent."""
    group = rank.group
    world, me = group.size, group.rank
    works, received = [], []
    for turn, numel in enumerate((48, 3, 500)):
        send = [torch.full((numel + me,), float(turn + me)) for _ in range(world)]
        received.append([torch.empty(numel + r) for r in range(world)])
        works.append(group.all_to_all(send, received[-1], f"swap {turn}"))
        if me:
            works[-1].wait()
        rank.meet()
    for turn, work in enumerate(works):
        work.wait()
        for r, piece in enumerate(received[turn]):
            assert bool((piece == float(turn + r)).all())


@pytest.mark.parametrize("world", [2, 3])
def test_a_table_stays_until_its_own_rank_has_read_it(shm_ranks: Run, world: int) -> None:
    """Peers may be done with what a rank has announced long before the rank itself."""
    shm_ranks(world, _swapped_slowly)


def _far_ahead(rank: Any) -> None:
    """Rank 0 announces more than the ring holds before it waits for the first."""
    group = rank.group
    works, flats = [], []
    for turn in range(600):
        flats.append(torch.full((group.size,), float(turn + group.rank)))
        works.append(group.gather(flats[-1], f"gather {turn}"))
        if group.rank:
            works[-1].wait()
    for turn, work in enumerate(works):
        work.wait()
        assert flats[turn].tolist() == [float(turn + r) for r in range(group.size)]
    rank.meet()


@pytest.mark.parametrize("world", [2, 3])
def test_an_announcement_stays_until_its_own_rank_has_read_it(shm_ranks: Run, world: int) -> None:
    """Entries of the ring are written again only when all ranks, this one too, are past them."""
    shm_ranks(world, _far_ahead)


def _added_in_order(rank: Any) -> None:
    """Two sums into one place, waited for in the opposite order: added in the order of calls."""
    group = rank.group
    out = torch.zeros(1)
    ones = torch.full((group.size,), 2.0**24 / group.size)
    tiny = torch.full((group.size,), 1.0 / group.size)
    works = [group.reduce(ones, out, "large", accumulate=True)]
    works += [group.reduce(tiny, out, "tiny", accumulate=True) for _ in range(2)]
    for work in reversed(works):
        work.wait()
    assert out.item() == 2.0**24  # (1 + 1) + 2^24 would be 2 more


def test_sums_into_one_place_keep_their_order(shm_ranks: Run) -> None:
    """The bits do not depend on the order of waits."""
    shm_ranks(2, _added_in_order)


# ---- memory ------------------------------------------------------------------------------------


def _status_kb(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _given_back(rank: Any) -> None:
    group = rank.group
    numel = 16 << 20
    before = _status_kb("RssShmem")
    for _ in range(6):
        tensor = group.segment.allocate(numel, torch.uint8)
        assert tensor.data_ptr() % (2 << 20) == 0
        tensor.fill_(7)
        view = tensor[5:]
        del tensor
        assert int(view[-1]) == 7
        del view
    assert _status_kb("RssShmem") - before < 40 << 10  # in kB: less than three of them
    small = group.segment.allocate(3, torch.float64)
    assert small.tolist() == [0.0, 0.0, 0.0] and small.data_ptr() % 4096 == 0


def test_memory_is_given_back_with_the_last_view(shm_ranks: Run) -> None:
    """Six times 16 MiB, one after the other; large tensors are aligned for huge pages."""
    shm_ranks(1, _given_back)


def _freed_while_read(rank: Any) -> None:
    """Rank 0 frees what it announced after it, but before rank 1, has read it."""
    group = rank.group
    numel = 1 << 20
    flat = in_segment(group, torch.full((2 * numel,), 3.0 + group.rank))
    out = torch.empty(numel)
    if group.rank == 0:
        rank.meet()
        group.reduce(flat, out, "both")
        group.reduce(torch.zeros(2), torch.empty(1), "next")  # lets go of what is complete
        del flat
        other = group.segment.allocate(2 * numel, torch.float32)
        other.fill_(99)
        rank.meet()
    else:
        work = group.reduce(flat, out, "both")
        rank.meet()
        rank.meet()
        work.wait()
    assert bool((out == 7.0).all())
    rank.meet()


def test_memory_that_peers_still_read_is_held_back(shm_ranks: Run) -> None:
    """A freed tensor keeps its pages until every peer has pulled what was announced."""
    shm_ranks(2, _freed_while_read)


def _peers_pages(rank: Any) -> int:
    group = rank.group
    numel = 32 << 20
    shard = in_segment(group, torch.zeros(numel, dtype=torch.uint8))
    flat = torch.empty(2 * numel, dtype=torch.uint8)
    before = _status_kb("RssShmem")
    group.gather(flat, "all", shard).wait()
    rank.meet()
    return (_status_kb("RssShmem") - before) >> 10 if group.segment.has_huge_pages else 0


def test_what_was_read_from_peers_does_not_stay_mapped(shm_ranks: Run) -> None:
    """32 MiB of a peer's memory; with huge pages only ends of the range may stay."""
    assert all(growth_mib <= 4 for growth_mib in shm_ranks(2, _peers_pages))


# ---- bad input ---------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named() -> None:
    """Shape, dtype, strides, device and divisibility, on a group of one."""
    segment = SharedSegment(1 << 30)
    group = SharedGroup(segment, [segment.address], 0)
    good = torch.zeros(4)
    bad = pytest.raises
    with bad(KernelArgumentError, match="flat: .*contiguous"):
        group.gather(torch.zeros(4, 2).t(), "x")
    with bad(KernelArgumentError, match="flat: .*contiguous"):
        group.reduce(torch.zeros(8)[::2], good, "x")
    with bad(KernelArgumentError, match="flat: .*dimension"):
        group.gather(torch.zeros(2, 2), "x")
    with bad(KernelArgumentError, match="out: .*3"):
        group.reduce(good, torch.zeros(3), "x")
    with bad(KernelArgumentError, match="tensor: .*bool"):
        group.all_reduce(torch.zeros(3, dtype=torch.bool))
    with bad(KernelArgumentError, match="out: .*float64"):
        group.reduce(good, torch.zeros(4, dtype=torch.float64), "x")
    with bad(KernelArgumentError, match="int32"):
        group.gather(good, "x", torch.zeros(4, dtype=torch.int32))
    with bad(KernelArgumentError, match="flat: "):
        group.gather(torch.zeros(4, device="meta"), "x")
    with bad(KernelArgumentError, match="tensor: .*contiguous"):
        group.all_reduce(torch.zeros(2, 3).t())
    with bad(KernelArgumentError, match="tensor: .*contiguous"):
        group.all_reduce(torch.zeros(4, dtype=torch.complex64)[::2])
    with bad(KernelArgumentError, match="source: is 1"):
        group.broadcast(good, 1)
    with bad(KernelArgumentError, match="out: .*5"):
        group.all_gather(good, torch.zeros(5))
    with bad(KernelArgumentError, match="receive"):
        group.all_to_all([good], [], "x")
    with bad(KernelArgumentError, match="rank: is 3"):
        SharedGroup(segment, [segment.address], 3)
    with bad(KernelArgumentError, match="chunk_bytes: is 5"):
        SharedGroup(segment, [segment.address], 0, chunk_bytes=5)
    with pytest.raises(MemoryError):
        segment.allocate(1 << 40, torch.float32)
