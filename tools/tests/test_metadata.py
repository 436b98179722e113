"""Every distribution's metadata is complete and agrees with its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.fixture(params=PACKAGES, ids=lambda path: path.name)
def package(request: pytest.FixtureRequest) -> Path:
    """The folder of one distribution."""
    path: Path = request.param
    return path


def _document(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))


def _source(package: Path) -> Path:
    return package / "src" / package.name.replace("-", "_")


def test_there_are_ten_packages() -> None:
    assert len(PACKAGES) == 10


def test_project_table(package: Path) -> None:
    project = _document(package)["project"]
    assert project["name"] == package.name
    assert project["dynamic"] == ["version"]
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"
    assert (package / project["readme"]).read_text(encoding="utf-8").startswith(f"# {package.name}")


def test_licence_is_that_of_the_repository(package: Path) -> None:
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_package_is_typed_and_names_its_version_once(package: Path) -> None:
    source = _source(package)
    assert (source / "py.typed").is_file()
    version_lines = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "\n__version__ =" in path.read_text(encoding="utf-8")
    ]
    assert version_lines == ["_version.py"]


def test_changelog_has_the_current_version(package: Path) -> None:
    text = (_source(package) / "_version.py").read_text(encoding="utf-8")
    version = text.split('__version__ = "')[1].split('"')[0]
    assert f"## [{version}]" in (package / "CHANGELOG.md").read_text(encoding="utf-8")


def test_building_needs_no_torch(package: Path) -> None:
    requires = _document(package)["build-system"]["requires"]
    assert not any(line.startswith("torch") for line in requires)


def test_entry_points_name_modules_that_exist(package: Path) -> None:
    project = _document(package)["project"]
    tables = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    for target in [target for table in tables for target in table.values()]:
        module, attribute = target.split(":")
        relative = Path(*module.split(".")[1:])
        text = (_source(package) / relative).with_suffix(".py").read_text(encoding="utf-8")
        assert f"def {attribute}(" in text, f"{target} is not defined"
