"""The native module tells how it was built and what the CPU runs, or why it is not there."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds_kernels
from ds_kernels import native

STATUS = ds_kernels.native_status()
needs_native = pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)


@pytest.fixture
def fresh_status(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let native_status() look again, and once more after the test."""
    native.native_status.cache_clear()
    yield
    monkeypatch.undo()
    native.native_status.cache_clear()


def _hide_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)


def test_status_is_frozen_and_has_a_reason_exactly_when_unavailable() -> None:
    assert bool(STATUS.reason) is not STATUS.available
    with pytest.raises(dataclasses.FrozenInstanceError):
        STATUS.available = False  # type: ignore[misc]


@needs_native
def test_build_info_names_compiler_and_standard() -> None:
    info = ds_kernels.build_info()
    assert info.compiler in {"GNU", "Clang", "AppleClang", "IntelLLVM"}
    assert info.compiler_version[0].isdigit()
    assert info.cxx_standard >= 201703
    assert "-Wall" in info.flags


def _expected_cpu_level() -> str:
    """The level by the kernel's own list of CPU flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    if {"avx2", "fma", "bmi1", "bmi2"} <= flags:
        if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
            return "avx512"
        return "avx2"
    return "baseline"


@needs_native
@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="reads /proc/cpuinfo of x86"
)
def test_cpu_level_agrees_with_the_kernel() -> None:
    assert ds_kernels.cpu_level() == _expected_cpu_level()


@pytest.mark.usefixtures("fresh_status")
def test_missing_module_says_that_it_was_never_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _hide_native(monkeypatch)
    monkeypatch.setattr(native, "_BUILD_FAILURE_NOTE", tmp_path / "absent.txt")
    status = native.native_status()
    assert not status.available
    assert "never built" in status.reason
    assert "Install a C++17 compiler" in status.reason


@pytest.mark.usefixtures("fresh_status")
def test_failed_build_gives_its_note_as_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "_build_failure.txt"
    note.write_text("no working C++ compiler was found\n")
    _hide_native(monkeypatch)
    monkeypatch.setattr(native, "_BUILD_FAILURE_NOTE", note)
    with pytest.raises(ds_kernels.NativeUnavailableError, match="no working C\\+\\+ compiler"):
        ds_kernels.cpu_level()
    with pytest.raises(ds_kernels.NativeUnavailableError, match="no working C\\+\\+ compiler"):
        ds_kernels.build_info()


@pytest.mark.usefixtures("fresh_status")
def test_module_that_does_not_load_is_reported_with_the_loader_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: object())
    monkeypatch.delattr(ds_kernels, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "ds_kernels._native", None)
    status = native.native_status()
    assert not status.available
    assert "does not load here" in status.reason
