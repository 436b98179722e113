"""The committed configuration reference is what the schema says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ds_all.config", reason="the reference covers ds_all, which is not installed")

import gen_config_reference
from config_schema import key_rows
from ds_zero.config import EngineConfig, ZeroSection


def test_the_page_is_current() -> None:
    assert gen_config_reference.main(["--check"]) == 0, (
        "run python tools/gen_config_reference.py and commit docs/config.md"
    )


def test_a_stale_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "config.md"
    monkeypatch.setattr(gen_config_reference, "PAGE", page)
    assert gen_config_reference.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert gen_config_reference.main([]) == 0
    assert gen_config_reference.main(["--check"]) == 0
    page.write_text(page.read_text() + "x")
    assert gen_config_reference.main(["--check"]) == 1


def test_rows() -> None:
    rows = {row.key: row for row in key_rows(ZeroSection)}
    prefetch = rows["stage3_prefetch_bucket_size"]
    assert prefetch.kind == 'whole number ≥ 0, or "auto"'
    assert prefetch.default == "50000000"
    assert prefetch.status == "used"
    assert prefetch.meaning.startswith("Elements that may be gathered ahead")
    assert rows["stage3_model_persistence_threshold"].default == "no limit"
    assert rows["zero_quantized_weights"].status.startswith("not available yet")
    assert rows["contiguous_gradients"].status.startswith("accepted, changes nothing")
    top = {row.key: row for row in key_rows(EngineConfig)}
    assert top["communication_data_type"].kind == '"fp32", "bf16" or "fp16" or null'
    assert top["zero_optimization"].section is ZeroSection


def test_every_key_has_a_meaning() -> None:
    assert all(row.meaning for row in key_rows(EngineConfig))
