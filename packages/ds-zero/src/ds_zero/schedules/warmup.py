"""WarmupLR, WarmupDecayLR and WarmupCosineLR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_zero.schedules.base import HasParamGroups, LRSchedule
from ds_zero.schedules.checks import Problems, did_you_mean
from ds_zero.schedules.factors import (
    WARMUP_KINDS,
    WarmupKind,
    warmup_cosine_factor,
    warmup_decay_factor,
    warmup_factor,
)

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

Rates = float | Sequence[float]


@dataclass(frozen=True)
class _Ramp:
    """The parameters that WarmupLR and WarmupDecayLR share, checked."""

    min_lrs: list[float]
    max_lrs: list[float] | None
    num_steps: int
    kind: WarmupKind

    def between(self, factor: float, base_lrs: list[float]) -> list[float]:
        """Return the point between minimum and maximum of each group; exact at both ends."""
        peaks = base_lrs if self.max_lrs is None else self.max_lrs
        return [
            low * (1.0 - factor) + high * factor
            for low, high in zip(self.min_lrs, peaks, strict=True)
        ]


def _ramp(
    problems: Problems,
    base_lrs: list[float],
    rates: tuple[Rates, Rates | None],
    num_steps: int,
    kind: str,
) -> _Ramp:
    """Check the shared parameters; a missing maximum means the groups' own rates."""
    ramp = _Ramp(
        min_lrs=problems.per_group("warmup_min_lr", rates[0], len(base_lrs)),
        max_lrs=None
        if rates[1] is None
        else problems.per_group("warmup_max_lr", rates[1], len(base_lrs)),
        num_steps=problems.count("warmup_num_steps", num_steps, low=0),
        kind=_warmup_kind(problems, kind),
    )
    peaks = ramp.between(1.0, base_lrs)
    for index, (low, high) in enumerate(zip(ramp.min_lrs, peaks, strict=True)):
        if low > high:
            problems.add(
                f"warmup_min_lr: {low:g} is above the maximum {high:g} of parameter group "
                f"{index} (warmup_max_lr, or the group's own lr where that is not given)"
            )
    return ramp


class WarmupLR(LRSchedule):
    """Raise the rate from a minimum to a maximum, then keep it.

    Args:
        optimizer: owner of the parameter groups.
        warmup_min_lr: rate at iteration 0, for all groups or one per group.
        warmup_max_lr: rate after the warm-up, for all groups or one per group; None takes each
            group's own rate, so that groups keep their ratio.
        warmup_num_steps: length of the warm-up in iterations; 0 starts at the maximum.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: number of the last iteration done; -1 means none.

    Raises:
        ConfigError: a parameter is out of range; all such parameters are named.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupKind = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        problems = Problems("WarmupLR")
        rates = (warmup_min_lr, warmup_max_lr)
        self._ramp = _ramp(problems, self.base_lrs, rates, warmup_num_steps, warmup_type)
        problems.raise_if_any()
        self._write()

    def lr_at(self, iteration: int) -> list[float]:
        """Return ``min + (max - min) * warmup_factor`` for each group."""
        ramp = self._ramp
        factor = warmup_factor(iteration, num_steps=ramp.num_steps, kind=ramp.kind)
        return ramp.between(factor, self.base_lrs)


class WarmupDecayLR(LRSchedule):
    """Raise the rate as WarmupLR does, then let it fall in a straight line to the minimum.

    Unlike in DeepSpeed, which falls back on 0.001, a missing ``warmup_max_lr`` means each
    group's own rate, as in WarmupLR.

    Args:
        optimizer: owner of the parameter groups.
        total_num_steps: iteration at which the minimum is reached again; at least
            ``warmup_num_steps``.
        warmup_min_lr: see WarmupLR.
        warmup_max_lr: see WarmupLR.
        warmup_num_steps: see WarmupLR.
        warmup_type: see WarmupLR.
        last_batch_iteration: number of the last iteration done; -1 means none.

    Raises:
        ConfigError: a parameter is out of range, or the warm-up is longer than the whole.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupKind = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        problems = Problems("WarmupDecayLR")
        rates = (warmup_min_lr, warmup_max_lr)
        self._ramp = _ramp(problems, self.base_lrs, rates, warmup_num_steps, warmup_type)
        self._total_steps = _total_steps(problems, total_num_steps, self._ramp.num_steps)
        problems.raise_if_any()
        self._write()

    def lr_at(self, iteration: int) -> list[float]:
        """Return ``min + (max - min) * warmup_decay_factor`` for each group."""
        factor = warmup_decay_factor(
            iteration,
            total_steps=self._total_steps,
            num_steps=self._ramp.num_steps,
            kind=self._ramp.kind,
        )
        return self._ramp.between(factor, self.base_lrs)


class WarmupCosineLR(LRSchedule):
    """Raise the rate to each group's own rate, then let it fall along half a cosine.

    Args:
        optimizer: owner of the parameter groups; their rates are the peaks.
        total_num_steps: number of iterations of warm-up and cosine together.
        warmup_min_ratio: share of the peak at iteration 0.
        warmup_num_steps: length of the warm-up in iterations.
        cos_min_ratio: share of the peak at the end.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: number of the last iteration done; -1 means none.

    Raises:
        ConfigError: a parameter is out of range, or the warm-up is longer than the whole.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupKind = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        problems = Problems("WarmupCosineLR")
        self._warmup_min_ratio = problems.number("warmup_min_ratio", warmup_min_ratio, high=1.0)
        self._cos_min_ratio = problems.number("cos_min_ratio", cos_min_ratio, high=1.0)
        self._num_steps = problems.count("warmup_num_steps", warmup_num_steps, low=0)
        self._total_steps = _total_steps(problems, total_num_steps, self._num_steps)
        self._kind = _warmup_kind(problems, warmup_type)
        problems.raise_if_any()
        self._write()

    def lr_at(self, iteration: int) -> list[float]:
        """Return each group's own rate times ``warmup_cosine_factor``."""
        factor = warmup_cosine_factor(
            iteration,
            total_steps=self._total_steps,
            num_steps=self._num_steps,
            kind=self._kind,
            warmup_min_ratio=self._warmup_min_ratio,
            cos_min_ratio=self._cos_min_ratio,
        )
        return [lr * factor for lr in self.base_lrs]


def _warmup_kind(problems: Problems, value: object) -> WarmupKind:
    """Return ``value`` as a warm-up kind; a problem unless it is one."""
    for kind in WARMUP_KINDS:
        if value == kind:
            return kind
    hint = did_you_mean(value, WARMUP_KINDS) if isinstance(value, str) else ""
    problems.add(f"warmup_type: expected 'log' or 'linear', got {value!r}{hint}")
    return "log"


def _total_steps(problems: Problems, value: object, warmup_steps: int) -> int:
    """Return ``value`` as the total; a problem unless it is at least the warm-up and 1."""
    total = problems.count("total_num_steps", value, low=1)
    if total < warmup_steps:
        problems.add(
            f"total_num_steps: {total} is less than warmup_num_steps: {warmup_steps}; "
            "the warm-up must fit into the total"
        )
    return total
