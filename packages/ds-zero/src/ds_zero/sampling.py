"""Which samples a rank reads, in which order: pure, without a loader and without communication.

[Note: order of samples]
An epoch is one global order of all samples, the same on every rank: a permutation drawn from
``seed + epoch``, or the order of the dataset.  Micro-batch ``k`` of all ranks together is the
``k``-th run of ``world_size * batch_size`` samples in it, dealt to the ranks one by one in turn (as
``torch.utils.data.DistributedSampler`` does).  After any number of micro-batches the samples used
are therefore a prefix of the order, and one number, the *position*, says all of it.  A loader that
resumes at that position goes on with the next sample, whatever its world size and batch size.

The last run of an epoch may be short.  It is dropped (``drop_last``) or filled up to a multiple of
the world size with samples from the beginning of the order, so that every rank sees the same number
of equally long micro-batches: at most ``world_size - 1`` samples are used twice, none is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["RankBatches", "RankStream", "epoch_order", "num_micro_batches"]


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the global order of one epoch: int64 of shape (num_samples,); pure.

    Args:
        num_samples: length of the dataset.
        seed: base seed, the same on every rank.
        epoch: number of the epoch; each has another permutation.
        shuffle: permute, or keep the order of the dataset.
    """
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def num_micro_batches(
    num_samples: int, *, start: int, batch_size: int, world_size: int, drop_last: bool
) -> int:
    """Return how many micro-batches each rank gets from position ``start`` to the end; pure."""
    run = batch_size * world_size
    left = max(0, num_samples - start)
    return left // run if drop_last else -(-left // run)


class RankBatches:
    """The sample indices of one rank's micro-batches, from a position to the end of an epoch.

    A batch sampler for ``torch.utils.data.DataLoader``; see [Note: order of samples].

    Args:
        order: global order, int64 of shape (num_samples,).
        start: position of the first sample, in [0, num_samples].
        batch_size: samples per micro-batch and rank.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        drop_last: leave out a short last run instead of filling it up.
    """

    def __init__(
        self,
        order: torch.Tensor,
        *,
        start: int,
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool,
    ) -> None:
        self._order = order
        self._start = start
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return num_micro_batches(
            self._order.numel(),
            start=self._start,
            batch_size=self._batch_size,
            world_size=self._world_size,
            drop_last=self._drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one list of sample indices per micro-batch."""
        run = self._batch_size * self._world_size
        for index in range(len(self)):
            samples = self._order[self._start + index * run :][:run]
            short = -samples.numel() % self._world_size
            if short:
                samples = torch.cat([samples, _cycle(self._order, short)])
            yield samples[self._rank :: self._world_size].tolist()


def _cycle(order: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` elements of ``order`` repeated without end."""
    repeats = -(-count // order.numel())
    return order.repeat(repeats)[:count]


class RankStream(IterableDataset[Any]):
    """One rank's share of an iterable dataset.

    The stream is read whole by every rank, and by every worker of it, and cut as in
    [Note: order of samples]; so the dataset must yield the same samples in the same order in every
    process and must not shard itself.  The last run is filled up from itself, since the beginning
    of a stream is gone.

    Args:
        dataset: the stream.
        start: samples to skip.
        batch_size: samples per micro-batch and rank.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        drop_last: leave out a short last run instead of filling it up.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        start: int,
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool,
    ) -> None:
        self._dataset = dataset
        self._start = start
        self._run = batch_size * world_size
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this rank and worker, a micro-batch at a time."""
        worker = get_worker_info()
        # Workers take runs in turn, the order in which DataLoader asks them for batches.
        turn, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index, samples in enumerate(self._runs()):
            if index % num_workers == turn:
                yield from samples[self._rank :: self._world_size]

    def _runs(self) -> Iterator[list[Any]]:
        """Yield runs of samples of all ranks, the last one filled up or dropped."""
        run: list[Any] = []
        for index, sample in enumerate(self._dataset):
            if index < self._start:
                continue
            run.append(sample)
            if len(run) == self._run:
                yield run
                run = []
        if run and not self._drop_last:
            whole = -(-len(run) // self._world_size) * self._world_size
            yield [run[index % len(run)] for index in range(whole)]
