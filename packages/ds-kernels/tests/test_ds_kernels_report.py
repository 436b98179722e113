"""The rows of `ds report` say the same as native_status()."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_kernels import NativeStatus, native_status, report


def test_first_row_is_the_native_module() -> None:
    item, status, detail = report.rows()[0]
    assert item == "ds-kernels"
    assert status == ("available" if native_status().available else "missing")
    assert detail


def test_missing_module_shows_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeStatus(available=False, reason="no compiler")
    monkeypatch.setattr(report, "native_status", lambda: missing)
    assert report.rows()[0] == ("ds-kernels", "missing", "no compiler")


def test_every_op_has_a_row_with_its_backends_and_reasons() -> None:
    rows = {item.removeprefix("ds-kernels op "): rest for item, *rest in report.op_rows()}
    backends, reasons = rows["adam_"]
    assert "reference" in backends.split(", ")
    assert ("cpu" in backends.split(", ")) is native_status().available
    assert "triton: the op has no such version" in reasons
    assert "cuda: " in reasons, "no GPU result of this source is recorded yet"


def test_a_torch_that_does_not_import_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    rows = report.rows()
    assert rows[0][0] == "ds-kernels"
    assert rows[-1] == ("ds-kernels ops", "broken", "torch is broken")
