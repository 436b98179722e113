"""The engine's part of the ``ds_config`` document."""

from __future__ import annotations

from ds_zero.config.batch import BatchSizes, resolve_batch_sizes
from ds_zero.config.compile import CompileSection
from ds_zero.config.engine import EngineConfig
from ds_zero.config.offload import OffloadOptimizerSection, OffloadParamSection
from ds_zero.config.optim import OptimizerSection, SchedulerSection
from ds_zero.config.precision import (
    Bf16Section,
    DataTypesSection,
    Fp16Section,
    TorchAutocastSection,
)
from ds_zero.config.storage import (
    ActivationCheckpointingSection,
    CheckpointSection,
    ParallelWriteSection,
)
from ds_zero.config.zero import LeafModuleSection, ZeroSection

__all__ = [
    "ActivationCheckpointingSection",
    "BatchSizes",
    "Bf16Section",
    "CheckpointSection",
    "CompileSection",
    "DataTypesSection",
    "EngineConfig",
    "Fp16Section",
    "LeafModuleSection",
    "OffloadOptimizerSection",
    "OffloadParamSection",
    "OptimizerSection",
    "ParallelWriteSection",
    "SchedulerSection",
    "TorchAutocastSection",
    "ZeroSection",
    "resolve_batch_sizes",
]
