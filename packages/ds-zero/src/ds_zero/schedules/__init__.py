"""Learning-rate schedules: DeepSpeed's five by their own names, and torch's by name.

Pure factors are in ``factors``; the classes write them into an optimizer's parameter groups.
"""

from __future__ import annotations

from ds_zero.schedules.arguments import add_tuning_arguments
from ds_zero.schedules.base import HasParamGroups, LRSchedule, ScheduleState
from ds_zero.schedules.build import (
    SCHEDULES,
    ScheduleSection,
    build_schedule,
    torch_schedules,
)
from ds_zero.schedules.one_cycle import OneCycle
from ds_zero.schedules.range_test import LRRangeTest
from ds_zero.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "HasParamGroups",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "ScheduleSection",
    "ScheduleState",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build_schedule",
    "torch_schedules",
]
