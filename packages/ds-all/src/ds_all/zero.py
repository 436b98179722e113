"""ZeRO's names under ``ds_all.zero``."""

from __future__ import annotations

from ds_zero import GatheredParameters

__all__ = ["GatheredParameters"]
