"""Reading a document from a mapping, a file or base64 text, and refusing broken ones."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ds_comm.config import load_document, parse_document
from ds_comm.errors import ConfigError

DOCUMENT = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}}}


def test_a_mapping_is_copied() -> None:
    inner = {"stage": 1}
    source = MappingProxyType({"zero_optimization": inner, "list": (1, {"a": 2})})
    document = load_document(source)
    document["zero_optimization"]["stage"] = 3
    assert inner == {"stage": 1}
    assert document["list"] == [1, {"a": 2}]


def test_a_file_given_as_path_or_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("\ufeff// comment\n" + json.dumps(DOCUMENT)[:-1] + ",}", encoding="utf-8")
    assert load_document(path) == DOCUMENT
    assert load_document(str(path)) == DOCUMENT


@pytest.mark.parametrize("strip", [False, True])
def test_urlsafe_base64(strip: bool) -> None:
    document = {**DOCUMENT, "text": "ÿ?>~ÿ?>~"}  # makes the encoder use - and _
    encoded = base64.urlsafe_b64encode(json.dumps(document, ensure_ascii=False).encode()).decode()
    assert set("-_") & set(encoded)
    assert load_document(encoded.rstrip("=") if strip else encoded) == document


def test_an_existing_path_wins_over_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    encoded = base64.urlsafe_b64encode(b'{"a": 1}').decode()
    Path(encoded).write_text('{"a": 2}')
    assert load_document(encoded) == {"a": 2}


# B05: one error that names all duplicates with their path.
@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('{"fp16": {"enabled": true}, "train_batch_size": 4, "fp16": {}}', ["fp16"]),
        (
            '{"train_batch_size": 4, "zero_optimization": {"stage": 1, "stage": 2}}',
            ["zero_optimization.stage"],
        ),
        (
            '{"a": 1, "a": 2, "a": 3, "l": [{"x": 1, "x": 1}], "b": {"c": {"d": 1, "d": 2}}}',
            ["a", "l[0].x", "b.c.d"],
        ),
        # A duplicate inside a duplicate: both are named, also in the value that would be lost.
        ('{"a": {"b": 1, "b": 2}, "a": {}}', ["a", "a.b"]),
    ],
)
def test_duplicate_keys(text: str, paths: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for config in (path, encoded):
        with pytest.raises(ConfigError, match="duplicate keys") as caught:
            load_document(config)
        named = [line.strip().split(":")[0] for line in str(caught.value).split("\n")[1:]]
        assert named == paths


def test_repetitions_are_counted() -> None:
    with pytest.raises(ConfigError, match="a: given 3 times"):
        parse_document('{"a": 1, "a": 2, "a": 3}')


def test_the_file_of_a_duplicate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": 1, "fp16": 2}')
    with pytest.raises(ConfigError, match="ds.json"):
        load_document(path)


def test_broken_json_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  // fine\n  "a": 1\n  "b": 2\n}')
    with pytest.raises(ConfigError, match=r"ds\.json, line 4, column 3: not valid JSON"):
        load_document(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "top level must be an object.*an array"),
        ("3", "a number"),
        ("null", "null"),
        ('"x"', "a string"),
        ("true", "true or false"),
        ("", "line 1, column 1"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": -Infinity}', "-Infinity is not a JSON value"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"a": ' + "[" * 200_000, "nested too deeply|not valid JSON"),
        ("{'a': 1}", "line 1, column 2"),
    ],
)
def test_hostile_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_document(text)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_document(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="no such file"):
        load_document(str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match="no such file"):
        load_document("ds_config")  # also valid base64, of bytes that are no JSON
    with pytest.raises(ConfigError, match="no such file"):
        load_document("")
    for directory in (tmp_path, str(tmp_path)):
        with pytest.raises(ConfigError, match="is a directory"):
            load_document(directory)


@pytest.mark.parametrize("text", ["a\0b", "x" * 100_000])
def test_text_that_can_be_no_path(text: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_document(text)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_document(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_document(path)


def test_json_text_is_explained() -> None:
    with pytest.raises(ConfigError, match="is JSON text"):
        load_document(' {"train_batch_size": 4}')


def test_broken_base64_json_is_reported_as_such() -> None:
    encoded = base64.urlsafe_b64encode(b'{"a": }').decode()
    with pytest.raises(ConfigError, match="base64 text, line 1, column 7"):
        load_document(encoded)


@pytest.mark.parametrize("config", [None, 3, ["a"], b"{}"])
def test_other_types(config: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping, a path or base64"):
        load_document(config)


def test_keys_that_are_not_text_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_document({1: 2, "a": {None: 3}})  # type: ignore[dict-item]
    assert "top level: key 1" in str(caught.value)
    assert "a: key None" in str(caught.value)


def test_a_mapping_that_contains_itself() -> None:
    config: dict[str, Any] = {}
    config["a"] = config
    with pytest.raises(ConfigError, match="contains itself"):
        load_document(config)
