"""Adam under the familiar names."""

from __future__ import annotations

from ds_zero.optim import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
