"""What `ds report` shows of ds-aio (entry-point group ``ds.report``)."""

from __future__ import annotations

from ds_aio.native import build_info, native_status


def rows() -> list[tuple[str, str, str]]:
    """Return ``(item, status, detail)`` rows: is the native module usable, how was it built."""
    status = native_status()
    if not status.available:
        return [("ds-aio", "missing", status.reason)]
    info = build_info()
    headers = {
        "io_uring": info.io_uring_headers,
        "liburing": info.liburing_headers,
        "libaio": info.libaio_headers,
    }
    found = ", ".join(name for name, present in headers.items() if present) or "none"
    return [
        ("ds-aio", "available", f"{info.compiler} {info.compiler_version} {info.flags}".strip()),
        ("ds-aio headers", found, "found when it was compiled"),
    ]
