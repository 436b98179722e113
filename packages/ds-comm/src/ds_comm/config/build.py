"""Reads a section out of a document, with every problem of the document in one report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ds_comm.config.report import ProblemKind, Report, join_path
from ds_comm.config.rewrite import rewrite_old_forms, settle_absent_blocks
from ds_comm.config.rules import Auto, NoEffect
from ds_comm.config.section import (
    DEFERRED,
    Section,
    bare_types,
    field_keys,
    key_paths,
    marker_of,
    section_type,
    unavailable_values,
)
from ds_comm.config.suggest import report_unknown
from ds_comm.config.values import auto_paths, is_auto, read_flag, report_auto, shown

__all__ = ["build", "collect"]

_S = TypeVar("_S", bound=Section)
_WORDING = (
    ("Value error, ", ""),
    ("Input should be", "must be"),
    ("a valid boolean", "true or false"),
    ("a valid string", "text"),
    ("a valid dictionary", "an object {...}"),
)


def build(section_cls: type[_S], data: Mapping[str, Any], *, where: str = "") -> _S:
    """Reads a section, or raises one error with everything that is wrong in it. Not collective.

    Old keys are mapped with one warning each, ``"auto"`` is resolved where the section says so,
    and one more warning lists the accepted keys that change nothing.

    Args:
        section_cls: The section to read.
        data: The object of the document, as from ``load_document``.
        where: Dotted path of the object within the document, "" for the whole of it.

    Returns:
        The section.

    Raises:
        ConfigReportError: A ``ConfigError`` with a line for each unknown, old, unavailable or
            malformed key, unresolved ``"auto"`` and contradiction, at every depth.
    """
    report = Report()
    section = collect(section_cls, data, report, path=where)
    report.finish()
    if section is None:
        raise AssertionError("a section that cannot be formed leaves a problem in the report")
    return section


def collect(section_cls: type[_S], data: object, report: Report, *, path: str = "") -> _S | None:
    """Reads a section as far as it can be read and adds what is wrong to a report.

    Args:
        section_cls: The section to read.
        data: Its object in the document.
        report: Where problems and notices go; the caller calls ``report.finish()``.
        path: Dotted path of the object within the document.

    Returns:
        The section, in which malformed values have their defaults; ``None`` if it cannot be
        formed. To be used only for further checks when the report has problems.
    """
    if not isinstance(data, Mapping):
        report.add(
            ProblemKind.MALFORMED, path, f"an object {{...}} is expected, given {shown(data)}"
        )
        return None
    if not report.known_paths and not path:
        report.known_paths = key_paths(section_cls)
    values = dict(data)
    rewrite_old_forms(section_cls, values, report, path)
    settle_absent_blocks(section_cls, values, report, path)
    fields = field_keys(section_cls)
    blocks = [rule.key for rule in section_cls.key_rules.pending]
    blocks += [foreign.key for foreign in section_cls.key_rules.elsewhere]
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            report_unknown(report, path, key, [*fields, *blocks])
            continue
        read, usable = _read_value(fields[key][1], value, report, join_path(path, key))
        if usable:
            kept[key] = read
    section = _validate(section_cls, kept, report, path)
    if section is not None:
        _report_complaints(section, report, path)
    return section


def _read_value(field: FieldInfo, value: object, report: Report, path: str) -> tuple[Any, bool]:
    """The value to validate, and whether there is one."""
    if marker_of(field, NoEffect) is not None:
        report.without_effect.append(path)
    if is_auto(value):
        if marker_of(field, Auto) is None:
            report_auto(report, path)
        return None, False
    inner = section_type(field)
    if inner is not None:
        if value is None and type(None) in bare_types(field.annotation):
            return None, True
        section = collect(inner, value, report, path=path)
        return section, section is not None
    for auto_path in auto_paths(value, path):  # inside free-form values, which are kept
        report_auto(report, auto_path)
    is_flag = bool in bare_types(field.annotation)
    return read_flag(value, report, path) if is_flag else value, True


def _location(path: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        path = f"{path}[{part}]" if isinstance(part, int) else join_path(path, part)
    return path


def _validate(section_cls: type[_S], kept: dict[str, Any], report: Report, path: str) -> _S | None:
    """Validates twice: the second time without the malformed values, for the later checks."""
    try:
        return section_cls.model_validate(kept, context=DEFERRED)
    except ValidationError as error:
        malformed = error.errors(include_url=False)
    for problem in malformed:
        location = problem["loc"]
        full = _location(path, location)
        if problem["type"] == "missing":
            # An "auto" or a misspelt key already says so.
            if not report.is_unusable(full):
                report.add(ProblemKind.MALFORMED, full, "a value is required")
        else:
            text = problem["msg"]
            for pydantic_words, our_words in _WORDING:
                text = text.replace(pydantic_words, our_words)
            given = shown(problem["input"])
            report.add(ProblemKind.MALFORMED, full, f"{text}, given {given}")
        kept.pop(str(location[0]), None)
    try:
        return section_cls.model_validate(kept, context=DEFERRED)
    except ValidationError:
        return None


def _report_complaints(section: Section, report: Report, path: str) -> None:
    for key, message in unavailable_values(section):
        report.add(ProblemKind.UNAVAILABLE, join_path(path, key), message)
    for found in section.contradictions():
        if not any(report.is_unusable(join_path(path, key)) for key in found.involves):
            report.add(found.kind, join_path(path, found.path), found.message)
