"""ZeRO's names under ``ds_all.zero``."""

from __future__ import annotations

from ds_zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
