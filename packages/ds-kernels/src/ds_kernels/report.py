"""What `ds report` shows of ds-kernels (entry-point group ``ds.report``)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ds_kernels.native import build_info, cpu_level, cpu_level_in_use, native_status

if TYPE_CHECKING:
    from ds_kernels.registry import Op

__all__ = ["op_rows", "rows"]

_TIMEOUT_S = 120


def rows() -> list[tuple[str, str, str]]:
    """Return ``(item, status, detail)`` rows: the native module, then every op.

    Touches no accelerator.  The ops need torch, which is imported in a process of its own: a report
    must come out also where torch is broken.
    """
    return [*_module_rows(), *_rows_of_ops()]


def _rows_of_ops() -> list[tuple[str, str, str]]:
    """The rows of :func:`op_rows`, asked in another process."""
    command = [sys.executable, "-m", "ds_kernels.report"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [("ds-kernels ops", "broken", str(error))]
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return [("ds-kernels ops", "broken", said[-1])]
    return [(item, status, detail) for item, status, detail in json.loads(done.stdout)]


def _module_rows() -> list[tuple[str, str, str]]:
    status = native_status()
    if not status.available:
        return [("ds-kernels", "missing", status.reason)]
    info = build_info()
    level = f"in use: {cpu_level_in_use()}"
    cuda = f"CUDA {info.cuda_version} for {info.cuda_architectures}" if info.cuda_version else ""
    return [
        (
            "ds-kernels",
            "available",
            f"{info.compiler} {info.compiler_version} {info.flags}".strip(),
        ),
        ("ds-kernels cpu level", cpu_level(), f"asked from the CPU; {level}"),
        (
            "ds-kernels cuda",
            "available" if cuda else "missing",
            cuda or "built without CUDA",
        ),
    ]


def op_rows() -> list[tuple[str, str, str]]:
    """One row per op: the backends that run here, and for each other one the reason."""
    from ds_kernels.ops import all_ops

    return [(f"ds-kernels op {op.name}", *_op(op)) for op in all_ops()]


def _op(op: Op[Any, Any]) -> tuple[str, str]:
    from ds_kernels.registry import BACKENDS

    present: list[str] = []
    reasons: list[str] = []
    for backend in BACKENDS:
        reason = op.missing_reason(backend) or op.unproven(backend)
        if reason:
            reasons.append(f"{backend}: {reason}")
        else:
            present.append(backend)
    return ", ".join(present), "; ".join(reasons)


if __name__ == "__main__":
    json.dump(op_rows(), sys.stdout)
