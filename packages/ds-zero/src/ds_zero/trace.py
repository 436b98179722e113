"""The sequence of collectives of a step, and its hash.

[Note: divergence]
Ranks that gather or reduce different units would mix weights without noticing.  Each rank hashes
its sequence; the hash travels with the agreement before the optimiser step, and no update is
applied when hashes differ.  Over gloo a header with every exchange finds the same error earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Trace", "first_difference"]

MAX_EVENTS = 100
"""How many of the last events are kept for messages; the hash covers all."""

_MODULUS = (1 << 61) - 1
_KINDS = ("gather", "reduce")


class Trace:
    """Events since the last step, with a running hash."""

    def __init__(self) -> None:
        """Start empty."""
        self.events: deque[tuple[str, int]] = deque(maxlen=MAX_EVENTS)
        self.digest = 0

    def add(self, kind: str, unit: int) -> None:
        """Append one event.

        Args:
            kind: ``gather`` or ``reduce``.
            unit: Index of the unit.
        """
        self.events.append((kind, unit))
        code = 2 * unit + _KINDS.index(kind) + 1
        self.digest = (self.digest * 1_000_003 + code) % _MODULUS

    def reset(self) -> None:
        """Forget all events."""
        self.events.clear()
        self.digest = 0


def first_difference(traces: Sequence[Sequence[tuple[str, int]]], names: Sequence[str]) -> str:
    """Describe where sequences of events part.

    Args:
        traces: One sequence a rank.
        names: Name of each unit.

    Returns:
        One line a rank with its event at the first place where they differ.
    """
    longest = max(len(trace) for trace in traces)
    for place in range(longest):
        here = [trace[place] if place < len(trace) else None for trace in traces]
        if len(set(here)) > 1:
            lines = (
                f"rank {rank}: " + (f"{event[0]} of {names[event[1]]!r}" if event else "nothing")
                for rank, event in enumerate(here)
            )
            return f"at collective #{place}: " + "; ".join(lines)
    return "no difference"
