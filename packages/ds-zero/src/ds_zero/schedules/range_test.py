"""LRRangeTest."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zero.schedules.base import HasParamGroups, LRSchedule
from ds_zero.schedules.checks import Problems
from ds_zero.schedules.factors import range_test_factor

__all__ = ["LRRangeTest"]


class LRRangeTest(LRSchedule):
    """Raise the rate without end, to find where training starts to diverge.

    Args:
        optimizer: owner of the parameter groups.
        lr_range_test_min_lr: first rate, for all groups or one per group.
        lr_range_test_step_size: iterations over which the rate grows by the step rate.
        lr_range_test_step_rate: growth per step size, in multiples of the first rate.
        lr_range_test_staircase: grow in stairs instead of a ramp.
        last_batch_iteration: number of the last iteration done; -1 means none.

    Raises:
        ConfigError: a parameter is out of range; all such parameters are named.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        problems = Problems("LRRangeTest")
        self._min_lrs = problems.per_group(
            "lr_range_test_min_lr", lr_range_test_min_lr, len(self.base_lrs)
        )
        self._step_size = problems.count("lr_range_test_step_size", lr_range_test_step_size, low=1)
        self._step_rate = problems.number("lr_range_test_step_rate", lr_range_test_step_rate)
        self._staircase = problems.flag("lr_range_test_staircase", lr_range_test_staircase)
        problems.raise_if_any()
        self._write()

    def lr_at(self, iteration: int) -> list[float]:
        """Return the minimum rate times ``range_test_factor`` for each group."""
        factor = range_test_factor(
            iteration,
            step_size=self._step_size,
            step_rate=self._step_rate,
            staircase=self._staircase,
        )
        return [lr * factor for lr in self._min_lrs]
