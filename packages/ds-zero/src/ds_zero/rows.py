"""Gradients of embeddings travel as rows where that is fewer bytes.

[Note: rows]
A micro-batch touches few rows of a large embedding; the others' gradients are zero.  The weight of
an embedding has a run of its own, whose reduction looks for rows that are not zero, tells all ranks
how many there are, and sends their numbers and values if that is less than sending all.  Sums are
formed in rank order as in the dense reduction, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_comm.collectives import Collectives, Work

__all__ = ["FlatReduction", "RowCollectives"]

_INDEX_BYTES = 4
_MAX_ROWS = 2**31


class FlatReduction(Protocol):
    """What a gradient's way to its shard needs of :class:`ds_comm.collectives.Collectives`."""

    def gather(self, flat: Tensor, label: str) -> Work:
        """See ``Collectives.gather``."""
        ...

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """See ``Collectives.reduce``."""
        ...


class RowCollectives:
    """Reduces and gathers a flat buffer of rows most of which are zero.  See [Note: rows]."""

    def __init__(self, inner: Collectives, num_rows: int, row_numel: int) -> None:
        """Serve buffers that begin with rows.

        Args:
            inner: Moves the rows, or everything where that is less; at least two ranks.
            num_rows: Number of rows; fewer than 2^31.
            row_numel: Elements of one.
        """
        if num_rows >= _MAX_ROWS:
            raise ValueError(f"{num_rows} rows do not fit 32-bit numbers")
        self._inner = inner
        self._num_rows = num_rows
        self._row_numel = row_numel
        self._counts: list[list[int]] = []

    def reduce(self, flat: Tensor, out: Tensor, label: str, *, accumulate: bool = False) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.reduce`; exchanges counts first."""
        group = self._inner.group
        rows = self._filled(flat)
        shard_numel = flat.numel() // group.size
        bounds = [self._rows_of(rank * shard_numel, shard_numel) for rank in range(group.size)]
        chosen = [rows[(rows >= first) & (rows < last)] for first, last in bounds]
        if not self._pays(flat, [part.numel() for part in chosen]):
            return self._inner.reduce(flat, out, label, accumulate=accumulate)
        values = self._rows_view(flat)
        numbers, received, work = self._swap(
            chosen, [values[part].reshape(-1) for part in chosen], label
        )
        begin = group.rank * shard_numel
        return _Sum(self, work, numbers, received, out, begin, accumulate)

    def gather(self, flat: Tensor, label: str) -> Work:
        """See :meth:`ds_comm.collectives.base.Collectives.gather`; exchanges counts first."""
        group = self._inner.group
        shard_numel = flat.numel() // group.size
        begin, end = group.rank * shard_numel, (group.rank + 1) * shard_numel
        # What the others own is overwritten in either case.
        flat[:begin].zero_()
        flat[end:].zero_()
        rows = self._filled(flat)
        counts = [0 if rank == group.rank else rows.numel() for rank in range(group.size)]
        if not self._pays(flat, counts):
            return self._inner.gather(flat, label)
        nothing = rows[:0]
        values = self._rows_view(flat)[rows].reshape(-1)
        numbers, received, work = self._swap(
            [nothing if rank == group.rank else rows for rank in range(group.size)],
            [values[:0] if rank == group.rank else values for rank in range(group.size)],
            label,
        )
        return _Fill(self, work, numbers, received, flat)

    # ---- parts -------------------------------------------------------------------------------

    def _rows_view(self, flat: Tensor) -> Tensor:
        return flat[: self._num_rows * self._row_numel].view(self._num_rows, self._row_numel)

    def _filled(self, flat: Tensor) -> Tensor:
        """Numbers of the rows that are not zero (NaN is not)."""
        return self._rows_view(flat).any(dim=1).nonzero().flatten()

    def _rows_of(self, begin: int, numel: int) -> tuple[int, int]:
        """First and one past the last row that has an element in a range."""
        last = -(-(begin + numel) // self._row_numel)
        return begin // self._row_numel, min(last, self._num_rows)

    def _pays(self, flat: Tensor, counts: Sequence[int]) -> bool:
        """Whether rows are fewer bytes over all ranks; collective, the same answer everywhere."""
        group = self._inner.group
        row = torch.tensor(counts, dtype=torch.int64, device=flat.device)
        table = self._counts = self._inner.exchange(row).tolist()
        others = sum(
            count for i, line in enumerate(table) for j, count in enumerate(line) if i != j
        )
        sparse_bytes = others * (_INDEX_BYTES + self._row_numel * flat.element_size())
        dense_bytes = flat.numel() * flat.element_size() * (group.size - 1)
        return bool(sparse_bytes < dense_bytes)

    def _swap(
        self, rows: Sequence[Tensor], values: Sequence[Tensor], label: str
    ) -> tuple[list[Tensor], list[Tensor], list[Work]]:
        """Send rows to every rank; the counts were exchanged by :meth:`_pays` just before."""
        me = self._inner.group.rank
        sizes = [line[me] for line in self._counts]
        numbers = [part.to(torch.int32) for part in rows]
        got = [numbers[0].new_empty(size) for size in sizes]
        filled = [values[0].new_empty(size * self._row_numel) for size in sizes]
        works = [
            self._inner.all_to_all(numbers, got, f"rows of {label}"),
            self._inner.all_to_all(values, filled, f"values of {label}"),
        ]
        return got, filled, works


class _Sum:
    """Waits for everybody's rows and adds them up in rank order."""

    def __init__(
        self,
        rows: RowCollectives,
        works: list[Work],
        numbers: list[Tensor],
        values: list[Tensor],
        out: Tensor,
        begin: int,
        accumulate: bool,
    ) -> None:
        self._rows = rows
        self._works = works
        self._numbers = numbers
        self._values = values
        self._out = out
        self._begin = begin
        self._accumulate = accumulate

    def wait(self) -> None:
        if not self._works:
            return
        for work in self._works:
            work.wait()
        self._works = []
        width = self._rows._row_numel
        touched, places = torch.unique(torch.cat(self._numbers).long(), return_inverse=True)
        wide = torch.promote_types(self._values[0].dtype, torch.float32)
        total = torch.zeros(touched.numel(), width, dtype=wide, device=self._out.device)
        parts = places.split([numbers.numel() for numbers in self._numbers])
        for part, values in zip(parts, self._values, strict=True):
            total.index_add_(0, part, values.view(-1, width).to(wide))
        if not self._accumulate:
            self._out.zero_()
        self._add(touched, total)
        self._numbers, self._values = [], []

    def _add(self, touched: Tensor, total: Tensor) -> None:
        """Add rows to the shard; of the first and last row it may hold a part only."""
        width, numel = self._rows._row_numel, self._out.numel()
        first_whole = -(-self._begin // width)
        last_whole = max(first_whole, (self._begin + numel) // width)
        inside = (touched >= first_whole) & (touched < last_whole)
        if last_whole > first_whole:
            skip = first_whole * width - self._begin
            whole = self._out[skip : skip + (last_whole - first_whole) * width].view(-1, width)
            whole.index_add_(0, touched[inside] - first_whole, total[inside].to(whole.dtype))
        for row, values in zip(touched[~inside].tolist(), total[~inside], strict=True):
            start = row * width - self._begin
            low, high = max(start, 0), min(start + width, numel)
            self._out[low:high] += values[low - start : high - start]


class _Fill:
    """Waits for everybody's rows and puts them in place."""

    def __init__(
        self,
        rows: RowCollectives,
        works: list[Work],
        numbers: list[Tensor],
        values: list[Tensor],
        flat: Tensor,
    ) -> None:
        self._rows = rows
        self._works = works
        self._numbers = numbers
        self._values = values
        self._flat = flat

    def wait(self) -> None:
        if not self._works:
            return
        for work in self._works:
            work.wait()
        self._works = []
        target = self._rows._rows_view(self._flat)
        for numbers, values in zip(self._numbers, self._values, strict=True):
            # A row that two shards share comes from both, with zeros for the other's part.
            target.index_add_(0, numbers.long(), values.view(-1, target.shape[1]))
        self._numbers, self._values = [], []
