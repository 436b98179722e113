"""``ds report``: what is installed here and what the machine offers.

Nothing heavy is imported: versions come from the metadata of distributions. Packages with native
modules add rows through the entry-point group ``ds.report``, whose objects are called without
arguments and return ``(item, status, detail)`` tuples of texts.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ds_launch.errors import UsageError
from ds_launch.hardware import parse_cpuinfo, parse_meminfo, parse_nvidia_driver
from ds_launch.machine import accelerator_count, usable_cores
from ds_launch.options import Option, describe, parse

REPORT_GROUP = "ds.report"
SCHEMA = 1

DISTRIBUTIONS = (
    "ds-all",
    "ds-zero",
    "ds-pipe",
    "ds-moe",
    "ds-compress",
    "ds-inference",
    "ds-comm",
    "ds-kernels",
    "ds-aio",
    "ds-launch",
)
_OTHERS = ("torch", "numpy", "pydantic", "triton", "safetensors")
_TOOLS = (
    "c++",
    "g++",
    "clang++",
    "nvcc",
    "hipcc",
    "cmake",
    "ninja",
    "ssh",
    "pdsh",
    "mpirun",
    "srun",
)
_TOOL_TIMEOUT_S = 10.0

OPTIONS = (
    Option(("--json",), "print JSON"),
    Option(("--deep",), "also import torch (in a process of its own) and ask it"),
    Option(("--help", "-h"), "show this text"),
)

HELP = f"""\
usage: ds report [--json] [--deep]

Show the versions of all packages, the machine, compilers and tools, and native modules.

