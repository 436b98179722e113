"""The native module tells how it was built and with which headers, or why it is not there."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds_aio
from ds_aio import native

STATUS = ds_aio.native_status()
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
    info = ds_aio.build_info()
    assert info.compiler in {"GNU", "Clang", "AppleClang", "IntelLLVM"}
    assert info.compiler_version[0].isdigit()
    assert info.cxx_standard >= 201703
    assert "-Wall" in info.flags


@needs_native
def test_build_info_tells_which_io_headers_the_compiler_saw() -> None:
    """Every header that lies in the system's include folder was seen by the compiler."""
    info = ds_aio.build_info()
    include = Path("/usr/include")
    assert info.io_uring_headers >= (include / "linux/io_uring.h").is_file()
    assert info.liburing_headers >= (include / "liburing.h").is_file()
    assert info.libaio_headers >= (include / "libaio.h").is_file()


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
    with pytest.raises(ds_aio.NativeUnavailableError, match="no working C\\+\\+ compiler"):
        ds_aio.build_info()


@pytest.mark.usefixtures("fresh_status")
def test_module_that_does_not_load_is_reported_with_the_loader_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: object())
    monkeypatch.delattr(ds_aio, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "ds_aio._native", None)
    status = native.native_status()
    assert not status.available
    assert "does not load here" in status.reason
