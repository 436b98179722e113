"""Whether full values are on this rank."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

__all__ = ["Presence", "Present"]


class Presence(Enum):
    """Where the full values of a unit are."""

    RELEASED = "released"
    """Only shards exist; parameters read as NaN."""
    GATHERING = "gathering"
    """A gather is in flight."""
    PRESENT = "present"
    """Parameters are views of the filled flat buffer."""


class Present(Protocol):
    """What can be present or released: a unit, or a parameter that no engine owns yet."""

    @property
    def presence(self) -> Presence:
        """Where the full values are."""
        ...