{describe(OPTIONS)}
"""

# Run in another process: this package imports no torch, and a broken one must not break the report.
_ASK_TORCH = """
import json, torch
rows = [("torch", torch.__version__, torch.__file__)]
rows.append(("built for CUDA", torch.version.cuda or "no", ""))
kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
count = torch.accelerator.device_count() if kind is not None else 0
rows.append(("accelerator", str(kind) if kind is not None else "none", f"{count} device(s)"))
rows.append(("threads", str(torch.get_num_threads()), ""))
print(json.dumps(rows))
"""


class Row(NamedTuple):
    """One line of the report.

    Attributes:
        item: What it is about.
        status: A version, a value, ``missing`` or the like.
        detail: Where it was found, or why it is missing.
    """

    item: str
    status: str
    detail: str = ""


Report = Mapping[str, Sequence[Row]]
"""Section name to its rows, in the order in which they are shown."""


def main(words: Sequence[str]) -> int:
    """Run ``ds report`` with these words and return its exit status."""
    values, rest = parse(words, OPTIONS, command="ds report")
    if rest:
        raise UsageError(f"ds report takes no arguments, not {rest[0]!r}")
    if "--help" in values:
        sys.stdout.write(HELP)
        return 0
    report = collect(deep="--deep" in values)
    sys.stdout.write(as_json(report) if "--json" in values else as_text(report))
    return 0


def collect(*, deep: bool = False) -> Report:
    """Gather the report.

    Args:
        deep: Whether torch is imported, in another process.
    """
    report = {
        "packages": package_rows(DISTRIBUTIONS),
        "libraries": package_rows(_OTHERS),
        "machine": machine_rows(),
        "tools": [tool_row(name) for name in _TOOLS],
        "native modules": native_rows(),
    }
    if deep:
        report["torch"] = torch_rows()
    return report


def as_json(report: Report) -> str:
    """Return the report as JSON: ``{"schema": 1, "sections": {name: [row object, ...]}}``."""
    sections = {name: [row._asdict() for row in rows] for name, rows in report.items()}
    return json.dumps({"schema": SCHEMA, "sections": sections}, indent=2) + "\n"


def as_text(report: Report) -> str:
    """Return the report as an aligned table."""
    rows = [row for section in report.values() for row in section]
    item_width = max((len(row.item) for row in rows), default=0)
    status_width = max((len(row.status) for row in rows if row.detail), default=0)
    lines = []
    for name, section in report.items():
        lines.append(name)
        for row in section:
            line = f"  {row.item:{item_width}}  {row.status:{status_width}}  {row.detail}"
            lines.append(line.rstrip())
    return "".join(f"{line}\n" for line in lines)


def package_rows(names: Iterable[str]) -> list[Row]:
    """Return a row per distribution: its version, or ``missing``.

    A package that is importable without being installed (a source tree on the path) is shown with
    the version in its ``_version.py``. Nothing is imported.
    """
    return [_package_row(name) for name in names]


def _package_row(name: str) -> Row:
    try:
        return Row(name, version(name))
    except PackageNotFoundError:
        spec = find_spec(name.replace("-", "_"))
    if spec is None or spec.origin is None:
        return Row(name, "missing", f"pip install {name}" if name in DISTRIBUTIONS else "")
    folder = Path(spec.origin).parent
    version_file = folder / "_version.py"
    match = None
    if version_file.is_file():
        match = re.search(r'__version__ = "([^"]+)"', version_file.read_text(encoding="utf-8"))
    return Row(name, match[1] if match else "unknown", f"source tree, not installed: {folder}")


def machine_rows() -> list[Row]:
    """Return rows on Python, CPU, memory and accelerators."""
    cpu = parse_cpuinfo(_read("/proc/cpuinfo"))
    memory = parse_meminfo(_read("/proc/meminfo"))
    driver = parse_nvidia_driver(_read("/proc/driver/nvidia/version"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    rows = [
        Row("python", platform.python_version(), sys.executable),
        Row("system", platform.release(), platform.platform()),
        Row("cpu", cpu.level or platform.machine(), " ".join((cpu.model, *cpu.extras)).strip()),
        Row("cores", str(usable_cores()), f"usable of {os.cpu_count()}"),
        Row(
            "memory", _gib(memory.get("MemTotal")), f"{_gib(memory.get('MemAvailable'))} available"
        ),
    ]
    if limit.isdecimal():
        rows.append(Row("memory limit", _gib(int(limit)), "of this container"))
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm")
        rows.append(Row("shared memory", _gib(shared.total), f"{_gib(shared.free)} free, /dev/shm"))
    rows.append(Row("nvidia driver", driver or "missing"))
    rows.append(Row("accelerators", str(accelerator_count(os.environ)), "that ds run would use"))
    return rows


def tool_row(name: str) -> Row:
    """Return a program's version and path, or ``missing``."""
    path = shutil.which(name)
    if path is None:
        return Row(name, "missing")
    # OpenSSH has no --version; everything else here has.
    flag = "-V" if name in ("ssh", "pdsh") else "--version"
    try:
        done = subprocess.run(
            [path, flag],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TOOL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row(name, "broken", f"{path}: {error}")
    output = done.stdout.decode("utf-8", "replace")
    match = re.search(r"\d+\.\d+(?:\.\d+|p\d+)?", output)
    return Row(name, match[0] if match else "unknown version", path)


def native_rows() -> list[Row]:
    """Return what installed packages say of their native modules."""
    rows: list[Row] = []
    for entry in sorted(entry_points(group=REPORT_GROUP), key=lambda entry: entry.name):
        # The report is for finding out what is broken, so whatever a package's own report stumbles
        # over becomes a row.
        try:
            reporter: Callable[[], Iterable[tuple[str, str, str]]] = entry.load()
            rows.extend(Row(*row) for row in reporter())
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError, TypeError) as error:
            rows.append(Row(entry.name, "broken", f"{type(error).__name__}: {error}"))
    return rows


def torch_rows() -> list[Row]:
    """Return what torch says of itself, asked in another process."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return [Row("torch", "broken", reason)]
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def _read(path: str) -> str:
    """Return a text file of the kernel, ``""`` where it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
