"""The compiled part of ds_kernels: whether it is there, why not, and how it was built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = [
    "BuildInfo",
    "CpuLevel",
    "NativeStatus",
    "NativeUnavailableError",
    "build_info",
    "cpu_level",
    "cpu_level_in_use",
    "forced_cpu_level",
    "load_native",
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
        openmp: True if kernels use threads.
        cuda_version: The CUDA compiler's version, empty without CUDA kernels.
        cuda_architectures: What the CUDA kernels were compiled for.
        cuda_sources: SHA-256 of the sources of each op's CUDA kernel, by op file.
    """

    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str
    openmp: bool = False
    cuda_version: str = ""
    cuda_architectures: str = ""
    cuda_sources: tuple[tuple[str, str], ...] = ()


@cache
def native_status() -> NativeStatus:
    """Whether the native module is there, and if not, why.

    The answer is found once in a process. Starts nothing and compiles nothing.
    """
    if find_spec("ds_kernels._native") is None:
        return NativeStatus(available=False, reason=f"{_missing_reason()}. {_REMEDY}")
    try:
        _import()
    except ImportError as error:
        reason = f"the native module of ds_kernels does not load here: {error}. {_REMEDY}"
        return NativeStatus(available=False, reason=reason)
    return NativeStatus(available=True, reason="")


def build_info() -> BuildInfo:
    """How the native module was compiled.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    info = load_native().build_info()
    sources = (item.partition("=") for item in info["cuda_sources"].split())
    return BuildInfo(
        compiler=info["compiler"],
        compiler_version=info["compiler_version"],
        cxx_standard=info["cxx_standard"],
        flags=info["flags"],
        openmp=info["openmp"],
        cuda_version=info["cuda_version"],
        cuda_architectures=info["cuda_architectures"],
        cuda_sources=tuple((name, digest) for name, _, digest in sources),
    )


def cpu_level() -> CpuLevel:
    """The widest instruction set that this CPU runs, asked from the CPU at run time.

    Returns:
        ``"avx512"`` (x86-64-v4), ``"avx2"`` (x86-64-v3) or ``"baseline"``, which is also the
        answer on every CPU that is not x86.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    return _CPU_LEVELS[load_native().cpu_level()]


def cpu_level_in_use() -> CpuLevel:
    """The instruction set that kernels use: :func:`cpu_level` or less.

    ``DS_KERNELS_CPU_LEVEL``, read when the native module loads, lowers it.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    return _CPU_LEVELS[load_native().cpu_level_in_use()]


@contextmanager
def forced_cpu_level(level: CpuLevel) -> Iterator[None]:
    """Use a lower instruction set in this process within the block, for tests and measurements.

    Raises:
        NativeUnavailableError: The native module is not there.
        ValueError: This CPU does not run ``level``.
    """
    native = load_native()
    before = native.cpu_level_in_use()
    native.set_cpu_level(level)
    if native.cpu_level_in_use() != level:
        native.set_cpu_level(before)
        raise ValueError(f"this CPU runs up to {native.cpu_level()}, not {level}")
    try:
        yield
    finally:
        native.set_cpu_level(before)


def load_native() -> Native:
    """The native module.

    Raises:
        NativeUnavailableError: It is not there; :func:`native_status` has the reason.
    """
    status = native_status()
    if not status.available:
        raise NativeUnavailableError(status.reason)
    return _import()


_REMEDY = (
    "Install a C++17 compiler and install ds-kernels again from source; "
    "`pip install -v` shows the compiler's own messages"
)


def _missing_reason() -> str:
    """What the build left behind, or that there was no build at all."""
    if _BUILD_FAILURE_NOTE.is_file():
        return _BUILD_FAILURE_NOTE.read_text(encoding="utf-8").strip()
    return "ds_kernels runs from a source tree where its native module was never built"


def _import() -> Native:
    """Import the module; torch brings libgomp.so.1 where the system has none."""
    try:
        from ds_kernels import _native
    except ImportError as error:
        if "libgomp" not in str(error):
            raise
        import torch  # noqa: F401

        from ds_kernels import _native
    return cast("Native", _native)
