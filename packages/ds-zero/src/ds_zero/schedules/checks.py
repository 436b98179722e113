"""Checks of schedule parameters that gather all problems into one error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from ds_comm.errors import ConfigError

__all__ = ["Problems", "did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty string.

    Args:
        name: what was given.
        known: what is allowed.
    """
    by_folded = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), list(by_folded), n=1, cutoff=0.6)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


class Problems:
    """Collects what is wrong with the parameters of one schedule.

    Every check returns a usable value also when it fails, so that one pass finds all problems;
    ``raise_if_any`` then raises once.

    Args:
        title: name of the schedule, the first line of the error.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Record one problem, a sentence that names the parameter."""
        self._lines.append(line)

    def number(
        self, name: str, value: object, *, low: float = 0.0, high: float = math.inf
    ) -> float:
        """Return ``value`` as a float; a problem unless it is a finite number in [low, high]."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.add(f"{name}: expected a number, got {value!r}")
            return low
        if not math.isfinite(value) or not low <= value <= high:
            limits = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            self.add(f"{name}: expected a finite number {limits}, got {value!r}")
            return low
        return float(value)

    def count(self, name: str, value: object, *, low: int) -> int:
        """Return ``value`` as an int; a problem unless it is a whole number >= ``low``."""
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not whole:
            self.add(f"{name}: expected a whole number, got {value!r}")
            return low
        if value < low:
            self.add(f"{name}: expected at least {low}, got {value!r}")
            return low
        return int(value)

    def flag(self, name: str, value: object) -> bool:
        """Return ``value``; a problem unless it is true or false."""
        if not isinstance(value, bool):
            self.add(f"{name}: expected true or false, got {value!r}")
            return False
        return value

    def per_group(
        self, name: str, value: object, num_groups: int, *, low: float = 0.0, high: float = math.inf
    ) -> list[float]:
        """Return one float per parameter group from a number or a list of ``num_groups``."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [self.number(name, value, low=low, high=high)] * num_groups
        if len(value) != num_groups:
            self.add(
                f"{name}: a list needs one value per parameter group ({num_groups}), "
                f"got {len(value)}"
            )
            return [low] * num_groups
        return [
            self.number(f"{name}[{index}]", item, low=low, high=high)
            for index, item in enumerate(value)
        ]

    def raise_if_any(self) -> None:
        """Raise a ConfigError that lists every recorded problem.

        Raises:
            ConfigError: at least one problem was recorded.
        """
        if self._lines:
            raise ConfigError(f"{self._title}: " + "\n  ".join(["bad parameters", *self._lines]))
