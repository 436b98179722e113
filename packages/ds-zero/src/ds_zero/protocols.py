"""What the engine expects of objects that users may bring."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Schedule"]


class Schedule(Protocol):
    """A learning-rate schedule: the toolkit's, torch's, or the user's."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Move to the next value."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position and parameters."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what ``state_dict`` returned."""
        ...
