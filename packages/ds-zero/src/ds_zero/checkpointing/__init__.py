"""Activation checkpointing: recompute in backward instead of keeping, at every ZeRO stage.

The functions have the names and signatures of ``deepspeed.checkpointing``; ``torch``'s own
``torch.utils.checkpoint`` works at every stage too.
"""

from __future__ import annotations

from ds_zero.checkpointing.api import (
    checkpoint,
    configure,
    configure_engine,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from ds_zero.checkpointing.rng import RngTracker
from ds_zero.checkpointing.run import ActivationCheckpointing

__all__ = [
    "ActivationCheckpointing",
    "RngTracker",
    "checkpoint",
    "configure",
    "configure_engine",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
