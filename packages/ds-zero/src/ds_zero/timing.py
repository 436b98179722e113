"""Wall-clock times of forward, backward and step (``wall_clock_breakdown``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds_comm.device import synchronize
from ds_comm.logging import get_logger

__all__ = ["WallClock"]

logger = get_logger(__name__)

NAMES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


class WallClock:
    """Times in milliseconds; synchronises the device at both ends of what it measures."""

    def __init__(self, *, enabled: bool) -> None:
        """Measure, or do nothing at all."""
        self._enabled = enabled
        self._micro: dict[str, float] = {}
        self._window: dict[str, float] = {}
        self._last: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        if not self._enabled:
            yield
            return
        synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self._micro[name] = self._micro.get(name, 0.0) + 1e3 * (time.perf_counter() - begin)

    def end_micro_step(self, *, ends_window: bool) -> None:
        """Close the times of a micro-step; log those of a window that ends."""
        if not self._enabled:
            return
        micro, self._micro = self._micro, {}
        whole, waiting = micro.get("backward"), micro.get("backward_allreduce", 0.0)
        if whole is not None:
            micro["backward_inner"] = max(whole - waiting, 0.0)
        for name, value in micro.items():
            self._window[name] = self._window.get(name, 0.0) + value
        self._last.update({f"{name}_microstep": value for name, value in micro.items()})
        if ends_window:
            self._last.update(self._window)
            found = [f"{name}: {self._window[name]:.2f}" for name in NAMES if name in self._window]
            logger.info("time (ms) | %s", " | ".join(found))
            self._window = {}

    def times(self) -> dict[str, float]:
        """Milliseconds of the last window by name, and of its last micro-step (``…_microstep``)."""
        return dict(self._last)
