"""Problems of one document, gathered and raised together."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ds_comm.errors import ConfigError
from ds_comm.logging import get_logger

__all__ = ["ConfigReportError", "Problem", "ProblemKind", "Report", "join_path"]

_LOG = get_logger(__name__)


def join_path(path: str, key: str) -> str:
    """The dotted path of `key` inside the object at `path` ("" is the top level)."""
    return f"{path}.{key}" if path else key


class ProblemKind(enum.Enum):
    """Why a key or value was refused."""

    UNKNOWN = "unknown"
    """No such key."""
    MALFORMED = "malformed"
    """Wrong type or out of range: the value is not available to later checks."""
    AUTO = "auto"
    """An "auto" that nothing here can resolve."""
    UNAVAILABLE = "unavailable"
    """A feature that this version does not have yet, or that another package owns."""
    REMOVED = "removed"
    """A key of something that is not shipped and will not be."""
    CONTRADICTION = "contradiction"
    """Values that are fine alone and not together."""


@dataclass(frozen=True)
class Problem:
    """One refused key or value."""

    path: str
    """Dotted path of the key."""
    message: str
    """What was given, what is allowed, what to do."""
    kind: ProblemKind
    """Why it was refused."""
    about: tuple[str, ...] = ()
    """Paths that the user probably meant, beside `path`."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigReportError(ConfigError):
    """All problems of one document; the message has a line for each."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''} in {source}:"
        super().__init__("\n  ".join([head, *map(str, self.problems)]))


def _overlap(left: str, right: str) -> bool:
    return (
        left == right
        or left.startswith((f"{right}.", f"{right}["))
        or right.startswith((f"{left}.", f"{left}["))
    )


@dataclass
class Report:
    """Gathers problems, notices and ineffective keys while a document is read."""

    source: str = "the configuration"
    """How to name the document in the error."""
    problems: list[Problem] = field(default_factory=list)
    """Everything refused so far, in reading order."""
    notices: list[str] = field(default_factory=list)
    """Things that were accepted but changed, such as renamed keys: one warning each."""
    without_effect: list[str] = field(default_factory=list)
    """Paths of accepted keys that change nothing here: one warning for all."""
    known_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All paths of the document's schema by their last key, for better hints."""

    def add(
        self, kind: ProblemKind, path: str, message: str, *, about: tuple[str, ...] = ()
    ) -> None:
        """Records a problem."""
        self.problems.append(Problem(path=path, message=message, kind=kind, about=about))

    def notice(self, message: str) -> None:
        """Records something to warn about once."""
        self.notices.append(message)

    def is_unusable(self, path: str) -> bool:
        """Whether the value at `path` is unknown because it, or the key, was malformed.

        A check over several values must skip the ones it cannot see; otherwise one mistake is
        reported twice.
        """
        blocking = (ProblemKind.MALFORMED, ProblemKind.AUTO, ProblemKind.UNKNOWN)
        return any(
            any(_overlap(path, candidate) for candidate in (problem.path, *problem.about))
            for problem in self.problems
            if problem.kind in blocking
        )

    def finish(self) -> None:
        """Logs the notices, then raises if there is any problem.

        Raises:
            ConfigReportError: With all problems.
        """
        for notice in self.notices:
            _LOG.warning("%s", notice)
        if self.without_effect:
            _LOG.warning(
                "configuration keys that are accepted and change nothing here "
                "(the configuration reference says why): %s",
                ", ".join(self.without_effect),
            )
        if self.problems:
            raise ConfigReportError(self.source, self.problems)
