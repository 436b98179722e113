"""Each rule of the package graph is broken on purpose in a small tree and must be reported."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_graph
from graph_source import GraphError, read_packages, read_pins

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """A copy of the allowed graph in which every package is one module that obeys the rules."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, siblings in check_graph.HARD_SIBLINGS.items():
            source = self.source(name)
            source.mkdir(parents=True)
            (source / "_version.py").write_text('__version__ = "0.1.0"\n')
            awaited = check_graph.AWAITED.get(name, frozenset())
            self.declare(name, {item: ">=0.1.0,<0.2" for item in siblings})
            imports = [f"import {item.replace('-', '_')}" for item in siblings - awaited]
            (source / "__init__.py").write_text("\n".join(sorted(imports)) + "\n")
        (root / "constraints").mkdir()
        (root / "constraints" / "dev.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")

    def source(self, name: str) -> Path:
        return self.root / "packages" / name / "src" / name.replace("-", "_")

    def declare(
        self, name: str, ranges: dict[str, str], extras: dict[str, list[str]] | None = None
    ) -> None:
        lines = ["[project]", f'name = "{name}"']
        lines += [f"dependencies = {[f'{item}{spec}' for item, spec in sorted(ranges.items())]}"]
        lines += ["[project.optional-dependencies]"] if extras else []
        lines += [f"{extra} = {items}" for extra, items in (extras or {}).items()]
        path = self.root / "packages" / name / "pyproject.toml"
        path.write_text("\n".join(lines) + "\n")

    def write(self, name: str, relative: str, text: str) -> None:
        path = self.source(name) / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def problems(self) -> list[str]:
        return check_graph.check(self.root)

    def only_problem(self) -> str:
        problems = self.problems()
        assert len(problems) == 1, problems
        return problems[0]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_repository_obeys() -> None:
    assert check_graph.check(ROOT) == []


def test_obedient_tree_has_no_problem(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    assert tree.problems() == []
    assert check_graph.main(["--root", str(tree.root)]) == 0
    assert "10 packages agree" in capsys.readouterr().out


def test_undeclared_import_inside_a_function_is_found_with_its_line(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.write("ds-launch", "run.py", "def run() -> None:\n    import torch\n")
    assert tree.only_problem().startswith(
        "packages/ds-launch/src/ds_launch/run.py:2: imports torch, not a dependency: declare torch"
    )
    assert check_graph.main(["--root", str(tree.root)]) == 1
    assert "1 problem(s)" in capsys.readouterr().err


def test_import_between_two_packages_of_layer_1_is_found(tree: Tree) -> None:
    tree.write("ds-pipe", "executor.py", "from ds_zero import engine\n")
    assert "executor.py:1: imports ds_zero, not a dependency" in tree.only_problem()


def test_declaring_a_forbidden_sibling_is_found(tree: Tree) -> None:
    tree.declare("ds-pipe", {"ds-comm": ">=0.1.0,<0.2", "ds-zero": ">=0.1.0,<0.2"})
    tree.write("ds-pipe", "executor.py", "import ds_zero\n")
    assert "ds-pipe may not depend on ds-zero" in tree.only_problem()


def test_leaving_out_a_needed_sibling_is_found(tree: Tree) -> None:
    tree.declare("ds-moe", {})
    assert "ds-moe must declare ds-comm" in tree.only_problem()


def test_unused_dependency_is_found(tree: Tree) -> None:
    tree.declare("ds-comm", {"torch": ">=2.4,<3"})
    assert "torch is declared but never imported" in tree.only_problem()


def test_awaited_dependency_that_arrived_is_found(tree: Tree) -> None:
    tree.declare("ds-aio", {"numpy": ">=1.26,<3"})
    assert tree.problems() == []
    tree.write("ds-aio", "pool.py", "import numpy as np\n")
    assert "remove it from AWAITED" in tree.only_problem()


@pytest.mark.parametrize(
    ("specifier", "message"),
    [
        (">=0.2,<0.3", "excludes the current version 0.1.0"),
        (">=0.1.0,<1", "admits 0.2, which may break: add <0.2"),
        (">=0.1.0", "admits 0.2, which may break: add <0.2"),
        ("<0.2", "has no floor: add >=0.1.0"),
    ],
)
def test_bad_sibling_range_is_found(tree: Tree, specifier: str, message: str) -> None:
    tree.declare("ds-moe", {"ds-comm": specifier})
    assert message in "\n".join(tree.problems())


def test_exact_pin_of_a_sibling_is_found(tree: Tree) -> None:
    tree.declare("ds-moe", {"ds-comm": "==0.1.0"})
    assert "has no floor" in tree.only_problem()


def test_range_that_excludes_the_tested_version_is_found(tree: Tree) -> None:
    tree.declare("ds-comm", {"torch": ">=2.4,<2.10"})
    tree.write("ds-comm", "device.py", "import torch\n")
    assert "torch<2.10,>=2.4 excludes 2.13.0" in tree.only_problem()


def test_dependency_without_a_pin_is_found(tree: Tree) -> None:
    tree.declare("ds-comm", {"scipy": ">=1"})
    tree.write("ds-comm", "device.py", "import scipy.special\n")
    assert "no pin of scipy, which ds-comm declares" in tree.only_problem()


def test_extra_is_allowed_in_functions_and_leaves_only(tree: Tree) -> None:
    (tree.root / "constraints" / "dev.txt").write_text("pytest==9.2.0\n")
    tree.declare("ds-comm", {}, {"testing": ["pytest>=8"]})
    tree.write("ds-comm", "testing/plugin.py", "import pytest\n")
    tree.write("ds-comm", "config.py", "def f() -> None:\n    import pytest\n")
    assert tree.problems() == []
    tree.write("ds-comm", "config.py", "import pytest\n")
    assert "an extra is imported only inside a function or a leaf" in tree.only_problem()


def test_extra_that_brings_a_forbidden_sibling_is_found(tree: Tree) -> None:
    tree.declare("ds-pipe", {"ds-comm": ">=0.1.0,<0.2"}, {"zero": ["ds-zero>=0.1.0,<0.2"]})
    assert "extra 'zero' of ds-pipe may not bring ds-zero" in tree.only_problem()


@pytest.mark.parametrize(
    "text",
    [
        "import ds_comm.testing\n",
        "from ds_comm import testing\n",
        "from . import testing\n",
        "from .testing import plugin\n",
        "def f() -> None:\n    from ds_comm.testing import plugin\n",
    ],
)
def test_core_that_imports_a_leaf_is_found(tree: Tree, text: str) -> None:
    tree.write("ds-comm", "testing/__init__.py", "")
    tree.write("ds-comm", "mesh.py", text)
    assert "ds_comm.mesh is core and must not import the leaf" in tree.only_problem()


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\n",
        "from torch import distributed\n",
        "from torch.distributed import nn\n",
        "import torch\nx = torch.distributed.is_initialized()\n",
        "import torch as t\ndef f() -> None:\n    t.distributed.barrier()\n",
    ],
)
def test_torch_distributed_outside_ds_comm_is_found(tree: Tree, text: str) -> None:
    ranges = {"ds-comm": ">=0.1.0,<0.2", "ds-kernels": ">=0.1.0,<0.2", "torch": ">=2.4,<3"}
    tree.declare("ds-zero", ranges)
    tree.write("ds-zero", "engine.py", text)
    assert "uses torch.distributed, which belongs to ds_comm only" in tree.only_problem()


