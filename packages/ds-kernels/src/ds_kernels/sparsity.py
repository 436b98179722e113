"""Layouts of visible blocks for :func:`ds_kernels.ops.block_sparse_attention`.

A layout is a bool tensor ``[heads, blocks, blocks]``: may a block of queries see a block of keys?
Pure functions of a frozen description; names and meaning of the fields are those that users of
sparse attention know (Child et al. 2019 for fixed, Beltagy et al. 2020 for Longformer, Zaheer et
al. 2020 for BigBird).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "BigBirdSparsity",
    "DenseSparsity",
    "FixedSparsity",
    "LocalSparsity",
    "LongformerSparsity",
    "Sparsity",
    "VariableSparsity",
]

Attention = Literal["unidirectional", "bidirectional"]


@dataclass(frozen=True, kw_only=True)
class Sparsity(ABC):
    """What every description has.

    Attributes:
        num_heads: Heads of the layout.
        block: Positions of a block.
        attention: Whether a block sees later ones; unidirectional layouts have none above the
            diagonal, and within a diagonal block the op's ``causal`` hides the rest.
    """

    num_heads: int
    block: int = 16
    attention: Attention = "bidirectional"

    def __post_init__(self) -> None:
        """Refuse values that give no layout."""
        if self.num_heads < 1 or self.block < 1:
            raise ValueError(
                f"num_heads={self.num_heads} and block={self.block} must be at least 1"
            )
        if self.attention not in ("unidirectional", "bidirectional"):
            raise ValueError(
                f"attention={self.attention!r}: allowed are 'unidirectional' and 'bidirectional'"
            )

    def make_layout(self, length: int) -> Tensor:
        """Return the layout of a sequence.

        Args:
            length: Positions; a multiple of ``block``.

        Raises:
            ValueError: It is no multiple, or too short for the description.
        """
        if length % self.block:
            raise ValueError(f"length {length} is no multiple of the block of {self.block}")
        count = length // self.block
        heads = [self._head(head, count) for head in range(self.num_heads)]
        layout = torch.stack(heads)
        return layout.tril() if self.attention == "unidirectional" else layout

    @abstractmethod
    def _head(self, head: int, count: int) -> Tensor:
        """Bool ``[count, count]`` of one head, before anything above the diagonal is hidden."""


@dataclass(frozen=True, kw_only=True)
class DenseSparsity(Sparsity):
    """Everything sees everything."""

    def _head(self, head: int, count: int) -> Tensor:
        return torch.ones(count, count, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class FixedSparsity(Sparsity):
    """Windows that see themselves, and the last blocks of each window seen by all.

    Attributes:
        num_local_blocks: Blocks of a window.
        num_global_blocks: Blocks of each window that all others see.
        horizontal_global_attention: These blocks also see everything.
        num_different_global_patterns: Heads in turn take other blocks of the window as global,
            from its end to its start.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        """Refuse values that give no layout."""
        super().__post_init__()
        if self.num_global_blocks < 1 or self.num_local_blocks % self.num_global_blocks:
            raise ValueError(
                f"num_local_blocks={self.num_local_blocks} must be a multiple of "
                f"num_global_blocks={self.num_global_blocks}"
            )
        most = self.num_local_blocks // self.num_global_blocks
        if not 1 <= self.num_different_global_patterns <= most:
            raise ValueError(
                f"num_different_global_patterns={self.num_different_global_patterns}: allowed are "
                f"1 to {most}, the places that {self.num_global_blocks} global blocks have in a "
                f"window of {self.num_local_blocks}"
            )
        if self.horizontal_global_attention and self.attention == "unidirectional":
            raise ValueError("horizontal_global_attention needs bidirectional attention")

    def _head(self, head: int, count: int) -> Tensor:
        at = torch.arange(count)
        window = at // self.num_local_blocks
        layout = window[:, None] == window[None]
        pattern = 1 + head % self.num_different_global_patterns
        first = self.num_local_blocks - pattern * self.num_global_blocks
        inside = at % self.num_local_blocks
        chosen = (inside >= first) & (inside < first + self.num_global_blocks)
        layout = layout | chosen[None]
        return layout | chosen[:, None] if self.horizontal_global_attention else layout


