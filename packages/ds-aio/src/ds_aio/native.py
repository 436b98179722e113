"""The compiled part of ds_aio: whether it is there, why not, and how it was built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "BuildInfo",
    "NativeStatus",
    "NativeUnavailableError",
    "build_info",
    "native_status",
]

_BUILD_FAILURE_NOTE = Path(__file__).with_name("_build_failure.txt")


class NativeUnavailableError(RuntimeError):
    """The native module of ds_aio is needed and is not there."""


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
        io_uring_headers: Whether the kernel's header ``linux/io_uring.h`` was found.
        liburing_headers: Whether ``liburing.h`` was found.
        libaio_headers: Whether ``libaio.h`` was found.
    """

    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str
    io_uring_headers: bool
    liburing_headers: bool
    libaio_headers: bool


@cache
def native_status() -> NativeStatus:
    """Whether the native module is there, and if not, why.

    The answer is found once in a process. Starts nothing and compiles nothing.
    """
    if find_spec("ds_aio._native") is None:
        return NativeStatus(available=False, reason=f"{_missing_reason()}. {_REMEDY}")
    try:
        from ds_aio import _native  # noqa: F401
    except ImportError as error:
        reason = f"the native module of ds_aio does not load here: {error}. {_REMEDY}"
        return NativeStatus(available=False, reason=reason)
    return NativeStatus(available=True, reason="")


def build_info() -> BuildInfo:
    """How the native module was compiled.

    Raises:
        NativeUnavailableError: The native module is not there.
    """
    _require_native()
    from ds_aio import _native

    return BuildInfo(**_native.build_info())


_REMEDY = (
    "Install a C++17 compiler and install ds-aio again from source; "
    "`pip install -v` shows the compiler's own messages"
)


def _missing_reason() -> str:
    """What the build left behind, or that there was no build at all."""
    if _BUILD_FAILURE_NOTE.is_file():
        return _BUILD_FAILURE_NOTE.read_text(encoding="utf-8").strip()
    return "ds_aio runs from a source tree where its native module was never built"


def _require_native() -> None:
    """Raise unless the native module can be used."""
    status = native_status()
    if not status.available:
        raise NativeUnavailableError(status.reason)
