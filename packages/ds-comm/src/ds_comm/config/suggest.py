"""Unknown keys: what the user probably meant, or where the key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ds_comm.config.report import ProblemKind, Report, join_path

__all__ = ["nearest", "report_unknown"]

_SHORT_LIST = 12  # list the known keys of a section only when they fit on a line
_FEW_PLACES = 3  # a key that many sections have, such as "enabled", hints at none of them


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key most like `key`, ignoring case, or ``None`` if none is like it."""
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    close = difflib.get_close_matches(key.strip().lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def report_unknown(report: Report, path: str, key: str, known: Sequence[str]) -> None:
    """Records an unknown key.

    Args:
        report: Where to record it.
        path: Dotted path of the object that has the key.
        key: The key.
        known: Keys that the object may have.
    """
    full = join_path(path, key)
    homes = report.known_paths.get(key, ())
    near = nearest(key, known)
    if 0 < len(homes) <= _FEW_PLACES:
        places = " or ".join(f'"{home}"' for home in homes)
        message = f"unknown key here; did you mean {places}?"
        about = homes
    elif near is not None:
        message = f'unknown key; did you mean "{near}"?'
        about = (join_path(path, near),)
    else:
        few = 0 < len(known) <= _SHORT_LIST
        message = "unknown key; known keys here: " + ", ".join(known) if few else "unknown key"
        about = ()
    report.add(ProblemKind.UNKNOWN, full, message, about=about)
