"""Adagrad under the familiar names."""

from __future__ import annotations

from ds_zero.optim import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
