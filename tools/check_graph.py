"""Checks that imports, declared dependencies and the allowed graph of packages are one thing.

What is held, for every package below packages/:

1. its declared siblings are exactly those of the allowed graph, extras only those allowed;
2. every import, also inside a function, is declared; an extra is imported lazily or from a leaf;
3. every declared dependency is imported, unless it is listed here as awaited;
4. ranges between siblings admit the current versions and end before the next breaking one, and
   ranges of other distributions admit the pins of constraints/dev.txt;
5. the core of ds_comm imports none of its leaves;
6. torch.distributed is used only in ds_comm, torch.cuda only in ds_comm.device and ds_kernels.

Examples:
    python tools/check_graph.py
    python tools/check_graph.py --root /path/to/checkout
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from graph_source import GraphError, Import, Package, read_packages, read_pins

__all__ = ["check", "main"]

# The allowed graph. Layer 0 has no hard sibling; no two packages of layer 1 need each other.
HARD_SIBLINGS: Mapping[str, frozenset[str]] = {
    "ds-aio": frozenset(),
    "ds-comm": frozenset(),
    "ds-kernels": frozenset(),
    "ds-launch": frozenset(),
    "ds-compress": frozenset({"ds-comm", "ds-kernels"}),
    "ds-inference": frozenset({"ds-comm", "ds-kernels"}),
    "ds-moe": frozenset({"ds-comm"}),
    "ds-pipe": frozenset({"ds-comm"}),
    "ds-zero": frozenset({"ds-comm", "ds-kernels"}),
    "ds-all": frozenset(
        {
            "ds-aio",
            "ds-comm",
            "ds-compress",
            "ds-inference",
            "ds-kernels",
            "ds-launch",
            "ds-moe",
            "ds-pipe",
            "ds-zero",
        }
    ),
}

# Siblings that an extra may bring, imported only where they are used.
EXTRA_SIBLINGS: Mapping[str, frozenset[str]] = {
    "ds-comm": frozenset({"ds-kernels"}),
    "ds-inference": frozenset({"ds-aio", "ds-compress", "ds-moe", "ds-zero"}),
    "ds-moe": frozenset({"ds-kernels"}),
    "ds-zero": frozenset({"ds-aio"}),
}

# Declared and not imported yet, because the code that needs it is not there yet. An entry that
# is imported after all is an error too, so this list can only shrink. ds-all pins every sibling
# for its users, whether or not it imports it.
AWAITED: Mapping[str, frozenset[str]] = {
    "ds-aio": frozenset({"numpy"}),
    "ds-compress": frozenset({"ds-comm", "ds-kernels"}),
    "ds-inference": frozenset({"ds-comm", "ds-kernels"}),
    "ds-kernels": frozenset({"numpy"}),
    "ds-moe": frozenset({"ds-comm"}),
    "ds-pipe": frozenset({"ds-comm"}),
}
FACADE = "ds-all"

# Needed without an import of their own: torch calls numpy in Tensor.numpy().
USED_THROUGH_TORCH: Mapping[str, frozenset[str]] = {"ds-zero": frozenset({"numpy"})}

# Subpackages that are imported only when named, so that the core stays small.
LEAVES: Mapping[str, tuple[str, ...]] = {
    "ds_comm": ("ds_comm.tensor", "ds_comm.sequence", "ds_comm.telemetry", "ds_comm.testing"),
    "ds_kernels": ("ds_kernels.triton",),
}

# Modules of torch and the only places that may touch them.
RESTRICTED: Mapping[str, tuple[str, ...]] = {
    "torch.distributed": ("ds_comm",),
    "torch.cuda": ("ds_comm.device", "ds_kernels"),
}

# Import names that differ from the name of their distribution.
DISTRIBUTION_OF: Mapping[str, str] = {"yaml": "pyyaml", "PIL": "pillow", "_pytest": "pytest"}


def check(root: Path) -> list[str]:
    """Judge the tree below ``root``.

    Returns:
        One message for each violation, in a stable order; empty if there is none.

    Raises:
        GraphError: The tree cannot be read.
    """
    packages = read_packages(root)
    pins = read_pins(root / "constraints" / "dev.txt")
    problems = [*_check_membership(packages)]
    for package in packages.values():
        if package.name in HARD_SIBLINGS:
            problems += _check_declared(package, packages)
            problems += _check_ranges(package, packages, pins)
            problems += _check_imports(package)
            problems += _check_unused(package)
            problems += _check_leaves(package)
            problems += _check_restricted(package)
    return [problem.replace(f"{root}/", "") for problem in problems]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_root = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=default_root, help="the repository's root")
    root = parser.parse_args(argv).root.resolve()
    try:
        problems = check(root)
    except GraphError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"check_graph: {len(problems)} problem(s)", file=sys.stderr)
        return 1
    print(f"check_graph: {len(HARD_SIBLINGS)} packages agree with the allowed graph")
    return 0


def _check_membership(packages: Mapping[str, Package]) -> Iterator[str]:
    for name in sorted(HARD_SIBLINGS.keys() - packages.keys()):
        yield f"packages/{name}: missing, but the allowed graph names it"
    for name in sorted(packages.keys() - HARD_SIBLINGS.keys()):
        yield f"{packages[name].pyproject}: {name} is not in the allowed graph: add it there"


def _check_declared(package: Package, packages: Mapping[str, Package]) -> Iterator[str]:
    """Rule 1: declared siblings are those of the graph."""
    siblings = package.dependencies.keys() & packages.keys()
    allowed = HARD_SIBLINGS[package.name]
    for name in sorted(siblings - allowed):
        yield f"{package.pyproject}: {package.name} may not depend on {name}: remove it"
    for name in sorted(allowed - siblings):
        yield f"{package.pyproject}: {package.name} must declare {name} in its dependencies"
    for extra, ranges in package.extras.items():
        for name in sorted((ranges.keys() & packages.keys()) - _extra_siblings(package)):
            yield f"{package.pyproject}: extra {extra!r} of {package.name} may not bring {name}"


def _extra_siblings(package: Package) -> frozenset[str]:
    return EXTRA_SIBLINGS.get(package.name, frozenset())


def _check_ranges(
    package: Package, packages: Mapping[str, Package], pins: Mapping[str, list[Version]]
) -> Iterator[str]:
    """Rule 4: ranges admit what is there and end before the next breaking version."""
    for ranges in (package.dependencies, *package.extras.values()):
        for name, specifier in ranges.items():
            if name in packages:
                yield from _check_sibling_range(package, packages[name], specifier)
            elif name not in pins:
                yield f"constraints/dev.txt: no pin of {name}, which {package.name} declares"
            else:
                for pin in pins[name]:
                    if not specifier.contains(pin, prereleases=True):
                        yield (
                            f"{package.pyproject}: {name}{specifier} excludes {pin}, "
                            f"the tested version in constraints/dev.txt"
                        )


def _check_sibling_range(
    package: Package, sibling: Package, specifier: SpecifierSet
) -> Iterator[str]:
    current = sibling.version
    major_is_zero = current.major == 0
    breaking = Version(f"0.{current.minor + 1}" if major_is_zero else f"{current.major + 1}")
    what = f"{package.pyproject}: range {sibling.name}{specifier}"
    if not specifier.contains(current, prereleases=True):
        yield f"{what} excludes the current version {current}"
    if specifier.contains(breaking, prereleases=True):
        yield f"{what} admits {breaking}, which may break: add <{breaking}"
    if not any(item.operator in {">=", "~="} for item in specifier):
        yield f"{what} has no floor: add >={current}"


def _check_imports(package: Package) -> Iterator[str]:
    """Rule 2: what is imported is declared; extras are imported lazily or from a leaf."""
    in_extras = {name for ranges in package.extras.values() for name in ranges}
    reported: set[tuple[Path, int, str]] = set()
    for item in package.imports:
        distribution = _distribution(item)
        if distribution in {None, package.name} or distribution in package.dependencies:
            continue
        if distribution in in_extras and (item.lazy or _in_leaf(item.importer)):
            continue
        if (item.path, item.line, distribution) in reported:
            continue
        reported.add((item.path, item.line, distribution))
        advice = (
            "an extra is imported only inside a function or a leaf: move the import there"
            if distribution in in_extras
            else f"declare {distribution} in {package.pyproject} or remove the import"
        )
        yield f"{item.path}:{item.line}: imports {item.name}, not a dependency: {advice}"


def _distribution(item: Import) -> str | None:
    """The distribution that an import comes from; None for the standard library."""
    top = item.name.split(".")[0]
    if top in sys.stdlib_module_names:
        return None
    return DISTRIBUTION_OF.get(top, canonicalize_name(top))


def _check_unused(package: Package) -> Iterator[str]:
    """Rule 3: what is declared is imported, or awaited and not yet imported."""
    imported = {_distribution(item) for item in package.imports}
    awaited = AWAITED.get(package.name, frozenset())
    excused = awaited | USED_THROUGH_TORCH.get(package.name, frozenset())
    if package.name == FACADE:
        excused |= HARD_SIBLINGS[FACADE]
    for name in sorted(package.dependencies.keys() - imported - excused):
        yield f"{package.pyproject}: {name} is declared but never imported: remove it"
    for name in sorted(awaited & imported):
        yield f"{package.name} imports {name} now: remove it from AWAITED in tools/check_graph.py"


def _check_leaves(package: Package) -> Iterator[str]:
    """Rule 5: nothing outside a leaf imports it."""
    for leaf in LEAVES.get(package.module, ()):
        sites = {
            (item.path, item.line, item.importer)
            for item in package.imports
            if _within(item.name, leaf) and not _in_leaf(item.importer)
        }
        for path, line, importer in sorted(sites):
            yield f"{path}:{line}: {importer} is core and must not import the leaf {leaf}"


def _check_restricted(package: Package) -> Iterator[str]:
    """Rule 6: torch.distributed and torch.cuda stay in their rooms."""
    for target, owners in RESTRICTED.items():
        lines = {
            (item.path, item.line)
            for item in package.imports
            if _within(item.name, target)
            and not any(_within(item.importer, owner) for owner in owners)
        }
        for path, line in sorted(lines):
            yield f"{path}:{line}: uses {target}, which belongs to {' and '.join(owners)} only"


def _in_leaf(importer: str) -> bool:
    return any(_within(importer, leaf) for leaves in LEAVES.values() for leaf in leaves)


def _within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


if __name__ == "__main__":
    sys.exit(main())
