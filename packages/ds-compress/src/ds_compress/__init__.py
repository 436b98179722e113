"""Compression of weights, gradients and data: nothing is in this package yet."""

from __future__ import annotations

from ds_compress._version import __version__

__all__ = ["__version__"]
