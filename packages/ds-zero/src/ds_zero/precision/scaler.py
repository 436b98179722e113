"""The loss scale: what it is now, and how it follows overflows.

[Note: dynamic loss scale]
The scale starts at ``initial``.  An overflow halves it once ``hysteresis - 1`` overflows have been
tolerated; the tolerance is refilled when the scale grows, or, with ``consecutive``, by every clean
step.  The scale doubles after ``window`` clean steps since the last overflow (a tolerated one
counts) or the last growth.  It never falls below ``minimum``: an overflow there, with the
tolerance used up, is an error, because every further step would be skipped too.  (Micikevicius et
al., "Mixed Precision Training", 2018, section 3.2; the hysteresis is DeepSpeed's.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ds_comm.errors import CheckpointError, LossScaleError

__all__ = ["LossScaler", "ScalePolicy", "ScaleState", "next_state"]


@dataclass(frozen=True)
class ScalePolicy:
    """How the loss scale begins and moves; see [Note: dynamic loss scale]."""

    initial: float
    """The first scale, and the only one if it is not dynamic."""
    dynamic: bool = True
    """Whether it moves."""
    window: int = 1000
    """Clean steps after which it doubles."""
    hysteresis: int = 2
    """The how manyth overflow halves it; 1 tolerates none."""
    consecutive: bool = False
    """Whether every clean step refills the tolerance."""
    minimum: float = 1.0
    """The smallest scale."""


@dataclass(frozen=True)
class ScaleState:
    """Where a loss scale stands; stored in checkpoints."""

    scale: float
    """What losses are multiplied by now."""
    clean_steps: int = 0
    """Steps since the last overflow or growth."""
    tolerance: int = 0
    """Overflows that will not halve the scale."""


def next_state(policy: ScalePolicy, state: ScaleState, *, overflow: bool) -> ScaleState:
    """Return the state after a step; pure.

    Args:
        policy: The rules.
        state: The state that the step ran with.
        overflow: Whether its gradient norm was not finite, so that it was skipped.
    """
    if not policy.dynamic:
        return state
    if overflow:
        if state.tolerance > 0:
            return replace(state, clean_steps=0, tolerance=state.tolerance - 1)
        return replace(state, clean_steps=0, scale=max(state.scale / 2, policy.minimum))
    refilled = policy.hysteresis - 1
    clean = state.clean_steps + 1
    if clean >= policy.window:
        return ScaleState(state.scale * 2, 0, refilled)
    tolerance = refilled if policy.consecutive else state.tolerance
    return replace(state, clean_steps=clean, tolerance=tolerance)


class LossScaler:
    """A loss scale that follows its policy; the same on every rank."""

    def __init__(self, policy: ScalePolicy) -> None:
        """Begin with the policy's initial scale."""
        self.policy = policy
        self.state = self._initial()
        self._stuck = False

    def _initial(self) -> ScaleState:
        return ScaleState(self.policy.initial, 0, self.policy.hysteresis - 1)

    @property
    def scale(self) -> float:
        """What losses are multiplied by now."""
        return self.state.scale

    def update(self, *, overflow: bool) -> None:
        """Take note of a finished step.

        Args:
            overflow: Whether it was skipped because its gradient norm was not finite.
        """
        policy, state = self.policy, self.state
        self.state = next_state(policy, state, overflow=overflow)
        used_up = overflow and policy.dynamic and not state.tolerance
        self._stuck = used_up and state.scale <= policy.minimum

    def check(self) -> None:
        """Raise if the last step overflowed although the scale could not be made smaller.

        Raises:
            LossScaleError: The scale is at its minimum and the tolerance is used up.
        """
        if self._stuck:
            raise LossScaleError(
                f"gradients overflow at a loss scale of {self.scale:g}, the smallest one "
                "(fp16.min_loss_scale): no step can succeed any more. Look for non-finite values "
                "in the model or its data, lower the learning rate, set a smaller minimum, or "
                "train in bf16."
            )

    def reset(self) -> None:
        """Begin anew with the initial scale."""
        self.state, self._stuck = self._initial(), False

    def state_dict(self) -> dict[str, float | int]:
        """The state as plain numbers."""
        return asdict(self.state)

    def load_state_dict(self, stored: Mapping[str, object]) -> None:
        """Continue from a stored state, within the bounds of this policy.

        A fixed scale stays what the configuration says.

        Raises:
            CheckpointError: A value is missing or no sensible number.
        """
        if not self.policy.dynamic:
            return
        values = [stored.get(key) for key in ("scale", "clean_steps", "tolerance")]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) != len(values) or not all(math.isfinite(v) and v >= 0 for v in numbers):
            raise CheckpointError(f"the stored state of the loss scale is malformed: {stored}")
        scale, clean, tolerance = numbers
        self.state = ScaleState(
            scale=max(float(scale), self.policy.minimum),
            clean_steps=min(int(clean), self.policy.window - 1),
            tolerance=min(int(tolerance), self.policy.hysteresis - 1),
        )
