"""Lion under the familiar names."""

from __future__ import annotations

from ds_zero.optim import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
