"""Top-level keys that the engine does not read: gone for good, and other packages'."""

from __future__ import annotations

from ds_comm.config import Elsewhere, Removed

__all__ = ["ELSEWHERE", "REMOVED"]

REMOVED = (
    Removed("amp", 'use "bf16": {"enabled": true}'),
    Removed("nebula", "save_checkpoint writes atomically and every rank writes in parallel"),
    Removed("datastates_ckpt", "save_checkpoint writes atomically and every rank in parallel"),
    Removed("sparse_attention", "call torch.nn.attention.flex_attention in the model"),
    Removed("eigenvalue", "it only served quantize_training, which is gone too; delete it"),
    Removed("quantize_training", 'write "compression_training" with "weight_quantization"'),
)
"""Keys that are refused even when ``null``, empty or disabled."""

_READER = "load the configuration with ds_all (ds_all.initialize or ds_all.DSConfig), or delete it"

_OWNERS = {
    "ds-comm": (
        "flops_profiler",
        "comms_logger",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comet",
        "timers",
        "tensor_parallel",
    ),
    "ds-pipe": ("pipeline",),
    "ds-moe": ("expert_parallel",),
    "ds-inference": ("hybrid_engine", "weight_quantization"),
    "ds-compress": (
        "data_efficiency",
        "curriculum_learning",
        "progressive_layer_drop",
        "compression_training",
    ),
    "ds-launch": ("elasticity", "autotuning"),
    "ds-aio": ("aio",),
}

ELSEWHERE = tuple(Elsewhere(key, owner, _READER) for owner, keys in _OWNERS.items() for key in keys)
"""Keys of other packages."""
