"""Named random states beside the device's own, as tensor parallelism needs them.

Dropout on a replicated activation must draw the same numbers on all tensor ranks, dropout inside
of a sharded layer other ones.  The tracker keeps a state per purpose and swaps it in for the time
of a ``fork`` (the scheme of Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ds_comm import device
from ds_comm.errors import EngineError

__all__ = ["MODEL_PARALLEL_RNG", "RngTracker"]

MODEL_PARALLEL_RNG = "model-parallel-rng"
"""Name of the state that differs between tensor ranks."""


class RngTracker:
    """Named states of the default random generator of the current device.  Local."""

    def __init__(self) -> None:
        """Start without any state."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of the states by name, as bytes."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace the states by those of :meth:`get_states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts at ``seed``; the device's own state is left as it is.

        Args:
            name: A new name.
            seed: A seed that no other state of this tracker started with.

        Raises:
            EngineError: The name or the seed is taken.
        """
        if name in self._states:
            raise EngineError(f"random state {name!r} exists already; call reset() first")
        if seed in self._seeds:
            raise EngineError(
                f"seed {seed} is that of another state, which would draw the same numbers; the "
                f"states are {sorted(self._states)}"
            )
        before = device.rng_state()
        device.manual_seed(seed)
        self._states[name] = device.rng_state()
        self._seeds.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw random numbers from the state ``name``, which goes on where it was left.

        Raises:
            EngineError: There is no such state.
        """
        if name not in self._states:
            raise EngineError(
                f"there is no random state {name!r}; there are {sorted(self._states)}. Call "
                "model_parallel_cuda_manual_seed(seed), or add() it"
            )
        before = device.rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.rng_state()
            device.set_rng_state(before)
