"""Without a working compiler the native packages build as pure Python and keep the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("scikit_build_core") is None or find_spec("pybind11") is None,
        reason="builds without isolation, so scikit-build-core and pybind11 must be installed",
    ),
]


def _build(package: Path, out: Path, **variables: str) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(out), str(package)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    result = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        # The CUDA kernels take minutes to compile and are not what is tested here.
        env={**os.environ, "PATH": path, "CMAKE_ARGS": "-DDS_KERNELS_CUDA=OFF", **variables},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(params=["ds-kernels", "ds-aio"])
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a native package, so that a failing build leaves nothing in the checkout."""
    copy = tmp_path / request.param
    shutil.copytree(ROOT / "packages" / request.param, copy)
    return copy


def _module(package: Path) -> str:
    return package.name.replace("-", "_")


def test_without_a_compiler_the_wheel_is_pure_and_says_so(package: Path, tmp_path: Path) -> None:
    wheel = _build(package, tmp_path / "out", CXX="/bin/false")
    assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    note = wheel.read(f"{_module(package)}/_build_failure.txt").decode()
    assert "no working C++ compiler was found" in note


def test_source_that_does_not_compile_names_the_compiler(package: Path, tmp_path: Path) -> None:
    (source,) = package.rglob("csrc/**/module.cpp")
    source.write_text("#error broken on purpose\n")
    wheel = _build(package, tmp_path / "out")
    assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    note = wheel.read(f"{_module(package)}/_build_failure.txt").decode()
    assert "could not build the C++17 sources" in note


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
def test_with_a_compiler_the_wheel_holds_the_module_and_no_note(
    package: Path, tmp_path: Path
) -> None:
    names = _build(package, tmp_path / "out").namelist()
    assert any(name.startswith(f"{_module(package)}/_native.") for name in names)
    assert f"{_module(package)}/_build_failure.txt" not in names
