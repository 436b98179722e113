"""First pass over an object: short forms, old keys, removed keys and blocks of other packages.

These functions change `values`, the reader's own copy, and leave only keys of the schema and
unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_comm.config.report import ProblemKind, Report, join_path
from ds_comm.config.rules import KeyTree, Pending, Renamed, switched_on
from ds_comm.config.section import Section
from ds_comm.config.suggest import report_unknown
from ds_comm.config.values import is_auto, read_flag, report_auto, shown

__all__ = ["rewrite_old_forms", "settle_absent_blocks"]


def rewrite_old_forms(
    section_cls: type[Section], values: dict[str, Any], report: Report, path: str
) -> None:
    """Expands short forms, maps old keys with a notice each and refuses removed keys."""
    for short in section_cls.key_rules.shorthands:
        value = values.get(short.key)
        if isinstance(value, short.kind):
            values[short.key] = short.convert(value)
            report.notice(
                f"{join_path(path, short.key)}: {shown(value)} is an old form of "
                f"{shown(values[short.key])}"
            )
    for renamed in section_cls.key_rules.renamed:
        if renamed.old in values:
            _rename(renamed, values, report, path)
    for removed in section_cls.key_rules.removed:
        if removed.key in values:
            del values[removed.key]
            full = join_path(path, removed.key)
            report.add(ProblemKind.REMOVED, full, f"not part of this toolkit; {removed.instead}")


def _rename(rule: Renamed, values: dict[str, Any], report: Report, path: str) -> None:
    old_path = join_path(path, rule.old)
    new_paths = " and ".join(join_path(path, target) for target in rule.new)
    value = values.pop(rule.old)
    taken = [join_path(path, target) for target in rule.new if _has(values, target)]
    if taken:
        message = f"an old name of {' and '.join(taken)}, which is given too; keep only the new one"
        report.add(ProblemKind.CONTRADICTION, old_path, message)
        return
    if is_auto(value):
        new_value = value
    else:
        try:
            new_value = rule.convert(value)
        except ValueError as error:
            report.add(ProblemKind.MALFORMED, old_path, f"{error}, given {shown(value)}")
            return
    report.notice(f"{old_path} is an old name; it was read as {new_paths} = {shown(new_value)}")
    for target in rule.new:
        _put(values, target.split("."), new_value)


def _has(values: Mapping[str, Any], target: str) -> bool:
    current: Any = values
    for key in target.split("."):
        if not isinstance(current, Mapping) or key not in current:
            return False
        current = current[key]
    return True


def _put(values: dict[str, Any], keys: list[str], value: object) -> None:
    """Sets a nested key, copying the objects on the way; a malformed one is left to be refused."""
    first, *rest = keys
    if not rest:
        values[first] = value
        return
    inner = values.get(first)
    if inner is None or isinstance(inner, Mapping):
        copied = dict(inner or {})
        _put(copied, rest, value)
        values[first] = copied


def settle_absent_blocks(
    section_cls: type[Section], values: dict[str, Any], report: Report, path: str
) -> None:
    """Refuses keys of other packages and blocks that are on without their feature being here."""
    for foreign in section_cls.key_rules.elsewhere:
        if foreign.key in values:
            del values[foreign.key]
            message = f"belongs to {foreign.owner} and is not read here; {foreign.reader}"
            report.add(ProblemKind.UNAVAILABLE, join_path(path, foreign.key), message)
    for rule in section_cls.key_rules.pending:
        if rule.key in values:
            _settle_pending(rule, values.pop(rule.key), report, join_path(path, rule.key))


def _settle_pending(rule: Pending, value: object, report: Report, path: str) -> None:
    if not isinstance(value, Mapping):
        report.add(
            ProblemKind.MALFORMED, path, f"an object {{...}} is expected, given {shown(value)}"
        )
        return
    block = dict(value)
    _check_keys(block, rule.keys, report, path)
    for switch in rule.switches:
        _settle_switch(block, switch.split("."), report, path)
    for switch in switched_on(block, rule):
        report.add(
            ProblemKind.UNAVAILABLE,
            join_path(path, switch) if switch else path,
            f"not available yet in this version (will come with {rule.owner}); {rule.instead}",
        )


def _check_keys(block: Mapping[str, Any], keys: KeyTree, report: Report, path: str) -> None:
    for key, value in block.items():
        if key not in keys and "*" not in keys:
            report_unknown(report, path, key, list(keys))
            continue
        inner = keys.get(key, keys.get("*"))
        if inner is not None and isinstance(value, Mapping):
            _check_keys(value, inner, report, join_path(path, key))


def _settle_switch(block: dict[str, Any], keys: list[str], report: Report, path: str) -> None:
    """Reads a switch written as text; an "auto" is reported and counts as off."""
    first, *rest = keys
    value = block.get(first)
    full = join_path(path, first)
    if rest:
        if isinstance(value, Mapping):
            inner = dict(value)
            _settle_switch(inner, rest, report, full)
            block[first] = inner
    elif is_auto(value):
        report_auto(report, full)
        del block[first]
    elif first in block:
        block[first] = read_flag(value, report, full)
