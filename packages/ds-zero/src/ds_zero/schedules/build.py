"""From a ``scheduler`` section of the config to a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from ds_comm.errors import ConfigError
from ds_zero.schedules.base import LRSchedule
from ds_zero.schedules.checks import did_you_mean
from ds_zero.schedules.one_cycle import OneCycle
from ds_zero.schedules.range_test import LRRangeTest
from ds_zero.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["SCHEDULES", "ScheduleSection", "build_schedule", "torch_schedules"]

SCHEDULES: Mapping[str, type[LRSchedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}


class ScheduleSection(Protocol):
    """What is read of the config's ``scheduler`` section."""

    @property
    def type(self) -> str:
        """Name of the schedule."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Its keyword arguments."""
        ...


def torch_schedules() -> dict[str, type[lr_scheduler.LRScheduler]]:
    """Return the public schedules of ``torch.optim.lr_scheduler`` by name."""
    return {
        name: cls
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type)
        and issubclass(cls, lr_scheduler.LRScheduler)
        and cls is not lr_scheduler.LRScheduler
        and not name.startswith("_")
        and cls.__name__ == name
    }


def build_schedule(
    section: ScheduleSection, optimizer: torch.optim.Optimizer
) -> LRSchedule | lr_scheduler.LRScheduler:
    """Build the schedule that a ``scheduler`` section names; no communication.

    Args:
        section: ``type`` is one of the five schedules here or a name in
            ``torch.optim.lr_scheduler``; ``params`` are its keyword arguments.
        optimizer: owner of the parameter groups that the schedule writes.

    Returns:
        The schedule; the first rate is already written.

    Raises:
        ConfigError: the name is unknown, or parameters are unknown, missing or out of range; the
            message names them all and the nearest known name.
    """
    ours = SCHEDULES.get(section.type)
    if ours is not None:
        _check_names(section, ours)
        return ours(optimizer, **section.params)
    theirs = torch_schedules()
    cls = theirs.get(section.type)
    if cls is None:
        known = [*SCHEDULES, *theirs]
        raise ConfigError(
            f"scheduler.type: {section.type!r} is unknown{did_you_mean(section.type, known)} "
            f"Known: {', '.join(known)}"
        )
    _check_names(section, cls)
    try:
        return cls(optimizer, **section.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler.params: torch's {section.type} refused {dict(section.params)!r}: {error}"
        ) from error


def _check_names(section: ScheduleSection, cls: type[object]) -> None:
    """Raise unless ``params`` can be bound to the constructor; name all misfits."""
    parameters = dict(inspect.signature(cls).parameters)
    parameters.pop("optimizer", None)
    lines = [
        f"scheduler.params.{name}: unknown parameter of {section.type}"
        f"{did_you_mean(name, parameters)}"
        for name in section.params
        if name not in parameters
    ]
    lines += [
        f"scheduler.params.{name}: required by {section.type} and missing"
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in section.params
    ]
    if lines:
        raise ConfigError("\n".join([*lines, f"Allowed: {', '.join(parameters)}"]))