def test_torch_cuda_is_allowed_in_device_and_nowhere_else_in_ds_comm(tree: Tree) -> None:
    tree.declare("ds-comm", {"torch": ">=2.4,<3"})
    tree.write("ds-comm", "device.py", "import torch\nx = torch.cuda.is_available()\n")
    assert tree.problems() == []
    tree.write("ds-comm", "mesh.py", "import torch\nx = torch.cuda.is_available()\n")
    problem = tree.only_problem()
    assert "mesh.py:2: uses torch.cuda, which belongs to ds_comm.device and ds_kernels" in problem


def test_unknown_package_is_found(tree: Tree) -> None:
    (tree.root / "packages" / "ds-extra" / "src" / "ds_extra").mkdir(parents=True)
    tree.write("ds-extra", "_version.py", '__version__ = "1.0.0"\n')
    tree.declare("ds-extra", {})
    assert "ds-extra is not in the allowed graph" in tree.only_problem()


@pytest.mark.parametrize(
    ("relative", "text", "message"),
    [
        ("packages/ds-aio/pyproject.toml", "[project", "no [project] table"),
        ("packages/ds-aio/pyproject.toml", "[tool]\n", "no [project] table"),
        ("packages/ds-aio/src/ds_aio/_version.py", "", "no line __version__"),
        ("packages/ds-aio/src/ds_aio/_version.py", '__version__ = "a.b"\n', "Invalid version"),
        ("packages/ds-aio/src/ds_aio/bad.py", "def f(:\n", "bad.py:1: "),
        ("constraints/dev.txt", "torch>=2\n", "no exact pin: write name==version"),
        ("constraints/dev.txt", "???\n", "no requirement"),
    ],
)
def test_malformed_tree_is_one_readable_error(
    tree: Tree,
    capsys: pytest.CaptureFixture[str],
    relative: str,
    text: str,
    message: str,
) -> None:
    (tree.root / relative).write_text(text)
    assert check_graph.main(["--root", str(tree.root)]) == 1
    assert message in capsys.readouterr().err


def test_empty_root_is_one_readable_error(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="give the repository's root"):
        read_packages(tmp_path)


def test_pins_keep_one_version_for_each_marker(tmp_path: Path) -> None:
    path = tmp_path / "dev.txt"
    path.write_text("# comment\nNumPy==2.4.6 ; python_version >= '3.11'\nnumpy==2.2.6  # old\n")
    assert [str(version) for version in read_pins(path)["numpy"]] == ["2.4.6", "2.2.6"]
