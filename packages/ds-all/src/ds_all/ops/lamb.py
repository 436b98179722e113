"""LAMB under the familiar names."""

from __future__ import annotations

from ds_zero.optim import FusedLamb

__all__ = ["FusedLamb"]
