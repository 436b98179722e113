"""Optimisers on this rank's shards."""

from __future__ import annotations

from ds_zero.optim.adam import FlatAdam
from ds_zero.optim.adapter import TorchAdapter
from ds_zero.optim.base import (
    OptimizedRun,
    ShardOptimizer,
    StateRange,
    StateSource,
    StepGradients,
)
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.sgd import FlatSGD
from ds_zero.optim.table import attach_optimizer, optimizer_from_config

__all__ = [
    "FlatAdam",
    "FlatOptimizer",
    "FlatSGD",
    "OptimizedRun",
    "ShardOptimizer",
    "StateRange",
    "StateSource",
    "StepGradients",
    "TorchAdapter",
    "attach_optimizer",
    "optimizer_from_config",
]
