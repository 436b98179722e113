from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ds_launch import __version__
from ds_launch.report import DISTRIBUTIONS, Row, as_text, package_rows, tool_row

if TYPE_CHECKING:
    from conftest import Done, Ds


def sections(done: Done) -> dict[str, dict[str, tuple[str, str]]]:
    assert done.status == 0, done.err
    document = json.loads(done.out)
    assert document["schema"] == 1
    return {
        name: {row["item"]: (row["status"], row["detail"]) for row in rows}
        for name, rows in document["sections"].items()
    }


def test_json(ds: Ds) -> None:
    report = sections(ds("report", "--json", env={"CUDA_VISIBLE_DEVICES": "3,5"}))
    assert tuple(report["packages"]) == DISTRIBUTIONS
    assert len(DISTRIBUTIONS) == 10
    assert report["packages"]["ds-launch"][0] == __version__
    assert report["machine"]["python"][0] == platform.python_version()
    assert report["machine"]["accelerators"][0] == "2"
    assert "native modules" in report
    assert "torch" not in report


def test_text_says_the_same(ds: Ds) -> None:
    text = ds("report").out.decode()
    for name in DISTRIBUTIONS:
        assert f"\n  {name} " in text


def test_imports_no_torch(ds: Ds) -> None:
    env = ds.plugin("toy", "", torch="raise SystemExit('torch was imported')\n")
    assert ds("report", env=env).status == 0


def test_native_rows_of_other_packages(ds: Ds) -> None:
    env = ds.plugin(
        "toy",
        "[ds.report]\ntoy = toymod:rows\nbad = nowhere:rows\nworse = toymod:fails\n",
        toymod=(
            "def rows():\n    return [('toy', 'missing', 'no compiler')]\n"
            "def fails():\n    raise RuntimeError('cannot look')\n"
        ),
    )
    native = sections(ds("report", "--json", env=env))["native modules"]
    assert native["toy"] == ("missing", "no compiler")
    assert native["bad"][0] == "broken" and "nowhere" in native["bad"][1]
    assert native["worse"] == ("broken", "RuntimeError: cannot look")


def test_deep_says_why_torch_does_not_load(ds: Ds) -> None:
    env = ds.plugin("toy", "", torch="raise ImportError('libcudart is missing')\n")
    torch = sections(ds("report", "--json", "--deep", env=env))["torch"]
    assert torch["torch"] == ("broken", "ImportError: libcudart is missing")


@pytest.mark.parametrize("words", [["x"], ["--jsn"]])
def test_usage(ds: Ds, words: list[str]) -> None:
    done = ds("report", *words)
    assert done.status == 2
    assert b"Traceback" not in done.err


def test_missing_package() -> None:
    (row,) = package_rows(["no-such-distribution"])
    assert row == Row("no-such-distribution", "missing", "")


def test_package_in_a_source_tree_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "toy_tree"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "_version.py").write_text('__version__ = "3.4.5"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = package_rows(["toy-tree"])
    assert row == Row("toy-tree", "3.4.5", f"source tree, not installed: {package}")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("#!/bin/sh\necho 'tool version 12.4 (build 7)'\n", "12.4"),
        ("#!/bin/sh\necho 'OpenTool_9.2p1' >&2\n", "9.2p1"),
        ("#!/bin/sh\nexit 1\n", "unknown version"),
        ("no interpreter", "broken"),
    ],
)
def test_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: str) -> None:
    tool = tmp_path / "toytool"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool_row("toytool").status == status
    assert tool_row("absent") == Row("absent", "missing")


def test_table_is_aligned() -> None:
    report = {"one": [Row("a", "1", "x")], "two": [Row("long name", "22.0"), Row("b", "333", "y")]}
    assert as_text(report) == (
        "one\n  a          1    x\ntwo\n  long name  22.0\n  b          333  y\n"
    )
