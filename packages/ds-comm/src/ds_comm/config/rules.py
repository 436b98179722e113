"""What a section says about its keys beyond their types: renames, removals, markers.

Markers stand in the ``Annotated[...]`` of a field; the other rules are class variables of the
section.  Both are plain data, so that the reader, the checks and the reference page share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_comm.config.report import ProblemKind

__all__ = [
    "Auto",
    "Contradiction",
    "Elsewhere",
    "KeyRules",
    "KeyTree",
    "NoEffect",
    "NotYet",
    "Pending",
    "Removed",
    "Renamed",
    "Shorthand",
    "switched_on",
]

KeyTree = Mapping[str, Any]
"""Known keys of a block: a nested mapping per object, ``None`` for a leaf or a free-form value,
and ``"*"`` for any name."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Auto:
    """Marker: ``"auto"`` means the default of the field."""


@dataclass(frozen=True)
class NoEffect:
    """Marker: the key is valid and changes nothing here; giving it is reported in one line."""

    because: str
    """Why nothing depends on it."""


@dataclass(frozen=True)
class NotYet:
    """Marker: any value but the default asks for something that is not available yet."""

    instead: str
    """What can be used now."""
    also: tuple[Any, ...] = ()
    """Values that are accepted beside the default, since they ask for nothing either."""
    switch: str = ""
    """Field of the section without which the value asks for nothing; none by default."""


@dataclass(frozen=True)
class Renamed:
    """An old key that is mapped to a new one with a warning."""

    old: str
    """The key as it was."""
    new: tuple[str, ...]
    """Where its value goes: dotted paths relative to the section."""
    convert: Callable[[Any], Any] = _same
    """Turns an old value into a new one; raises ``ValueError`` with what is expected."""


@dataclass(frozen=True)
class Removed:
    """A key that is refused whatever its value, ``null`` and ``{}`` included."""

    key: str
    """The key."""
    instead: str
    """What replaces it."""


@dataclass(frozen=True)
class Shorthand:
    """A field whose section may also be written as a single value of type `kind`."""

    key: str
    """The key of the field."""
    kind: type
    """Type of the short form."""
    convert: Callable[[Any], dict[str, Any]]
    """The section that the short form stands for."""


@dataclass(frozen=True)
class Elsewhere:
    """A key that another package reads; refused here whatever its value."""

    key: str
    """The key."""
    owner: str
    """Distribution that owns the feature."""
    reader: str
    """What reads the key."""


@dataclass(frozen=True)
class Pending:
    """A block of a feature that is not available yet: accepted only while switched off.

    Its keys are known, so a misspelt key is found even while the block is off.
    """

    key: str
    """The key of the block."""
    owner: str
    """Distribution that owns the feature."""
    instead: str
    """What can be done now."""
    keys: KeyTree
    """Known keys."""
    switches: tuple[str, ...] = ("enabled",)
    """Dotted paths of the switches; the block is on when one is true, a number above its neutral
    value, or for no switches at all, when anything is in it."""
    neutral: int = 0
    """Largest number that still means off, for numeric switches."""


@dataclass(frozen=True)
class KeyRules:
    """Everything that a section says about keys other than its fields, and about its switch."""

    renamed: tuple[Renamed, ...] = ()
    """Old keys and where they go."""
    removed: tuple[Removed, ...] = ()
    """Keys that are refused whatever their value."""
    shorthands: tuple[Shorthand, ...] = ()
    """Fields that may be written as one value."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Keys that another package reads."""
    pending: tuple[Pending, ...] = ()
    """Blocks of features that are not available yet."""
    switch: str = ""
    """Key without which the others are not read, for the reference page."""


@dataclass(frozen=True)
class Contradiction:
    """Values of one section that do not go together."""

    path: str
    """Where to report it, relative to the section."""
    message: str
    """What does not fit and what to do."""
    involves: tuple[str, ...]
    """All keys that were looked at, relative to the section; skipped if one is malformed."""
    kind: ProblemKind = ProblemKind.CONTRADICTION
    """How to classify it."""


def switched_on(block: Mapping[str, Any], rule: Pending) -> Iterable[str]:
    """Paths, relative to the block, of the switches that are on ("" for the block itself)."""
    if not rule.switches:
        return [""] if block else []
    on: list[str] = []
    for switch in rule.switches:
        value: Any = block
        for key in switch.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (is_number and value > rule.neutral) or (not is_number and value not in (None, False)):
            on.append(switch)
    return on
