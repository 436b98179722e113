"""The batch triangle: train batch = micro batch x accumulation x data-parallel size."""

from __future__ import annotations

from typing import NamedTuple

from ds_comm.errors import ConfigError

__all__ = ["BatchSizes", "resolve_batch_sizes"]


class BatchSizes(NamedTuple):
    """Batch sizes in samples; ``train == micro * accumulation * data-parallel size``."""

    train: int
    """Samples per optimiser step over all data-parallel ranks."""
    micro: int
    """Samples per forward pass on one data-parallel rank."""
    accumulation: int
    """Micro-batches per optimiser step."""


def resolve_batch_sizes(
    train: int | None, micro: int | None, accumulation: int | None, data_parallel_size: int
) -> BatchSizes:
    """Infers the batch sizes that are not given and checks that all three fit. Pure.

    ===================  =====================================================
    given                inferred
    ===================  =====================================================
    train, micro         accumulation = train / (micro * ranks)
    train, accumulation  micro = train / (accumulation * ranks)
    micro, accumulation  train = micro * accumulation * ranks
    train                accumulation = 1, micro = train / ranks
    micro                accumulation = 1, train = micro * ranks
    ===================  =====================================================

    Args:
        train: ``train_batch_size`` in samples, or ``None`` if the user did not give it.
        micro: ``train_micro_batch_size_per_gpu`` in samples, or ``None``.
        accumulation: ``gradient_accumulation_steps``, or ``None``.
        data_parallel_size: Number of data-parallel ranks.

    Returns:
        The three sizes.

    Raises:
        ConfigError: Too little is given, a size is not positive, or they do not fit. The message
            has all three values, which of them were given, and the data-parallel size.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(_describe(train, micro, accumulation, data_parallel_size, reason))

    if data_parallel_size < 1:
        raise refuse("the data-parallel size must be at least 1")
    if any(size is not None and size < 1 for size in (train, micro, accumulation)):
        raise refuse("every size that is given must be at least 1")
    if train is None and micro is None:
        raise refuse("give train_batch_size or train_micro_batch_size_per_gpu")
    steps = accumulation or 1
    if train is None:
        assert micro is not None
        return BatchSizes(micro * steps * data_parallel_size, micro, steps)
    if micro is None:
        micro_size, rest = divmod(train, steps * data_parallel_size)
        if rest or not micro_size:
            raise refuse(
                f"{train} samples cannot be split evenly into {steps} micro-batch"
                f"{'es' if steps > 1 else ''} on each of {data_parallel_size} ranks"
            )
        return BatchSizes(train, micro_size, steps)
    if accumulation is None:
        steps, rest = divmod(train, micro * data_parallel_size)
        if rest or not steps:
            raise refuse(
                f"{train} is not a multiple of micro batch x ranks = "
                f"{micro} x {data_parallel_size} = {micro * data_parallel_size}"
            )
        return BatchSizes(train, micro, steps)
    product = micro * accumulation * data_parallel_size
    if train != product:
        raise refuse(
            "train batch must equal micro batch x accumulation x ranks = "
            f"{micro} x {accumulation} x {data_parallel_size} = {product}, not {train}"
        )
    return BatchSizes(train, micro, accumulation)


def _describe(
    train: int | None,
    micro: int | None,
    accumulation: int | None,
    data_parallel_size: int,
    reason: str,
) -> str:
    def show(name: str, size: int | None) -> str:
        return f"{name} = not given" if size is None else f"{name} = {size} (given)"

    values = ", ".join(
        [
            show("train_batch_size", train),
            show("train_micro_batch_size_per_gpu", micro),
            show("gradient_accumulation_steps", accumulation),
        ]
    )
    return f"batch sizes do not fit: {reason}. {values}; data-parallel size {data_parallel_size}"