@dataclass(frozen=True, kw_only=True)
class VariableSparsity(Sparsity):
    """Windows of given sizes, chosen global blocks, and random ones.

    Attributes:
        num_random_blocks: Random blocks that each block sees.
        local_window_blocks: Sizes of the first windows; the last one repeats.
        global_block_indices: Blocks seen by all; with ends they are starts of ranges.
        global_block_end_indices: One past the last block of each range, or None.
        horizontal_global_attention: Global blocks also see everything.
        seed: Of the random blocks; every head draws its own.
    """

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that give no layout."""
        super().__post_init__()
        _check_globals(self.global_block_indices, self.global_block_end_indices)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(f"local_window_blocks={self.local_window_blocks}: sizes of at least 1")
        if self.horizontal_global_attention and self.attention == "unidirectional":
            raise ValueError("horizontal_global_attention needs bidirectional attention")

    def _head(self, head: int, count: int) -> Tensor:
        sizes = list(self.local_window_blocks)
        while sum(sizes) < count:
            sizes.append(sizes[-1])
        window = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[:count]
        layout = window[:, None] == window[None]
        layout = layout | _random(self.num_random_blocks, self.seed, head, count, self.attention)
        chosen = _globals(self.global_block_indices, self.global_block_end_indices, count)
        layout = layout | chosen[None]
        return layout | chosen[:, None] if self.horizontal_global_attention else layout


@dataclass(frozen=True, kw_only=True)
class BigBirdSparsity(Sparsity):
    """A sliding window, random blocks, and first blocks that see and are seen by all.

    Attributes:
        num_random_blocks: Random blocks that each block sees.
        num_sliding_window_blocks: Width of the window around the diagonal.
        num_global_blocks: Global blocks at the start.
        seed: Of the random blocks; every head draws its own.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    def _head(self, head: int, count: int) -> Tensor:
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            value: int = getattr(self, name)
            if value > count:
                raise ValueError(f"{name}={value}, but the sequence has only {count} blocks")
        layout = _sliding(self.num_sliding_window_blocks, count)
        layout = layout | _random(self.num_random_blocks, self.seed, head, count, self.attention)
        chosen = torch.arange(count) < self.num_global_blocks
        return layout | chosen[None] | chosen[:, None]


@dataclass(frozen=True, kw_only=True)
class LongformerSparsity(Sparsity):
    """A sliding window, and chosen blocks that see and are seen by all.

    Attributes:
        num_sliding_window_blocks: Width of the window around the diagonal.
        global_block_indices: Global blocks; with ends they are starts of ranges.
        global_block_end_indices: One past the last block of each range, or None.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse values that give no layout."""
        super().__post_init__()
        _check_globals(self.global_block_indices, self.global_block_end_indices)

    def _head(self, head: int, count: int) -> Tensor:
        chosen = _globals(self.global_block_indices, self.global_block_end_indices, count)
        layout = _sliding(self.num_sliding_window_blocks, count)
        return layout | chosen[None] | chosen[:, None]


@dataclass(frozen=True, kw_only=True)
class LocalSparsity(Sparsity):
    """A sliding window only.

    Attributes:
        num_sliding_window_blocks: Width of the window around the diagonal.
    """

    num_sliding_window_blocks: int = 3
    attention: Attention = "unidirectional"

    def _head(self, head: int, count: int) -> Tensor:
        return _sliding(self.num_sliding_window_blocks, count)


def _sliding(width: int, count: int) -> Tensor:
    """Blocks at most ``width // 2`` away."""
    at = torch.arange(count)
    return (at[:, None] - at[None]).abs() <= width // 2


def _random(number: int, seed: int, head: int, count: int, attention: Attention) -> Tensor:
    """``number`` different blocks of each row; of those before and at it if unidirectional."""
    generator = torch.Generator().manual_seed(1000 * seed + head)
    layout = torch.zeros(count, count, dtype=torch.bool)
    for row in range(count):
        allowed = row + 1 if attention == "unidirectional" else count
        layout[row, torch.randperm(allowed, generator=generator)[:number]] = True
    return layout


def _check_globals(starts: tuple[int, ...], ends: tuple[int, ...] | None) -> None:
    if ends is None:
        return
    if len(starts) != len(ends) or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise ValueError(
            f"global_block_indices={starts} and global_block_end_indices={ends} must be starts and "
            "ends of non-empty ranges"
        )


def _globals(starts: tuple[int, ...], ends: tuple[int, ...] | None, count: int) -> Tensor:
    """Which blocks are global; indices beyond the sequence name none."""
    chosen = torch.zeros(count, dtype=torch.bool)
    for start, end in zip(starts, ends or [start + 1 for start in starts], strict=True):
        chosen[start:end] = True
    return chosen
