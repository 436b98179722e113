"""Which micro-step ends an accumulation window.

[Note: accumulation windows]
A window is what one optimiser step averages over.  Micro-steps are counted from the end of the
last window, whoever ended it: after a window that was ended early by hand, the next one has its
full length.  Gradients are always divided by the configured length, as if missing micro-steps had
had a gradient of zero.
"""

from __future__ import annotations

from ds_comm.errors import EngineError

__all__ = ["AccumulationWindow"]


class AccumulationWindow:
    """The position in the present window.  See [Note: accumulation windows]."""

    def __init__(self, length: int, *, managed: bool = True) -> None:
        """Begin a window.

        Args:
            length: Micro-steps per optimiser step.
            managed: Whether they are counted; otherwise every ``step()`` ends a window.
        """
        self.length = length
        self.managed = managed
        self.micro_steps = 0
        """Micro-steps of this window that have ended."""
        self.forced: bool | None = None
        """What the user decided about the next ``step()``."""
        self.paused = ""
        """Name of the context in which gradients stay local; empty outside of one."""

    def is_boundary(self) -> bool:
        """Whether the next ``step()`` ends the window."""
        if not self.managed:
            return True
        if self.forced is not None:
            return self.forced
        return self.micro_steps + 1 >= self.length

    def force(self, is_boundary: bool | None) -> None:
        """Decide about the next ``step()`` until this is called again; None counts again.

        Raises:
            EngineError: Micro-steps are not counted.
        """
        if not self.managed:
            raise EngineError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation=false: "
                "every step() updates already; call step() when you want an update"
            )
        self.forced = is_boundary

    def end_micro_step(self) -> bool:
        """Count a micro-step; return whether it ended the window.

        Raises:
            EngineError: Gradients are being kept local.
        """
        if self.paused:
            raise EngineError(f"step() inside {self.paused}: leave the context first")
        ended = self.is_boundary()
        self.micro_steps = 0 if ended else self.micro_steps + 1
        return ended

    def restart(self, length: int | None = None) -> int:
        """Begin a new window.

        Args:
            length: Its length and that of those that follow; the present one by default.

        Returns:
            How many micro-steps the window had that was cut off.
        """
        cut, self.micro_steps = self.micro_steps, 0
        self.length = length or self.length
        return cut

    def pause(self, context: str) -> None:
        """Keep gradients local.

        Raises:
            EngineError: They are already.
        """
        if self.paused:
            inside = "is already active" if context == self.paused else f"inside {self.paused}"
            raise EngineError(f"{context} {inside}; contexts that keep gradients do not nest")
        self.paused = context

    def resume(self) -> None:
        """Let backward reduce again."""
        self.paused = ""

    def sums_up(self) -> bool:
        """Whether local gradients may be sums of several backwards."""
        several = self.length > 1 or not self.managed
        return several or bool(self.paused) or self.forced is False
