"""What `ds report` shows of ds-kernels (entry-point group ``ds.report``)."""

from __future__ import annotations

from typing import Any

from ds_kernels.native import build_info, cpu_level, cpu_level_in_use, native_status
from ds_kernels.ops import all_ops
from ds_kernels.registry import BACKENDS, Op

__all__ = ["op_rows", "rows"]


def rows() -> list[tuple[str, str, str]]:
    """Return ``(item, status, detail)`` rows: the native module, then every op.

    Starts nothing and touches no accelerator.
    """
    return [*_module_rows(), *op_rows()]


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
    return [(f"ds-kernels op {op.name}", *_op(op)) for op in all_ops()]


def _op(op: Op[Any, Any]) -> tuple[str, str]:
    present: list[str] = []
    reasons: list[str] = []
    for backend in BACKENDS:
        reason = op.missing_reason(backend) or op.unproven(backend)
        if reason:
            reasons.append(f"{backend}: {reason}")
        else:
            present.append(backend)
    return ", ".join(present), "; ".join(reasons)
