"""Optimisers on this rank's shards; each is an ordinary torch optimiser without an engine."""

from __future__ import annotations

from ds_zero.optim.adagrad import FlatAdagrad
from ds_zero.optim.adam import FlatAdam
from ds_zero.optim.adam8bit import Adam8bit
from ds_zero.optim.adapter import OwnerAdapter, TorchAdapter
from ds_zero.optim.base import (
    OptimizedRun,
    ShardOptimizer,
    StateRange,
    StateSource,
    StepGradients,
)
from ds_zero.optim.flat import FlatOptimizer, granularity_of
from ds_zero.optim.lamb import FlatLamb
from ds_zero.optim.lion import FlatLion
from ds_zero.optim.muon import FlatMuon
from ds_zero.optim.names import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
    MuonWithAuxAdam,
)
from ds_zero.optim.sgd import FlatSGD
from ds_zero.optim.table import attach_optimizer, optimizer_from_config

__all__ = [
    "Adam8bit",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FlatAdagrad",
    "FlatAdam",
    "FlatLamb",
    "FlatLion",
    "FlatMuon",
    "FlatOptimizer",
    "FlatSGD",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "MuonWithAuxAdam",
    "OptimizedRun",
    "OwnerAdapter",
    "ShardOptimizer",
    "StateRange",
    "StateSource",
    "StepGradients",
    "TorchAdapter",
    "attach_optimizer",
    "granularity_of",
    "optimizer_from_config",
]
