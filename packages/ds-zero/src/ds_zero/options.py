"""The choices with which a model is put under ZeRO."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zero.gradients import Averaging
from ds_zero.precision import AutocastChoice, ScalePolicy
from ds_zero.units import UnitRules

__all__ = ["CoreOptions"]


@dataclass(frozen=True)
class CoreOptions:
    """Choices of the mechanism."""

    stage: int = 0
    """ZeRO stage, 0 to 3."""
    compute_dtype: torch.dtype | None = None
    """Dtype of floating-point parameters in the forward pass; None keeps each one's own."""
    accumulation: int = 1
    """Micro-steps per optimiser step."""
    clip_norm: float = 0.0
    """Largest norm of the averaged gradients; 0 does not clip."""
    accumulation_dtype: torch.dtype | None = None
    """Dtype of sums over micro-steps; fp32 by default."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients travel; that of the sums, or the compute dtype without any."""
    ignore_unused: bool = True
    """Leave parameters without a gradient alone; otherwise they are an error."""
    sparse_gradients: bool = False
    """Reduce the gradients of embeddings by rows where that is fewer bytes."""
    prefetch: bool = True
    """Begin to gather the next unit while one computes."""
    averaging: Averaging = Averaging()
    """How the gradients of ranks are combined."""
    scaling: ScalePolicy | None = None
    """How the loss is scaled; None does not scale it."""
    narrow_masters: bool = False
    """Let the optimiser update parameters in the compute dtype instead of fp32 masters."""
    autocast: AutocastChoice | None = None
    """Run the model under torch's autocast."""
    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers; None keeps each one's own."""
    granularity: int = 1
    """Elements of the blocks that an optimiser works on; no parameter or shard cuts one."""
    rules: UnitRules = UnitRules()
    """What decides the units."""
