"""The rows of `ds report` say the same as native_status()."""

from __future__ import annotations

import pytest

from ds_aio import NativeStatus, native_status, report


def test_first_row_is_the_native_module() -> None:
    item, status, detail = report.rows()[0]
    assert item == "ds-aio"
    assert status == ("available" if native_status().available else "missing")
    assert detail


def test_missing_module_shows_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeStatus(available=False, reason="no compiler")
    monkeypatch.setattr(report, "native_status", lambda: missing)
    assert report.rows() == [("ds-aio", "missing", "no compiler")]
