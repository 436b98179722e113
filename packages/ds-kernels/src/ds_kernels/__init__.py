"""Native kernels with a pure-torch reference each; the ops are in :mod:`ds_kernels.ops`."""

from __future__ import annotations

from ds_kernels._version import __version__
from ds_kernels.errors import BackendUnavailableError, KernelArgumentError
from ds_kernels.native import (
    BuildInfo,
    CpuLevel,
    NativeStatus,
    NativeUnavailableError,
    build_info,
    cpu_level,
    cpu_level_in_use,
    forced_cpu_level,
    native_status,
)

__all__ = [
    "BackendUnavailableError",
    "BuildInfo",
    "CpuLevel",
    "KernelArgumentError",
    "NativeStatus",
    "NativeUnavailableError",
    "__version__",
    "build_info",
    "cpu_level",
    "cpu_level_in_use",
    "forced_cpu_level",
    "native_status",
]
