"""Test support: a pool of persistent ranks and the pytest fixture ``ranks`` built on it.

``ds_comm.testing.plugin`` is the pytest plugin; ``RankPool`` works without pytest.
"""

from __future__ import annotations

from ds_comm.testing.pool import RankError, RankFailure, RankPool

__all__ = ["RankError", "RankFailure", "RankPool"]
