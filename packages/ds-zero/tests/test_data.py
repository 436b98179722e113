"""DistributedLoader and RepeatingLoader: every sample once, on any number of ranks, resumed."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset

from ds_comm.errors import CheckpointError, ConfigError, EngineError
from ds_zero.data import DistributedLoader, RepeatingLoader
from ds_zero.sampling import RankBatches, epoch_order, num_micro_batches

sizes = st.integers(0, 70)
worlds = st.integers(1, 7)
batches = st.integers(1, 5)


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def loaders(dataset: Any, world_size: int, **kwargs: Any) -> list[DistributedLoader]:
    kwargs = {"batch_size": 2, "collate_fn": list, **kwargs}
    return [
        DistributedLoader(dataset, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]


def deal(order: torch.Tensor, world_size: int, **kwargs: Any) -> list[list[list[int]]]:
    """Micro-batches of every rank."""
    return [
        list(RankBatches(order, rank=rank, world_size=world_size, **kwargs))
        for rank in range(world_size)
    ]


def flat(per_rank: list[list[list[int]]]) -> list[int]:
    return [sample for rank in per_rank for batch in rank for sample in batch]


# ---- pure parts -------------------------------------------------------------------------------


@given(size=sizes, seed=st.integers(0, 1000), epoch=st.integers(0, 50))
def test_order_is_a_permutation_that_depends_on_seed_plus_epoch(
    size: int, seed: int, epoch: int
) -> None:
    order = epoch_order(size, seed=seed, epoch=epoch, shuffle=True)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == epoch_order(size, seed=seed + epoch, epoch=0, shuffle=True).tolist()
    assert epoch_order(size, seed=seed, epoch=epoch, shuffle=False).tolist() == list(range(size))


@given(size=sizes, world_size=worlds, batch_size=batches, drop_last=st.booleans())
def test_ranks_together_see_every_sample(
    size: int, world_size: int, batch_size: int, drop_last: bool
) -> None:
    order = epoch_order(size, seed=3, epoch=0, shuffle=True)
    per_rank = deal(order, world_size, start=0, batch_size=batch_size, drop_last=drop_last)
    seen = Counter(flat(per_rank))
    shapes = [[len(batch) for batch in rank] for rank in per_rank]
    assert shapes == [shapes[0]] * world_size
    assert all(length == batch_size for length in shapes[0][:-1])
    if drop_last:
        assert sorted(seen.elements()) == sorted(
            order[: size // (batch_size * world_size) * batch_size * world_size].tolist()
        )
        assert all(length == batch_size for length in shapes[0])
    else:
        assert set(seen) == set(range(size))
        # What is filled up is the least that makes the ranks even.
        assert seen.total() == -(-size // world_size) * world_size


@given(size=sizes, world_size=worlds, batch_size=batches)
def test_every_micro_batch_of_all_ranks_is_the_next_run_of_the_order(
    size: int, world_size: int, batch_size: int
) -> None:
    order = epoch_order(size, seed=5, epoch=1, shuffle=True)
    per_rank = deal(order, world_size, start=0, batch_size=batch_size, drop_last=False)
    run = batch_size * world_size
    for index, together in enumerate(zip(*per_rank, strict=True)):
        used = {sample for batch in together for sample in batch}
        want = set(order[index * run : (index + 1) * run].tolist())
        assert want <= used
        assert len(want) == run or used - want <= set(order[:world_size].tolist())


@given(
    size=sizes,
    worlds=st.lists(st.tuples(worlds, batches, st.integers(0, 4)), min_size=1, max_size=4),
    last=worlds,
)
def test_resuming_on_other_ranks_neither_repeats_nor_drops(
    size: int, worlds: list[tuple[int, int, int]], last: int
) -> None:
    order = epoch_order(size, seed=0, epoch=0, shuffle=True)
    seen: list[int] = []
    position = 0
    for world_size, batch_size, steps in worlds:
        per_rank = deal(order, world_size, start=position, batch_size=batch_size, drop_last=True)
        taken = [rank[:steps] for rank in per_rank]
        seen += flat(taken)
        position += world_size * batch_size * len(taken[0])
    rest = deal(order, last, start=position, batch_size=2, drop_last=False)
    assert sorted(seen) == sorted(order[:position].tolist())
    assert set(flat(rest)) >= set(order[position:].tolist())
    assert len(flat(rest)) == -(-(size - position) // last) * last


@given(size=sizes, world_size=worlds)
def test_same_share_as_the_sampler_of_torch(size: int, world_size: int) -> None:
    order = epoch_order(size, seed=7, epoch=2, shuffle=True)
    for rank in range(world_size):
        if size == 0:
            return
        theirs = DistributedSampler(Numbers(size), num_replicas=world_size, rank=rank, seed=7)
        theirs.set_epoch(2)
        ours = RankBatches(
            order, start=0, batch_size=3, rank=rank, world_size=world_size, drop_last=False
        )
        assert [sample for batch in ours for sample in batch] == list(theirs)


@pytest.mark.parametrize(
    ("start", "drop_last", "want"), [(0, False, 3), (0, True, 2), (8, False, 1), (10, True, 0)]
)
def test_number_of_micro_batches(start: int, drop_last: bool, want: int) -> None:
    got = num_micro_batches(10, start=start, batch_size=2, world_size=2, drop_last=drop_last)
    assert got == want


# ---- the loader ---------------------------------------------------------------------------------


def test_default_collation_gives_tensors() -> None:
    (loader,) = loaders(Numbers(5), 1, collate_fn=None, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


def test_epochs_follow_by_themselves_with_other_orders() -> None:
    (loader,) = loaders(Numbers(20), 1, seed=4)
    first, second = list(loader), list(loader)
    assert loader.epoch == 2
    assert first != second
    assert sorted(flat([first])) == sorted(flat([second])) == list(range(20))
    loader.set_epoch(0)
    assert list(loader) == first


def test_set_epoch_as_in_a_torch_loop_is_the_same() -> None:
    (plain,), (told,) = loaders(Numbers(9), 1), loaders(Numbers(9), 1)
    for epoch in range(3):
        told.set_epoch(epoch)
        assert list(told) == list(plain)


def test_iterating_anew_starts_the_epoch_anew() -> None:
    (loader,) = loaders(Numbers(10), 1)
    peek = next(iter(loader))
    assert next(iter(loader)) == peek
    assert len(list(loader)) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_resume_in_the_middle_of_an_epoch_on_another_world(kind: Any, num_workers: int) -> None:
    size = 23
    first = loaders(kind(size), 2, num_workers=num_workers)
    iterators = [iter(loader) for loader in first]
    seen = [sample for _ in range(3) for it in iterators for sample in next(it)]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert states[0] == states[1]
    assert states[0]["position"] == 12  # prefetched samples do not count
    second = loaders(kind(size), 3, batch_size=1, num_workers=num_workers)
    for loader in second:
        loader.load_state_dict(states[0])
        seen += [sample for batch in loader for sample in batch]
        assert loader.epoch == 1
    # 11 samples are left, one more fills up three ranks.
    assert set(seen) == set(range(size))
    assert len(seen) == 24


def test_resumed_order_is_the_one_of_the_saved_seed_and_epoch() -> None:
    (loader,) = loaders(Numbers(12), 1, seed=5)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    (other,) = loaders(Numbers(12), 1, seed=99)
    other.load_state_dict(state)
    other.set_epoch(1)
    assert list(other) == rest
    assert list(other) == list(loader)


def test_state_loaded_into_a_running_iteration_counts_from_the_next_batch() -> None:
    (loader,) = loaders(Numbers(10), 1, shuffle=False)
    iterator = iter(loader)
    state = loader.state_dict()
    assert [next(iterator) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    loader.load_state_dict(state)
    assert list(iterator) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_state_at_the_very_end_resumes_with_the_next_epoch() -> None:
    (loader,) = loaders(Numbers(4), 1)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    (other,) = loaders(Numbers(4), 1)
    other.load_state_dict(loader.state_dict())
    (fresh,) = loaders(Numbers(4), 1)
    fresh.set_epoch(1)
    assert next(RepeatingLoader(other)) == next(iter(fresh))


def test_dataset_smaller_than_the_world() -> None:
    seen = [flat([list(loader)]) for loader in loaders(Numbers(2), 5, shuffle=False)]
    assert seen == [[0], [1], [0], [1], [0]]


def test_empty_dataset_yields_nothing() -> None:
    for kind in (Numbers, Stream):
        for loader in loaders(kind(0), 2):
            assert list(loader) == []
    assert len(loaders(Numbers(0), 2)[0]) == 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 6, 13])
def test_streams_are_dealt_like_datasets(size: int, world_size: int, drop_last: bool) -> None:
    per_rank = [list(loader) for loader in loaders(Stream(size), world_size, drop_last=drop_last)]
    lengths = [[len(batch) for batch in rank] for rank in per_rank]
    assert lengths == [lengths[0]] * world_size
    seen = flat(per_rank)
    if drop_last:
        assert sorted(seen) == list(range(size // (2 * world_size) * 2 * world_size))
    else:
        assert set(seen) == set(range(size))
        assert len(seen) == -(-size // world_size) * world_size


def test_a_stream_has_no_length_and_hears_of_epochs() -> None:
    stream = Stream(4)
    (loader,) = loaders(stream, 1)
    with pytest.raises(TypeError, match="Stream has no length"):
        len(loader)
    list(loader)
    list(loader)
    assert stream.epochs == [0, 1]


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    (loader,) = loaders(Numbers(8), 1)
    list(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 2},
        {"rank": -1},
        {"num_workers": -1},
    ],
)
def test_numbers_out_of_range_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        DistributedLoader(Numbers(9), **{"batch_size": 1, "rank": 0, "world_size": 2, **kwargs})


def test_drop_last_of_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples are fewer than batch_size 2 x world_size 2"):
        loaders(Numbers(3), 2, drop_last=True)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"num_samples": 11},
        {"shuffle": False},
        {"position": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    (loader,) = loaders(Numbers(10), 1)
    state = {**loader.state_dict(), **change}
    if change == {"position": None}:
        del state["position"]
    with pytest.raises(CheckpointError):
        loader.load_state_dict(state)


# ---- RepeatingLoader ----------------------------------------------------------------------------


def test_repeating_goes_through_epochs_without_end() -> None:
    (loader,), (same,) = loaders(Numbers(6), 1), loaders(Numbers(6), 1)
    repeating = RepeatingLoader(loader)
    assert len(repeating) == 3
    assert iter(repeating) is repeating
    got = list(itertools.islice(repeating, 7))
    assert got == [*list(same), *list(same), next(iter(same))]


def test_repeating_works_on_any_iterable() -> None:
    assert list(itertools.islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]
    with pytest.raises(TypeError, match="has no length"):
        len(RepeatingLoader(iter(())))


def test_repeating_nothing_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(EngineError, match="no batches"):
        next(RepeatingLoader([]))
