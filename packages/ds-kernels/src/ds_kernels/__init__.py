"""Native kernels: today the native build and CPU detection, no kernel yet."""

from __future__ import annotations

from ds_kernels._version import __version__
from ds_kernels.native import (
    BuildInfo,
    CpuLevel,
    NativeStatus,
    NativeUnavailableError,
    build_info,
    cpu_level,
    native_status,
)

__all__ = [
    "BuildInfo",
    "CpuLevel",
    "NativeStatus",
    "NativeUnavailableError",
    "__version__",
    "build_info",
    "cpu_level",
    "native_status",
]
