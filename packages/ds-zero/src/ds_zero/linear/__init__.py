"""Linear layers with frozen, quantised, sharded base weights and low-rank adapters."""

from __future__ import annotations

from ds_zero.linear.config import LoRAConfig, QuantizationConfig
from ds_zero.linear.init import Init, init_lora
from ds_zero.linear.lora import LoRAOptimizedLinear, OptimizedLinear
from ds_zero.linear.quantized import QuantizedLinear, QuantizedParameter

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
