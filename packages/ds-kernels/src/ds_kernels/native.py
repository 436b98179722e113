"""The compiled part of ds_kernels: whether it is there, why not, and how it was built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

__all__ = [
    "BuildInfo",
    "CpuLevel",
    "NativeStatus",
    "NativeUnavailableError",
    "build_info",
    "cpu_level",
    "native_status",
]

CpuLevel = Literal["avx512", "avx2", "baseline"]
"""Instruction sets that kernels are compiled for, the widest first."""

_CPU_LEVELS: dict[str, CpuLevel] = {"avx512": "avx512", "avx2": "avx2", "baseline": "baseline"}

_BUILD_FAILURE_NOTE = Path(__file__).with_name("_build_failure.txt")


class NativeUnavailableError(RuntimeError):
    """The native module of ds_kernels is needed and is not there."""


@dataclass(frozen=True)
class NativeStatus:
    """Whether the native module can be used.

    Attributes:
        available: True if it was built and loads.
        reason: Empty if available, else what went wrong and what to do.
    """

    available: bool
    reason: str


@dataclass(frozen=True)
class BuildInfo:
    """How the native module was compiled.

    Attributes:
        compiler: The compiler's name as CMake knows it, such as ``"GNU"`` or ``"Clang"``.
        compiler_version: Its version.
        cxx_standard: The value of ``__cplusplus``, 201703 for C++17.
        flags: The options that the compiler was given.
    """

    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str


@cache
def native_status() -> NativeStatus:
    """Whether the native module is there, and if not, why.

    The answer is found once in a process. Starts nothing and compiles nothing.
    """
    if find_spec("ds_kernels._native") is None:
        return NativeStatus(available=False, reason=f"{_missing_reason()}. {_REMEDY}")
    try:
        from ds_kernels import _native  # noqa: F401
    except ImportError as error:
        reason = f"the native module of ds_kernels does not load here: {error}. {_REMEDY}"
        return NativeStatus(available=False, reason=reason)
    return NativeStatus(available=True, reason="")


def build_info() -> BuildInfo:
    """How the native module was compiled.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    _require_native()
    from ds_kernels import _native

    return BuildInfo(**_native.build_info())


def cpu_level() -> CpuLevel:
    """The widest instruction set that this CPU runs, asked from the CPU at run time.

    Returns:
        ``"avx512"`` (x86-64-v4), ``"avx2"`` (x86-64-v3) or ``"baseline"``, which is also the
        answer on every CPU that is not x86.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    _require_native()
    from ds_kernels import _native

    return _CPU_LEVELS[_native.cpu_level()]


_REMEDY = (
    "Install a C++17 compiler and install ds-kernels again from source; "
    "`pip install -v` shows the compiler's own messages"
)


def _missing_reason() -> str:
    """What the build left behind, or that there was no build at all."""
    if _BUILD_FAILURE_NOTE.is_file():
        return _BUILD_FAILURE_NOTE.read_text(encoding="utf-8").strip()
    return "ds_kernels runs from a source tree where its native module was never built"


def _require_native() -> None:
    """Raise unless the native module can be used."""
    status = native_status()
    if not status.available:
        raise NativeUnavailableError(status.reason)
