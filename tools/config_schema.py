"""The configuration schema as rows of text, for the reference page."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic.fields import FieldInfo

from ds_comm.config import Auto, DTypeName, NoEffect, NotYet, Section
from ds_comm.config.section import field_keys, marker_of, section_type

__all__ = ["KeyRow", "key_rows", "summary_of"]

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "object"}
_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES = '"fp32", "bf16" or "fp16"'


@dataclass(frozen=True)
class KeyRow:
    """One key of a section."""

    key: str
    """The key in the document."""
    kind: str
    """Which values it takes."""
    default: str
    """Its default as JSON, or "required"."""
    meaning: str
    """Its docstring on one line."""
    status: str
    """Whether it is used, changes nothing, or is not available yet."""
    section: type[Section] | None
    """The section that it holds, if it holds one."""


def summary_of(section: type[Section]) -> str:
    """What a section is for: the first paragraph of its docstring."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


def key_rows(section: type[Section]) -> Iterator[KeyRow]:
    """The keys of a section in the order of their definition."""
    meanings = _docstrings(section)
    hints = get_type_hints(section, include_extras=True)
    for key, (name, field) in field_keys(section).items():
        kind = _kind(hints[name])
        if marker_of(field, Auto) is not None:
            kind += ', or "auto"'
        yield KeyRow(
            key=key,
            kind=kind,
            default=_default(field, kind),
            meaning=meanings[name],
            status=_status(section, key, field),
            section=section_type(field),
        )


def _docstrings(section: type[Section]) -> dict[str, str]:
    """The string under each field; a field without one is an error of its author."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if not issubclass(cls, Section) or cls is Section:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def _kind(hint: Any) -> str:
    """Which values an annotation takes, in words."""
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        if get_args(DTypeName)[1] in extras:
            return _DTYPES
        bounds = [_bound(mark) for extra in extras for mark in _marks(extra)]
        return " ".join([_kind(base), *filter(None, bounds)])
    if get_origin(hint) is Union or isinstance(hint, type(int | None)):
        kinds = [_kind(member) for member in get_args(hint) if member is not type(None)]
        return " or ".join([*kinds, "null"])
    if get_origin(hint) is Literal:
        return " or ".join(json.dumps(value) for value in get_args(hint))
    if get_origin(hint) is tuple:
        return "list of texts"
    if isinstance(hint, type) and issubclass(hint, Section):
        return "object"
    return _WORDS[get_origin(hint) or hint]


def _marks(extra: object) -> list[object]:
    return list(extra.metadata) if isinstance(extra, FieldInfo) else [extra]


def _bound(mark: object) -> str:
    if isinstance(mark, annotated_types.Ge):
        return f"≥ {mark.ge}"
    if isinstance(mark, annotated_types.Gt):
        return f"> {mark.gt}"
    if isinstance(mark, annotated_types.Le):
        return f"≤ {mark.le}"
    return ""


def _default(field: FieldInfo, kind: str) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:  # an object with its own defaults
        return "{}"
    if field.default == sys.maxsize:
        return "no limit"
    if kind.startswith(_DTYPES) and field.default is not None:
        return json.dumps(_SHORT_DTYPES[field.default])
    return json.dumps(field.default)


def _status(section: type[Section], key: str, field: FieldInfo) -> str:
    not_yet, no_effect = marker_of(field, NotYet), marker_of(field, NoEffect)
    if not_yet is not None:
        when = f" with `{not_yet.switch}`" if not_yet.switch else ""
        return f"not available yet, only the default is accepted{when}: {not_yet.instead}"
    if no_effect is not None:
        return f"accepted, changes nothing: {no_effect.because}"
    if section_type(field) is not None:
        return "see its own table"
    if section.key_rules.switch not in ("", key):
        return f"checked, and used when `{section.key_rules.switch}` is on"
    return "used"
