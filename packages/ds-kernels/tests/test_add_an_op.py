"""The page ``docs/add-an-op.md`` is followed: its files are written, built and tested."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_kernels import native_status

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE.parents[1] / "docs/add-an-op.md"
_BLOCK = re.compile(r"^```\w+\n(?:#|//) (\S+\.\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks() -> dict[str, str]:
    return dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def _run(*command: str | Path, where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's files, and no other op in its native module."""
    tree = tmp_path_factory.mktemp("add-an-op") / "ds-kernels"
    skipped = shutil.ignore_patterns("*.so", "*.pyc", "__pycache__", "build", "results")
    shutil.copytree(PACKAGE, tree, ignore=skipped)
    for name, text in _blocks().items():
        (tree / name).write_text(text, encoding="utf-8")
    return tree


def test_every_place_is_named() -> None:
    """One file of the op in each of its places."""
    assert set(_blocks()) == {
        "src/ds_kernels/reference/scale.py",
        "csrc/kernels/scale.h",
        "csrc/cpu/scale.cpp",
        "csrc/cuda/scale.cu",
        "csrc/binding/scale.cpp",
        "csrc/ops.cmake",
        "src/ds_kernels/ops/scale.py",
        "tests/ops/test_scale.py",
    }
    assert not any((PACKAGE / name).exists() for name in _blocks() if name != "csrc/ops.cmake")


@pytest.mark.slow
@pytest.mark.skipif(not native_status().available, reason="the native module could not be built")
def test_the_op_builds_and_passes(tree: Path) -> None:
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is needed to build")
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is needed to build")
    cuda = shutil.which("nvcc") is not None
    build = tree / "build"
    _run(
        cmake, "-S", tree, "-B", build, "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DDS_KERNELS_CUDA={'ON' if cuda else 'OFF'}", "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        where=tree,
    )  # fmt: skip
    _run(cmake, "--build", build, "--parallel", "2", where=tree)
    _run(cmake, "--install", build, "--prefix", tree / "src", where=tree)
    # An editable install of ds-kernels may put itself before any path: the copy goes first.
    runner = tree / "run.py"
    runner.write_text(_RUNNER, encoding="utf-8")
    report = _run(
        sys.executable, runner, tree / "src", tree / "tests/ops/test_scale.py", where=tree
    )
    # Two backends at three dtypes, and the three tests below them.
    assert "9 passed" in report


_RUNNER = """
import sys

import pytest

source, test = sys.argv[1:]
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, source)
import ds_kernels

assert ds_kernels.__file__.startswith(source), ds_kernels.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--noconftest", "--rootdir", source, test]))
"""
