"""OneCycle: rate and momentum over one triangle and a decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_comm.logging import get_logger
from ds_zero.schedules.base import HasParamGroups, LRSchedule
from ds_zero.schedules.checks import Problems
from ds_zero.schedules.factors import inverse_time_decay, one_cycle_scale

__all__ = ["OneCycle"]

logger = get_logger(__name__)

Rates = float | Sequence[float]


@dataclass(frozen=True)
class _Shape:
    """The triangle and the decay after it, in iterations."""

    first_steps: int
    second_steps: int
    first_stairs: int
    second_stairs: int
    decay_step_size: int

    def scale(self, iteration: int) -> float:
        """Return the height in the triangle, 0 outside."""
        return one_cycle_scale(
            iteration,
            first_steps=self.first_steps,
            second_steps=self.second_steps,
            first_stairs=self.first_stairs,
            second_stairs=self.second_stairs,
        )

    def decay(self, iteration: int, rate: float) -> float:
        """Return the decay factor, 1 up to the end of the triangle."""
        count = max(0, iteration + 1 - self.first_steps - self.second_steps)
        return inverse_time_decay(count, step_size=self.decay_step_size, rate=rate)


class OneCycle(LRSchedule):
    """Raise the rate and lower the momentum, turn both back, then let both decay.

    Momentum is the first of ``betas`` where a group has that key, else ``momentum``.  In the
    decay phase rate and momentum are both divided by ``1 + rate * count / decay_step_size``.

    Args:
        optimizer: owner of the parameter groups.
        cycle_min_lr: rate at both ends of the cycle, for all groups or one per group.
        cycle_max_lr: rate in the middle, for all groups or one per group.
        decay_lr_rate: strength of the rate's decay after the cycle.
        cycle_first_step_size: iterations of the first half.
        cycle_second_step_size: iterations of the second half; None: as the first.
        cycle_first_stair_count: stairs of the first half; 0: a ramp.
        cycle_second_stair_count: stairs of the second half; None: as the first.
        decay_step_size: iterations per unit of the decay strengths; 0: no decay.
        cycle_momentum: whether momentum is moved at all.
        cycle_min_mom: momentum in the middle, for all groups or one per group.
        cycle_max_mom: momentum at both ends, for all groups or one per group.
        decay_mom_rate: strength of the momentum's decay after the cycle.
        last_batch_iteration: number of the last iteration done; -1 means none.

    Raises:
        ConfigError: a parameter is out of range, or a decay strength is given without
            ``decay_step_size``; all such parameters are named.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        problems = Problems("OneCycle")
        groups = len(self.base_lrs)
        self._min_lrs = problems.per_group("cycle_min_lr", cycle_min_lr, groups)
        self._max_lrs = problems.per_group("cycle_max_lr", cycle_max_lr, groups)
        self._lr_rate = problems.number("decay_lr_rate", decay_lr_rate)
        self._shape = _shape(
            problems,
            (cycle_first_step_size, cycle_second_step_size),
            (cycle_first_stair_count, cycle_second_stair_count),
            decay_step_size,
        )
        moves_momentum = problems.flag("cycle_momentum", cycle_momentum)
        self._min_moms = problems.per_group("cycle_min_mom", cycle_min_mom, groups, high=_BELOW_1)
        self._max_moms = problems.per_group("cycle_max_mom", cycle_max_mom, groups, high=_BELOW_1)
        self._mom_rate = problems.number("decay_mom_rate", decay_mom_rate)
        _check_order(problems, "cycle_min_lr", self._min_lrs, "cycle_max_lr", self._max_lrs)
        _check_order(problems, "cycle_min_mom", self._min_moms, "cycle_max_mom", self._max_moms)
        for name, rate in (("decay_lr_rate", self._lr_rate), ("decay_mom_rate", self._mom_rate)):
            if rate > 0 and self._shape.decay_step_size == 0:
                problems.add(f"{name}: {rate:g} has no effect while decay_step_size is 0; set it")
        problems.raise_if_any()
        self._moves_momentum = moves_momentum and self._supports_momentum()
        self._write()

    def lr_at(self, iteration: int) -> list[float]:
        """Return the triangle between minimum and maximum, then the decaying minimum."""
        scale = self._shape.scale(iteration)
        decay = self._shape.decay(iteration, self._lr_rate)
        return [
            (low * (1.0 - scale) + high * scale) * decay
            for low, high in zip(self._min_lrs, self._max_lrs, strict=True)
        ]

    def momentum_at(self, iteration: int) -> list[float]:
        """Return the mirrored triangle of momentum, then the decaying maximum, in [0, 1)."""
        scale = self._shape.scale(iteration)
        decay = self._shape.decay(iteration, self._mom_rate)
        return [
            (high * (1.0 - scale) + low * scale) * decay
            for low, high in zip(self._min_moms, self._max_moms, strict=True)
        ]

    def _supports_momentum(self) -> bool:
        """Return whether every group has a momentum; says so once where one has none."""
        for index, group in enumerate(self.optimizer.param_groups):
            if "betas" not in group and "momentum" not in group:
                logger.warning(
                    "OneCycle leaves momentum alone: parameter group %d has neither 'betas' nor "
                    "'momentum'; set cycle_momentum to false to silence this",
                    index,
                )
                return False
        return True

    def _write(self) -> None:
        """Write rates and momenta into the groups."""
        super()._write()
        if self._moves_momentum:
            momenta = self.momentum_at(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                _write_momentum(group, momentum)


_BELOW_1 = 1.0 - 2.0**-53


def _write_momentum(group: dict[str, Any], momentum: float) -> None:
    """Set the first beta, or the momentum, of one group."""
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


def _shape(
    problems: Problems,
    steps: tuple[int, int | None],
    stairs: tuple[int, int | None],
    decay_step_size: int,
) -> _Shape:
    """Check the lengths; a second half that is not given is as the first."""
    first_steps = problems.count("cycle_first_step_size", steps[0], low=1)
    first_stairs = problems.count("cycle_first_stair_count", stairs[0], low=0)
    return _Shape(
        first_steps=first_steps,
        second_steps=first_steps
        if steps[1] is None
        else problems.count("cycle_second_step_size", steps[1], low=1),
        first_stairs=first_stairs,
        second_stairs=first_stairs
        if stairs[1] is None
        else problems.count("cycle_second_stair_count", stairs[1], low=0),
        decay_step_size=problems.count("decay_step_size", decay_step_size, low=0),
    )


def _check_order(
    problems: Problems, low_name: str, lows: list[float], high_name: str, highs: list[float]
) -> None:
    """Record a problem for a minimum above its maximum."""
    for low, high in zip(lows, highs, strict=True):
        if low > high:
            problems.add(f"{low_name}: {low:g} is above {high_name}: {high:g}")
            return
