"""Reads a configuration document: a mapping, a JSON file with comments, or base64 JSON text."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ds_comm.config.report import join_path
from ds_comm.config.scanner import plain_json
from ds_comm.errors import ConfigError

__all__ = ["load_document", "parse_document"]


class _Pairs(list[tuple[str, Any]]):
    """The members of one JSON object in file order, duplicates included."""


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"{name} is not a JSON value; write a finite number or null")


def _children(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, _Pairs):
        for key, child in value:
            yield join_path(path, key), child
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield f"{path}[{index}]", child


def _duplicates(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, _Pairs):
        counts: dict[str, int] = {}
        for key, _ in value:
            counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            if count > 1:
                yield f"{join_path(path, key)}: given {count} times"
    for child_path, child in _children(value, path):
        yield from _duplicates(child, child_path)


def _to_plain(value: object) -> Any:
    if isinstance(value, _Pairs):
        return {key: _to_plain(child) for key, child in value}
    if isinstance(value, list):
        return [_to_plain(child) for child in value]
    return value


def parse_document(text: str, *, source: str = "the configuration") -> dict[str, Any]:
    """Parses JSON text in which comments and trailing commas are allowed.

    Args:
        text: The document; its top level must be an object.
        source: How to name the text in errors, such as its path.

    Returns:
        The top-level object.

    Raises:
        ConfigError: Broken JSON (with line and column), a top level that is not an object, or
            duplicate keys at any depth (all of them, with their paths, in one error).
    """
    try:
        raw = json.loads(
            plain_json(text), object_pairs_hook=_Pairs, parse_constant=_refuse_constant
        )
        repeated = list(dict.fromkeys(_duplicates(raw)))
    except json.JSONDecodeError as error:
        where = f"{source}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {error.msg}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValueError as error:  # an integer literal of thousands of digits
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be a configuration") from None
    if repeated:
        lines = "\n  ".join(repeated)
        raise ConfigError(f"{source}: duplicate keys; keep one of each:\n  {lines}")
    if not isinstance(raw, _Pairs):
        raise ConfigError(f"{source}: the top level must be an object {{...}}, not {_kind_of(raw)}")
    plain: dict[str, Any] = _to_plain(raw)
    return plain


def _kind_of(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _copy(value: object, path: str, bad_keys: list[str]) -> Any:
    """Copies mappings and sequences into dicts and lists, so that nobody shares state with us."""
    if isinstance(value, Mapping):
        copied: dict[str, Any] = {}
        for key, child in value.items():
            if not isinstance(key, str):
                bad_keys.append(f"{path or 'top level'}: key {key!r} is not a string")
                continue
            copied[key] = _copy(child, join_path(path, key), bad_keys)
        return copied
    if isinstance(value, list | tuple):
        return [_copy(child, f"{path}[{i}]", bad_keys) for i, child in enumerate(value)]
    return value


def _from_mapping(config: Mapping[Any, Any]) -> dict[str, Any]:
    bad_keys: list[str] = []
    try:
        document: dict[str, Any] = _copy(config, "", bad_keys)
    except RecursionError:
        raise ConfigError("the configuration contains itself or is nested too deeply") from None
    if bad_keys:
        raise ConfigError("every key must be a string:\n  " + "\n  ".join(bad_keys))
    return document


def _from_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give the path of a JSON file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_document(text, source=str(path))


def _from_base64(text: str) -> dict[str, Any] | None:
    """The document, or ``None`` when `text` is no base64 of something that looks like JSON."""
    try:
        padded = text + "=" * (-len(text) % 4)
        decoded = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        json_text = decoded.decode("utf-8-sig")
    except (binascii.Error, UnicodeError):
        return None
    if not json_text.lstrip().startswith(("{", "[", "/", "#")):
        return None
    return parse_document(json_text, source="the base64 text")


def load_document(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a configuration from wherever the user keeps it. Not collective.

    Args:
        config: A mapping (copied, never changed), the path of a JSON file in which ``//``, ``#``
            and ``/* */`` comments and trailing commas are allowed, or the same JSON as
            url-safe base64 text. An existing path wins over base64.

    Returns:
        A fresh dictionary.

    Raises:
        ConfigError: The file is missing, a directory, unreadable or not JSON; the top level is
            not an object; or keys are repeated (all of them, with their paths, in one error).
    """
    if isinstance(config, Mapping):
        return _from_mapping(config)
    if isinstance(config, os.PathLike):
        return _from_file(Path(config))
    if not isinstance(config, str):
        raise ConfigError(
            "the configuration must be a mapping, a path or base64 JSON text, "
            f"not {type(config).__name__}"
        )
    if config.lstrip().startswith("{"):
        raise ConfigError(
            "the configuration is JSON text; give a mapping (json.loads), a path or base64 of it"
        )
    if os.path.exists(config):
        return _from_file(Path(config))
    document = _from_base64(config)
    if document is None:
        shown = config if len(config) <= 200 else f"{config[:200]}..."
        raise ConfigError(f"{shown!r}: no such file, and not base64 JSON text either")
    return document
