"""What `ds report` shows of ds-kernels (entry-point group ``ds.report``)."""

from __future__ import annotations

from ds_kernels.native import build_info, cpu_level, native_status


def rows() -> list[tuple[str, str, str]]:
    """Return ``(item, status, detail)`` rows: whether the native module is usable, and how built.

    Starts nothing and touches no accelerator.
    """
    status = native_status()
    if not status.available:
        return [("ds-kernels", "missing", status.reason)]
    info = build_info()
    return [
        (
            "ds-kernels",
            "available",
            f"{info.compiler} {info.compiler_version} {info.flags}".strip(),
        ),
        ("ds-kernels cpu level", cpu_level(), "asked from the CPU"),
    ]
