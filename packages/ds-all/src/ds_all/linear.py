"""Linear layers with frozen base weights and adapters under ``ds_all.linear``."""

from __future__ import annotations

from ds_zero.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
    init_lora,
)

__all__ = [
    "Init",
    "LoRAConfig",
    "LoRAOptimizedLinear",
    "OptimizedLinear",
    "QuantizationConfig",
    "QuantizedLinear",
    "QuantizedParameter",
    "init_lora",
]
