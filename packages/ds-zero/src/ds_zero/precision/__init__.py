"""Training in dtypes narrower than fp32: loss scaling and autocast."""

from __future__ import annotations

from ds_zero.precision.autocast import Autocast, AutocastChoice, lowered_params
from ds_zero.precision.entry import ScaleEntry
from ds_zero.precision.scaler import LossScaler, ScalePolicy, ScaleState, next_state

__all__ = [
    "Autocast",
    "AutocastChoice",
    "LossScaler",
    "ScaleEntry",
    "ScalePolicy",
    "ScaleState",
    "lowered_params",
    "next_state",
]
