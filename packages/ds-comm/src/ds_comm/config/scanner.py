"""Turns JSON with comments and trailing commas into plain JSON, character for character.

Everything removed is replaced by spaces (newlines stay), so that the line and column of a later
parse error are those of the file that the user wrote.
"""

from __future__ import annotations

import re

from ds_comm.errors import ConfigError

__all__ = ["plain_json"]

# One token: a string (possibly unterminated), a comment, a comma, or a run of anything else.
# The alternatives are tried in order, so a comment mark inside a string is never seen.
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"?)
      | (?P<line>(?://|\#)[^\n]*)
      | (?P<block>/\*.*?\*/)
      | (?P<open>/\*)
      | (?P<comma>,)
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_NOT_NEWLINE = re.compile(r"[^\n]")


def _blank(text: str) -> str:
    return _NOT_NEWLINE.sub(" ", text)


def plain_json(text: str) -> str:
    """Blanks ``//``, ``#`` and ``/* */`` comments and trailing commas, respecting strings.

    Args:
        text: A JSON document, perhaps with comments and with a comma after the last member of an
            object or array. Nothing else beyond JSON is understood.

    Returns:
        Text of the same length with newlines in the same places.

    Raises:
        ConfigError: A block comment is not closed; the message has its line.
    """
    pieces: list[str] = []
    comma_at = -1  # index in `pieces` of a comma that would be trailing if a bracket came next
    before = ""  # the last significant character before the current token
    for match in _TOKEN.finditer(text):
        token, kind = match.group(), match.lastgroup
        if kind == "open":
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"line {line}: the comment that starts with /* is never closed")
        if kind in ("line", "block"):
            pieces.append(_blank(token))
            continue
        pieces.append(token)
        if kind == "space":
            continue
        if kind == "comma":
            # `[,]` and `[1,,]` stay broken: only one comma, and only after a value.
            comma_at = -1 if before in ("", "[", "{", ",", ":") else len(pieces) - 1
        else:
            if token in ("]", "}") and comma_at >= 0:
                pieces[comma_at] = " "
            comma_at = -1
        before = token[-1]
    return "".join(pieces)
