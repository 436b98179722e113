"""Nearest-name suggestions for mistyped commands and options."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known word nearest to ``word``, or ``""``.

    Args:
        word: What the user typed.
        known: The words that would have been accepted.
    """
    # difflib costs several milliseconds, and only a mistake needs it.
    import difflib

    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
