"""ZeRO training engine: stages 0 to 3 as one mechanism, from a ``ds_config``."""

from __future__ import annotations

from ds_zero._version import __version__
from ds_zero.config import EngineConfig
from ds_zero.core import CoreOptions, StepReport, ZeroCore
from ds_zero.data import DistributedLoader, RepeatingLoader
from ds_zero.engine import Engine
from ds_zero.gathered import GatheredParameters
from ds_zero.initialize import Initialized, initialize
from ds_zero.schedules import add_tuning_arguments

__all__ = [
    "CoreOptions",
    "DistributedLoader",
    "Engine",
    "EngineConfig",
    "GatheredParameters",
    "Initialized",
    "RepeatingLoader",
    "StepReport",
    "ZeroCore",
    "__version__",
    "add_tuning_arguments",
    "initialize",
]
