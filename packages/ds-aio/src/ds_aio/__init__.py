"""Asynchronous file I/O: today the native build only, no I/O yet."""

from __future__ import annotations

from ds_aio._version import __version__
from ds_aio.native import (
    BuildInfo,
    NativeStatus,
    NativeUnavailableError,
    build_info,
    native_status,
)

__all__ = [
    "BuildInfo",
    "NativeStatus",
    "NativeUnavailableError",
    "__version__",
    "build_info",
    "native_status",
]
