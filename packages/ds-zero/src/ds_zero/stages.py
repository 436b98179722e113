"""The ZeRO stages: rows of a table, not classes."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Extent", "Stage", "STAGES"]


class Extent(Enum):
    """How much of a state a rank keeps."""

    FULL = "full"
    """Every rank keeps all of it."""
    SHARD = "shard"
    """A rank keeps its shard."""


class Stage(NamedTuple):
    """What a rank keeps of each kind of state (ZeRO, arXiv:1910.02054, section 5)."""

    number: int
    params: Extent
    """Parameters between two uses."""
    gradients: Extent
    """Gradients between two micro-steps."""
    optimizer: Extent
    """Optimiser state, and the fp32 master it updates."""


STAGES: tuple[Stage, ...] = (
    Stage(0, Extent.FULL, Extent.FULL, Extent.FULL),
    Stage(1, Extent.FULL, Extent.FULL, Extent.SHARD),
    Stage(2, Extent.FULL, Extent.SHARD, Extent.SHARD),
    Stage(3, Extent.SHARD, Extent.SHARD, Extent.SHARD),
)
