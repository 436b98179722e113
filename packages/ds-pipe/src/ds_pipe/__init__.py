"""Pipeline parallelism: nothing is in this package yet, only its metadata."""

from __future__ import annotations

from ds_pipe._version import __version__

__all__ = ["__version__"]
