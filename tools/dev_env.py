"""Makes the development environment `.venv`: one for all packages, installed in place.

A torch that is there already is kept, whether it lies in `.venv` or in the interpreter that runs
dev.py: the pins of torch and of what torch needs then give way to what is installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dev_steps import DevError, Step, run_logged

__all__ = ["Environment", "Torch", "effective_constraints", "in_range", "prepare"]

MIN_PYTHON = (3, 10)
_NATIVE_PACKAGES = ("ds-aio", "ds-kernels")
_PROBE = """
import importlib.metadata as m, json, sys, sysconfig
try:
    d = m.distribution("torch")
    t = {"version": d.version, "location": str(d.locate_file("")), "requires": d.requires or []}
except m.PackageNotFoundError:
    t = None
print(json.dumps({"python": list(sys.version_info[:2]), "purelib": sysconfig.get_path("purelib"),
                  "torch": t}))
"""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its version, its site folder and the requirements it declares."""

    version: str
    location: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """The virtual environment of one checkout."""

    root: Path

    @property
    def path(self) -> Path:
        """Folder of the virtual environment."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """The variables of this process, changed so that the environment's programs come first."""
        variables = dict(os.environ)
        variables.pop("PYTHONHOME", None)
        variables["VIRTUAL_ENV"] = str(self.path)
        variables["PATH"] = f"{self.path / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
        return variables


@dataclass(frozen=True)
class _Probe:
    """What the environment's interpreter says about itself."""

    python: tuple[int, int]
    purelib: str
    torch: Torch | None


@dataclass(frozen=True)
class _Stamp:
    """What was installed: a digest of everything that decides it, and torch's version."""

    digest: str
    torch: str


def prepare(root: Path, *, again: bool = False) -> Environment:
    """Make the environment of ``root`` or bring it up to date.

    Does nothing, in well under two seconds, when nothing that decides the installation changed.

    Args:
        root: The repository's root.
        again: Install even if nothing changed.

    Raises:
        DevError: Python is too old or incomplete, or an installation step failed.
    """
    environment = Environment(root)
    stamp_path = environment.path / "dev-stamp.json"
    digest = _digest(root)
    if not again and environment.python.exists() and stamp_path.is_file():
        torch = _probe(environment).torch
        if torch and stamp_path.read_text() == json.dumps(asdict(_Stamp(digest, torch.version))):
            return environment
    _create(environment)
    _install(environment)
    torch = _probe(environment).torch
    stamp_path.write_text(json.dumps(asdict(_Stamp(digest, torch.version if torch else ""))))
    return environment


def in_range(version: str, specifier: str) -> bool:
    """Whether a version lies in a range ``>=A,<B`` of plain release numbers.

    Raises:
        DevError: The range has another form.
    """
    match = re.fullmatch(r">=([\d.]+),<([\d.]+)", specifier)
    if match is None:
        raise DevError(f"torch's range {specifier!r} must have the form >=A,<B")
    return _release(match[1]) <= _release(version) < _release(match[2])


def effective_constraints(pins: str, kept: Torch | None) -> str:
    """The pins to install with: without those of a kept torch and of what that torch needs."""
    if kept is None:
        return pins
    names = {_name(requirement) for requirement in kept.requires} | {"torch"}
    lines = [line for line in pins.splitlines() if _name(line) not in names]
    return "\n".join([*lines, f"torch=={kept.version}", ""])


