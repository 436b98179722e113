"""LR and momentum factors as pure functions of the step number.

[Note: counting of steps]
A schedule counts *iterations*: ``-1`` before the first call of ``step()``, ``0`` after it, and so
on.  The functions here take that number, the same one that DeepSpeed's formulas use, so a config
gives the same rate at the same optimizer step.  Warm-up schedules have no value of their own at
``-1``: the rate before the first ``step()`` is the one of iteration 0.  OneCycle and LRRangeTest
count from ``iteration + 1`` and begin at ``-1``.

No function here knows an optimizer; all are defined for every iteration, however large.
"""

from __future__ import annotations

import math
from typing import Literal

__all__ = [
    "WARMUP_KINDS",
    "WarmupKind",
    "inverse_time_decay",
    "one_cycle_scale",
    "peak_iteration",
    "range_test_factor",
    "warmup_cosine_factor",
    "warmup_decay_factor",
    "warmup_factor",
]

WarmupKind = Literal["log", "linear"]
WARMUP_KINDS: tuple[WarmupKind, ...] = ("log", "linear")


def peak_iteration(num_steps: int, kind: WarmupKind) -> int:
    """Return the first iteration at which a warm-up of ``num_steps`` is complete.

    A logarithmic warm-up ends on its last own step, ``num_steps - 1``, a linear one on the step
    after it.  A warm-up of 0 steps starts complete; one of 1 step spends exactly one iteration
    below the peak for both kinds (``ln(1)`` would be a division by zero).
    """
    if num_steps <= 0:
        return 0
    return max(1, num_steps - 1) if kind == "log" else num_steps


def warmup_factor(iteration: int, *, num_steps: int, kind: WarmupKind) -> float:
    """Return the warm-up's share of the peak, from 0 at iteration 0 to 1, and 1 ever after.

    Args:
        iteration: see [Note: counting of steps]; negative counts as 0.
        num_steps: length of the warm-up, >= 0.
        kind: ``"log"``: ``ln(iteration + 1) / ln(num_steps)``; ``"linear"``:
            ``iteration / num_steps``.
    """
    at = max(0, iteration)
    if at >= peak_iteration(num_steps, kind):
        return 1.0
    if kind == "log":
        return math.log(at + 1) / math.log(max(2, num_steps))
    return at / num_steps


def warmup_decay_factor(
    iteration: int, *, total_steps: int, num_steps: int, kind: WarmupKind
) -> float:
    """Return warm-up, then a straight line from 1 at ``num_steps`` to 0 at ``total_steps``.

    The value stays 0 after ``total_steps``.  With ``total_steps == num_steps`` there is nothing
    to decay over: the peak is held for one iteration, so warm-up never falls straight to 0.

    Args:
        iteration: see [Note: counting of steps].
        total_steps: where the line reaches 0; at least ``num_steps``.
        num_steps: length of the warm-up.
        kind: shape of the warm-up.
    """
    at = max(0, iteration)
    if at <= num_steps:
        return warmup_factor(at, num_steps=num_steps, kind=kind)
    return max(0.0, (total_steps - at) / max(1, total_steps - num_steps))


def warmup_cosine_factor(
    iteration: int,
    *,
    total_steps: int,
    num_steps: int,
    kind: WarmupKind,
    warmup_min_ratio: float,
    cos_min_ratio: float,
) -> float:
    """Return warm-up from ``warmup_min_ratio`` to 1, then half a cosine to ``cos_min_ratio``.

    The value 1 is taken at exactly one iteration, the warm-up's ``peak_iteration``; the floor is
    reached at ``total_steps - 1``, the last of ``total_steps`` iterations, and kept.

    Args:
        iteration: see [Note: counting of steps].
        total_steps: number of iterations of warm-up and cosine together; at least ``num_steps``.
        num_steps: length of the warm-up.
        kind: shape of the warm-up.
        warmup_min_ratio: factor at iteration 0, in [0, 1].
        cos_min_ratio: factor at the end, in [0, 1].
    """
    at = max(0, iteration)
    peak = peak_iteration(num_steps, kind)
    if at <= peak:
        warm = warmup_factor(at, num_steps=num_steps, kind=kind)
        return warmup_min_ratio + (1.0 - warmup_min_ratio) * warm
    progress = min(1.0, (at - peak) / max(1, total_steps - 1 - peak))
    return cos_min_ratio + (1.0 - cos_min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def range_test_factor(
    iteration: int, *, step_size: int, step_rate: float, staircase: bool
) -> float:
    """Return the multiple of the minimum rate in an LR range test (Smith 2017, section 3.3).

    Args:
        iteration: see [Note: counting of steps]; begins at -1 with factor 1.
        step_size: iterations over which the factor grows by ``step_rate``, >= 1.
        step_rate: growth per ``step_size`` iterations.
        staircase: hold the factor within each ``step_size`` iterations instead of a ramp.
    """
    count = max(0, iteration + 1)
    interval = count // step_size if staircase else count / step_size
    return 1.0 + step_rate * interval


def one_cycle_scale(
    iteration: int,
    *,
    first_steps: int,
    second_steps: int,
    first_stairs: int = 0,
    second_stairs: int = 0,
) -> float:
    """Return the height in the triangle of a one-cycle schedule (Smith 2018), in [0, 1].

    0 at iteration -1, 1 after ``first_steps`` iterations, 0 after ``second_steps`` more, and 0
    from there on, where the decay phase takes over.

    Args:
        iteration: see [Note: counting of steps].
        first_steps: length of the ascent, >= 1.
        second_steps: length of the descent, >= 1.
        first_stairs: levels of the ascent; 0 means a ramp.
        second_stairs: levels of the descent; 0 means a ramp.
    """
    count = max(0, iteration + 1)
    if count <= first_steps:
        return _stairs(count, first_steps, first_stairs)
    if count >= first_steps + second_steps:
        return 0.0
    return 1.0 - _stairs(count - first_steps, second_steps, second_stairs)


def _stairs(count: int, steps: int, stairs: int) -> float:
    """Return ``count / steps``, rounded down to a multiple of ``1 / stairs`` where given."""
    if stairs <= 0:
        return count / steps
    return (count * stairs // steps) / stairs


def inverse_time_decay(count: int, *, step_size: int, rate: float) -> float:
    """Return ``1 / (1 + rate * count / step_size)``: 1 at ``count`` 0, falling, never 0.

    Args:
        count: iterations since the decay began, >= 0.
        step_size: iterations per unit of ``rate``; 0 switches the decay off.
        rate: strength, >= 0.
    """
    if step_size <= 0:
        return 1.0
    return 1.0 / (1.0 + rate * count / step_size)
