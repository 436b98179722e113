"""Distributed data loading whose position can be saved and resumed on any number of ranks.

The order itself is in ``sampling``, [Note: order of samples].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_comm.errors import CheckpointError, ConfigError, EngineError
from ds_zero.sampling import RankBatches, RankStream, epoch_order, num_micro_batches

__all__ = ["DistributedLoader", "RepeatingLoader"]

STATE_VERSION = 1

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class _HasEpochs(Protocol):
    """A dataset that wants to know the epoch, as streaming datasets do."""

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch."""
        ...


class DistributedLoader:
    """Micro-batches of one data-parallel rank, resumable in the middle of an epoch.

    ``iter()`` begins at the start of the current epoch, or at the position that was loaded; when it
    is exhausted the loader moves to the next epoch by itself, with another permutation.  All ranks
    yield equally many micro-batches.  Nothing here communicates.  See [Note: order of samples].

    The position counts samples that were handed out, not those that workers have prefetched.  One
    iteration at a time: the position belongs to the latest ``iter()``.

    Args:
        dataset: map-style (any object with ``__getitem__`` and ``__len__``) or iterable (each rank
            reads the whole stream and keeps its share; resuming skips, see RankStream).
        batch_size: samples per micro-batch on this rank, >= 1.
        rank: data-parallel rank, in [0, world_size).
        world_size: number of data-parallel ranks, >= 1.
        collate_fn: turns a list of samples into a micro-batch; None: torch's default.
        drop_last: leave out a short last run instead of filling it up with repeated samples.
        shuffle: permute the samples anew in each epoch; an iterable dataset shuffles itself.
        seed: base of the permutations; must be the same on all ranks.
        num_workers: processes that load samples; 0: this one.
        pin_memory: copy tensors into pinned memory before handing them out.

    Raises:
        ConfigError: a number is out of range, or ``drop_last`` would drop the whole dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1 or world_size < 1 or num_workers < 0 or not 0 <= rank < world_size:
            raise ConfigError(
                "data loader: batch_size and world_size must be at least 1, num_workers at least "
                f"0, rank in [0, world_size); got batch_size={batch_size}, "
                f"world_size={world_size}, num_workers={num_workers}, rank={rank}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self._collate_fn = collate_fn
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._seed = seed
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._epoch = 0
        self._start = 0
        self._position = 0
        self._loads = 0
        self._num_samples = len(dataset) if isinstance(dataset, Sized) else None
        if self._num_samples and drop_last and self._num_samples < batch_size * world_size:
            raise ConfigError(
                f"data loader: drop_last would drop the whole dataset: {self._num_samples} samples "
                f"are fewer than batch_size {batch_size} x world_size {world_size}"
            )

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Global samples of the current epoch that were handed out on all ranks together."""
        return self._position

    def __len__(self) -> int:
        """Return the number of micro-batches of a whole epoch on this rank.

        Raises:
            TypeError: the dataset has no length.
        """
        if self._num_samples is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return num_micro_batches(
            self._num_samples,
            start=0,
            batch_size=self.batch_size,
            world_size=self.world_size,
            drop_last=self._drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches from the start, or the loaded position, to the epoch's end."""
        while True:
            self._position = self._start
            loads = self._loads
            for batch in self._torch_loader():
                self._advance()
                yield batch
                if loads != self._loads:
                    break
            else:
                self._epoch += 1
                self._start = self._position = 0
                return
            # A state was loaded while this iteration was running: go on from there.

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``; the current one keeps a loaded position.

        Args:
            epoch: number of the epoch, >= 0.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._start = self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values that JSON can hold; the same on every rank."""
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last sample that was handed out when ``state`` was taken.

        World size and batch size may differ.  Takes effect at the next micro-batch, also in an
        iteration that is running.

        Args:
            state: what ``state_dict`` returned on any rank.

        Raises:
            CheckpointError: the state is of another version, malformed, or of a dataset of another
                length or order, where a position means nothing.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"data loader state has version {state.get('version')!r}; "
                f"this release reads {STATE_VERSION}"
            )
        missing = {"epoch", "position", "seed", "shuffle", "num_samples"} - set(state)
        if missing:
            raise CheckpointError(f"data loader state lacks {', '.join(sorted(missing))}")
        if state["num_samples"] != self._num_samples or state["shuffle"] != self._shuffle:
            raise CheckpointError(
                f"data loader state is of {state['num_samples']} samples with "
                f"shuffle={state['shuffle']}; this loader has {self._num_samples} with "
                f"shuffle={self._shuffle}: the position has no meaning here"
            )
        self._epoch = int(state["epoch"])
        self._seed = int(state["seed"])
        self._start = self._position = int(state["position"])
        self._loads += 1

    def _advance(self) -> None:
        """Count one micro-batch of all ranks."""
        self._position += self.batch_size * self.world_size
        if self._num_samples is not None:
            self._position = min(self._position, self._num_samples)

    def _torch_loader(self) -> DataLoader[Any]:
        """Return torch's loader over the rest of the epoch."""
        # Its own generator: worker seeds are reproducible, differ by rank, and the global random
        # state of the training script is left alone.
        generator = torch.Generator().manual_seed(self._seed + self._epoch + (self.rank << 32))
        if isinstance(self.dataset, _HasEpochs):
            self.dataset.set_epoch(self._epoch)
        if isinstance(self.dataset, IterableDataset):
            return DataLoader(
                RankStream(
                    self.dataset,
                    start=self._start,
                    batch_size=self.batch_size,
                    rank=self.rank,
                    world_size=self.world_size,
                    drop_last=self._drop_last,
                ),
                batch_size=self.batch_size,
                collate_fn=self._collate_fn,
                num_workers=self._num_workers,
                pin_memory=self._pin_memory,
                generator=generator,
            )
        if self._num_samples is None:
            raise ConfigError(
                f"data loader: {type(self.dataset).__name__} has neither a length nor is it a "
                "torch.utils.data.IterableDataset"
            )
        batches = RankBatches(
            epoch_order(
                self._num_samples, seed=self._seed, epoch=self._epoch, shuffle=self._shuffle
            ),
            start=self._start,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self._drop_last,
        )
        return DataLoader(
            self.dataset,
            batch_sampler=batches,
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            generator=generator,
        )


class RepeatingLoader(Iterator[T_co]):
    """An iterator that starts its loader again whenever it is exhausted.

    Args:
        loader: anything that can be iterated again and again, e.g. a DistributedLoader, which
            moves to its next epoch each time.
    """

    def __init__(self, loader: Iterable[T_co]) -> None:
        self.loader = loader
        self._iterator: Iterator[T_co] | None = None

    def __iter__(self) -> RepeatingLoader[T_co]:
        """Return itself; the running iteration goes on."""
        return self

    def __len__(self) -> int:
        """Return the length of one pass over the loader.

        Raises:
            TypeError: the loader has no length.
        """
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __next__(self) -> T_co:
        """Return the next batch, from a new pass where the old one has ended.

        Raises:
            EngineError: two passes in a row were empty, so there will never be a batch.
        """
        # Two tries after the running pass: the first may be the empty rest of an epoch whose end
        # was saved in a checkpoint.
        for _ in range(3):
            if self._iterator is None:
                self._iterator = iter(self.loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise EngineError("RepeatingLoader: the loader yields no batches")
