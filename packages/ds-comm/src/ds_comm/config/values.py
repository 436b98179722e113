"""Values that need a word before validation: unresolved "auto" and booleans written as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ds_comm.config.report import ProblemKind, Report, join_path

__all__ = ["auto_paths", "is_auto", "read_flag", "report_auto", "shown"]

_FLAGS = {"true": True, "false": False}
_LONGEST = 100  # characters of a value in a message


def shown(value: object) -> str:
    """A value as its author wrote it, in JSON where it has a JSON form, and not too long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # a value of a Python mapping, or one that holds itself
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_auto(value: object) -> bool:
    """Whether a value asks whoever can to fill it in."""
    return isinstance(value, str) and value == "auto"


def auto_paths(value: object, path: str) -> Iterator[str]:
    """Paths of every ``"auto"`` in a free-form value."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from auto_paths(child, join_path(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from auto_paths(child, f"{path}[{index}]")
    elif is_auto(value):
        yield path


def report_auto(report: Report, path: str) -> None:
    """Records an ``"auto"`` that stays unresolved."""
    report.add(
        ProblemKind.AUTO,
        path,
        '"auto" cannot be resolved here; write a value, or let the trainer that you use fill it in',
    )


def read_flag(value: object, report: Report, path: str) -> object:
    """Turns the text "true" or "false" into a boolean with a notice; leaves all else alone."""
    if not isinstance(value, str) or value.strip().lower() not in _FLAGS:
        return value
    flag = _FLAGS[value.strip().lower()]
    report.notice(f'{path}: the text "{value}" was read as the boolean {str(flag).lower()}')
    return flag