def _release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without trailing zeros: 2.10.0+cpu gives (2, 10)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _name(requirement: str) -> str:
    """The normalised name at the start of a requirement; empty for a comment or a blank line."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _decisive_files(root: Path) -> Iterator[Path]:
    """Everything whose change calls for a new installation."""
    yield root / "constraints" / "dev.txt"
    yield root / "tools" / "requirements-dev.txt"
    yield from sorted(root.glob("packages/*/pyproject.toml"))
    yield from sorted(root.glob("packages/*/src/*/_version.py"))
    for name in _NATIVE_PACKAGES:
        package = root / "packages" / name
        yield package / "CMakeLists.txt"
        yield from sorted(path for path in package.glob("csrc/**/*") if path.is_file())


def _digest(root: Path) -> str:
    # An editable installation holds absolute paths, so a moved checkout is another one.
    digest = hashlib.sha256(str(root).encode())
    for path in _decisive_files(root):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DevError(
                f"{path} cannot be read ({error.strerror}): run from a full checkout"
            ) from error
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _create(environment: Environment) -> None:
    """Make the virtual environment unless it is there."""
    if environment.python.exists():
        return
    if sys.version_info < MIN_PYTHON:
        raise DevError(
            f"Python {sys.version.split()[0]} at {sys.executable} is too old: "
            "run dev.py with Python 3.10 or newer"
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise DevError(
            f"this Python cannot make virtual environments: install its venv module, on Debian "
            f"and Ubuntu with `apt-get install python{version}-venv`"
        )
    print(f"==> setup: a new environment in {environment.path}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(environment.path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise DevError(
            f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}\n"
            "On Debian and Ubuntu `apt-get install python3-venv` brings what it needs."
        )


def _install(environment: Environment) -> None:
    """Install the tools and all packages in place, keeping a torch that is there."""
    root = environment.root
    probe = _probe(environment)
    pins = (root / "constraints" / "dev.txt").read_text(encoding="utf-8")
    kept = _torch_to_keep(environment, probe, _pinned_torch(pins))
    constraints = environment.path / "dev-constraints.txt"
    constraints.write_text(effective_constraints(pins, kept), encoding="utf-8")
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--constraint", str(constraints)]
    packages = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    in_place = [argument for path in packages for argument in ("--editable", str(path))]
    log = environment.path / "dev-setup.log"
    log.unlink(missing_ok=True)
    print(f"==> setup: installing into {environment.path}, messages in {log.name}", flush=True)
    for step in (
        Step(
            "tools and dependencies",
            [*pip, "--requirement", str(root / "tools" / "requirements-dev.txt")],
        ),
        Step(f"{len(packages)} packages in place", [*pip, "--no-build-isolation", *in_place]),
    ):
        run_logged(step, cwd=root, env=environment.variables(), log=log)


def _torch_to_keep(environment: Environment, probe: _Probe, pin: str) -> Torch | None:
    """A torch that is there and is not the pinned one, made visible in the environment."""
    specifier = _torch_range(environment.root)
    if probe.torch is not None and in_range(probe.torch.version, specifier):
        if _release(probe.torch.version) == _release(pin):
            return None
        print(f"    keeping torch {probe.torch.version} of {environment.path}", flush=True)
        return probe.torch
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if not in_range(distribution.version, specifier) or probe.python != sys.version_info[:2]:
        return None
    location = str(distribution.locate_file(""))
    # Works for a Python that is itself a virtual environment too, which
    # `venv --system-site-packages` would look past.
    Path(probe.purelib, "kept-torch.pth").write_text(f"{location}\n", encoding="utf-8")
    print(f"    keeping torch {distribution.version} of {location}", flush=True)
    return Torch(distribution.version, location, tuple(distribution.requires or ()))


def _pinned_torch(pins: str) -> str:
    """The version of torch that the constraints name."""
    match = re.search(r"^torch==(\S+)", pins, re.MULTILINE)
    if match is None:
        raise DevError("constraints/dev.txt: no line torch==VERSION")
    return match[1]


def _torch_range(root: Path) -> str:
    """Torch's range as ds-comm declares it."""
    path = root / "packages" / "ds-comm" / "pyproject.toml"
    match = re.search(r'"torch(>=[^"]+)"', path.read_text(encoding="utf-8"))
    if match is None:
        raise DevError(f"{path}: no dependency on torch with a range >=A,<B")
    return match[1]


def _probe(environment: Environment) -> _Probe:
    """Ask the environment's interpreter for its version, folder and torch."""
    command = [str(environment.python), "-c", _PROBE]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise DevError(
            f"{environment.python} does not run:\n{result.stderr}\n"
            f"Remove the folder {environment.path} and run the same command again."
        )
    answer = json.loads(result.stdout)
    torch = answer["torch"]
    return _Probe(
        python=(answer["python"][0], answer["python"][1]),
        purelib=answer["purelib"],
        torch=torch and Torch(torch["version"], torch["location"], tuple(torch["requires"])),
    )
