"""Reads what check_graph judges: the metadata of every package and the imports in its source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GraphError", "Import", "Package", "read_packages", "read_pins"]


class GraphError(Exception):
    """The tree cannot be read: a file is missing or malformed."""


@dataclass(frozen=True)
class Import:
    """One module that is imported, or reached as an attribute of an imported one.

    Attributes:
        name: Absolute dotted name, such as ``torch.distributed``.
        importer: Dotted name of the module that holds the statement.
        path: The file.
        line: Line number in the file, counted from 1.
        lazy: True inside a function or an ``if TYPE_CHECKING`` block.
    """

    name: str
    importer: str
    path: Path
    line: int
    lazy: bool


@dataclass(frozen=True)
class Package:
    """One distribution of the repository.

    Attributes:
        name: Distribution name, such as ``ds-zero``.
        module: Import name, such as ``ds_zero``.
        pyproject: Its pyproject.toml.
        version: The version in ``_version.py``.
        dependencies: Hard dependencies with their ranges.
        extras: For each extra, its dependencies with their ranges.
        imports: Every import in its source.
    """

    name: str
    module: str
    pyproject: Path
    version: Version
    dependencies: Mapping[str, SpecifierSet]
    extras: Mapping[str, Mapping[str, SpecifierSet]]
    imports: tuple[Import, ...]


def read_packages(root: Path) -> dict[str, Package]:
    """Read all of ``<root>/packages``, by distribution name.

    Raises:
        GraphError: There are no packages, or one cannot be read.
    """
    files = sorted((root / "packages").glob("*/pyproject.toml"))
    if not files:
        raise GraphError(f"no packages/*/pyproject.toml below {root}: give the repository's root")
    packages = [_read_package(path) for path in files]
    return {package.name: package for package in packages}


def read_pins(path: Path) -> dict[str, list[Version]]:
    """Read the exact versions of a constraints file; a name may have one for each marker.

    Raises:
        GraphError: The file is missing or a line is not ``name==version``.
    """
    pins: dict[str, list[Version]] = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        requirement = _requirement(text, f"{path}:{number}")
        exact = [item.version for item in requirement.specifier if item.operator == "=="]
        if len(exact) != 1:
            raise GraphError(f"{path}:{number}: {text!r} is no exact pin: write name==version")
        pins.setdefault(canonicalize_name(requirement.name), []).append(Version(exact[0]))
    return pins


def _read_package(pyproject: Path) -> Package:
    try:
        project: dict[str, Any] = tomllib.loads(_read_text(pyproject))["project"]
        name = project["name"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise GraphError(f"{pyproject}: no [project] table with a name: {error}") from error
    module = name.replace("-", "_")
    source = pyproject.parent / "src" / module
    return Package(
        name=name,
        module=module,
        pyproject=pyproject,
        version=_read_version(source / "_version.py"),
        dependencies=_ranges(project.get("dependencies", []), pyproject),
        extras={
            extra: _ranges(lines, pyproject)
            for extra, lines in project.get("optional-dependencies", {}).items()
        },
        imports=tuple(_read_imports(source)),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise GraphError(f"{path}: cannot be read: {error.strerror}") from error


def _read_version(path: Path) -> Version:
    match = re.search(r'^__version__ = "([^"]+)"$', _read_text(path), re.MULTILINE)
    if match is None:
        raise GraphError(f'{path}: no line __version__ = "X.Y.Z"')
    try:
        return Version(match[1])
    except InvalidVersion as error:
        raise GraphError(f"{path}: {error}") from error


def _requirement(text: str, where: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise GraphError(f"{where}: {text!r} is no requirement: {error}") from error


def _ranges(lines: list[str], pyproject: Path) -> dict[str, SpecifierSet]:
    requirements = [_requirement(line, str(pyproject)) for line in lines]
    return {canonicalize_name(item.name): item.specifier for item in requirements}


def _read_imports(source: Path) -> Iterator[Import]:
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        importer = ".".join(parts[:-1] if is_package else parts)
        try:
            tree = ast.parse(_read_text(path), filename=str(path))
        except SyntaxError as error:
            raise GraphError(f"{path}:{error.lineno}: {error.msg}") from error
        collector = _ImportCollector(importer, is_package, path)
        collector.visit(tree)
        yield from collector.found


class _ImportCollector(ast.NodeVisitor):
    """Collects imports, and attributes such as ``torch.cuda`` of names that are modules."""

    def __init__(self, importer: str, is_package: bool, path: Path) -> None:
        self.found: list[Import] = []
        self._importer = importer
        self._package = importer.split(".") if is_package else importer.split(".")[:-1]
        self._path = path
        self._lazy_depth = 0
        self._modules: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)
            top = alias.name.split(".")[0]
            self._modules[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node)
        self._add(base, node.lineno)
        for alias in node.names:
            if alias.name != "*":
                name = f"{base}.{alias.name}"
                self._add(name, node.lineno)
                self._modules[alias.asname or alias.name] = name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts = [node.attr]
        value: ast.expr = node.value
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in self._modules:
            dotted = ".".join([self._modules[value.id], *reversed(parts)])
            # Reaching through a name imports nothing by itself: only its import statement does.
            self.found.append(Import(dotted, self._importer, self._path, node.lineno, lazy=True))
        self.visit(value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self.generic_visit(node)
            return
        self._lazily(node.body)
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, node.args, *filter(None, [node.returns])):
            self.visit(outside)
        self._lazily(node.body)

    def _lazily(self, body: list[ast.stmt]) -> None:
        self._lazy_depth += 1
        for child in body:
            self.visit(child)
        self._lazy_depth -= 1

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        base = self._package[: len(self._package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _add(self, name: str, line: int) -> None:
        self.found.append(Import(name, self._importer, self._path, line, self._lazy_depth > 0))
