"""What the engine expects of objects that users may bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["HeldTensor", "HoldsTensors", "Schedule"]


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


class HeldTensor(NamedTuple):
    """A frozen tensor that a module keeps by itself, neither parameter nor buffer."""

    shape: tuple[int, ...]
    """Of all ranks' elements together."""
    start: int
    """First element that this rank has."""
    data: Tensor
    """This rank's elements, 1-D."""
    replicated: bool
    """Whether every rank has all of them; otherwise the ranks' parts tile the tensor."""


@runtime_checkable
class HoldsTensors(Protocol):
    """A module with tensors of its own that are stored as frozen parameters are."""

    def held_tensors(self) -> Mapping[str, HeldTensor]:
        """By name within the module; the same names on every rank."""
        ...

    def set_held_tensor(self, name: str, data: Tensor) -> None:
        """Replace this rank's elements."""
        ...

    def full_held_tensor(self, name: str) -> Tensor:
        """All elements, in their shape.  Collective unless it is replicated."""
        ...
