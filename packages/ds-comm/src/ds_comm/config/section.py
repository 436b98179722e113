"""The base of every configuration section."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from ds_comm.config.report import join_path
from ds_comm.config.rules import Contradiction, KeyRules, NotYet
from ds_comm.config.values import shown

__all__ = [
    "DEFERRED",
    "Section",
    "bare_types",
    "field_keys",
    "key_paths",
    "marker_of",
    "section_type",
    "unavailable_values",
]

DEFERRED = "the reader gathers complaints itself"
"""Validation context under which a section leaves `complaints` to whoever reads the document."""

_Marker = TypeVar("_Marker")


def bare_types(annotation: Any) -> frozenset[Any]:
    """The types in an annotation without ``Annotated`` and unions around them."""
    if get_origin(annotation) is Annotated:
        return bare_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = (bare_types(member) for member in get_args(annotation))
        return frozenset().union(*members)
    return frozenset([annotation])


def marker_of(field: FieldInfo, kind: type[_Marker]) -> _Marker | None:
    """The marker of the given kind on a field, if any."""
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)


def field_keys(section: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Field name and description by the key that stands for it in a document."""
    return {field.alias or name: (name, field) for name, field in section.model_fields.items()}


def section_type(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or ``None`` for a field with a plain value."""
    for kind in bare_types(field.annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def key_paths(section: type[Section]) -> Mapping[str, tuple[str, ...]]:
    """All dotted paths of a schema by their last key."""
    found: dict[str, list[str]] = {}

    def visit(current: type[Section], path: str) -> None:
        for key, (_, field) in field_keys(current).items():
            full = join_path(path, key)
            found.setdefault(key, []).append(full)
            inner = section_type(field)
            if inner is not None:
                visit(inner, full)

    visit(section, "")
    return {key: tuple(paths) for key, paths in found.items()}


class Section(BaseModel):
    """A frozen part of the configuration, handed as an object to the component that reads it.

    ``ds_comm.config.build`` reads one from a document with all problems in one report.  Creating
    one in Python, ``MySection(field=value)``, checks the same types and contradictions but raises
    pydantic's ``ValidationError`` (a ``ValueError``) and knows neither old keys nor ``"auto"``.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        # Schemas are compiled when first used: importing a package must stay cheap.
        defer_build=True,
    )

    key_rules: ClassVar[KeyRules] = KeyRules()
    """Old, removed and absent keys of the section."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Values that do not go together; overridden by sections that have such rules."""
        return iter(())

    @model_validator(mode="after")
    def _refuse_complaints(self, info: ValidationInfo) -> Section:
        if info.context is DEFERRED:
            return self
        complaints = [f"{key}: {message}" for key, message in unavailable_values(self)]
        complaints += [f"{c.path}: {c.message}" for c in self.contradictions()]
        if complaints:
            raise ValueError("; ".join(complaints))
        return self


def unavailable_values(section: Section) -> Iterator[tuple[str, str]]:
    """Values that ask for a feature that is not available yet.

    Args:
        section: A validated section.

    Yields:
        The key relative to the section, and the message.
    """
    for key, (name, field) in field_keys(type(section)).items():
        marker = marker_of(field, NotYet)
        if marker is None or (marker.switch and not section.__dict__[marker.switch]):
            continue
        value = section.__dict__[name]
        if value != field.default and value not in marker.also:
            message = f"{shown(value)} is not available yet in this version; {marker.instead}"
            yield key, message
