"""Command-line options as a table: parsing, help text and messages come from the same rows.

argparse is not used because of what follows the script's name: every later word belongs to the
script byte for byte, and argparse's REMAINDER treats ``--`` differently from one Python version
to the next. It also spares the start of two ranks its import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_launch.errors import UsageError
from ds_launch.suggest import did_you_mean


class Option(NamedTuple):
    """One option of a command.

    Attributes:
        names: Spellings with leading dashes, the preferred one first. Underscores inside a long
            name are accepted for hyphens (``--num_gpus`` is ``--num-gpus``).
        help: What it does, for the help text.
        metavar: Name of the value in the help text; ``None`` for a switch without a value.
    """

    names: tuple[str, ...]
    help: str
    metavar: str | None = None


class Parsed(NamedTuple):
    """Outcome of :func:`parse`.

    Attributes:
        values: Preferred name to the text of its value (``""`` for a switch) as given.
        rest: The words from the first one that is not an option, untouched.
    """

    values: Mapping[str, str]
    rest: Sequence[str]


def parse(
    words: Sequence[str],
    table: Sequence[Option],
    *,
    command: str,
    refused: Mapping[str, str] | None = None,
) -> Parsed:
    """Read options up to the first word that is not one.

    ``--name value`` and ``--name=value`` are the same; ``--`` ends the options and is dropped.

    Args:
        words: The command line after the command's name.
        table: The options that exist.
        command: How the command is called, for messages.
        refused: Options known from elsewhere, by hyphenated name, with the reason they are not
            accepted.

    Raises:
        UsageError: An option is unknown, refused, given twice, lacks its value or has one it
            does not take.
    """
    by_name = {name: option for option in table for name in option.names}
    values: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        given, equals, value = word.partition("=")
        option = by_name.get(_normal(given))
        if option is None:
            raise UsageError(_unknown(given, by_name, command, refused or {}))
        position += 1
        if option.metavar is None:
            if equals:
                raise UsageError(f"{command}: {given} is a switch and takes no value ({word!r})")
        elif not equals:
            if position == len(words):
                raise UsageError(f"{command}: {given} needs a value: {given} {option.metavar}")
            value = words[position]
            position += 1
        if option.names[0] in values:
            raise UsageError(f"{command}: {option.names[0]} is given twice (last as {given})")
        values[option.names[0]] = value
    return Parsed(values, words[position:])


def describe(table: Sequence[Option], *, width: int = 30) -> str:
    """Return the options as aligned lines for a help text, ``width`` columns for the names."""
    lines: list[str] = []
    for option in table:
        names = ", ".join(option.names)
        left = f"  {names} {option.metavar}" if option.metavar else f"  {names}"
        help_lines = option.help.split("\n")
        if len(left) < width:
            lines.append(left.ljust(width) + help_lines.pop(0))
        else:
            lines.append(left)
        lines.extend(" " * width + line for line in help_lines)
    return "\n".join(lines)


def whole_number(name: str, text: str, *, least: int, most: int, command: str) -> int:
    """Return ``text`` as an int within ``least .. most``.

    Raises:
        UsageError: The text is not a plain decimal number or is out of range.
    """
    digits = text[1:] if text.startswith("-") else text
    if not (digits.isascii() and digits.isdecimal()):
        raise UsageError(f"{command}: {name} needs a whole number, not {text!r}")
    # Ten digits are beyond every limit; int() itself refuses absurdly long texts.
    number = int(text) if len(digits) < 10 else most + 1
    if text.startswith("-") or not least <= number <= most:
        raise UsageError(f"{command}: {name} must be between {least} and {most}, not {text}")
    return number


def _normal(name: str) -> str:
    """Spell a long option with hyphens: ``--num_gpus`` becomes ``--num-gpus``."""
    return name.replace("_", "-") if name.startswith("--") else name


def _unknown(
    given: str, by_name: Mapping[str, Option], command: str, refused: Mapping[str, str]
) -> str:
    reason = refused.get(_normal(given))
    if reason is not None:
        return f"{command}: {given} is not available yet: {reason}"
    hint = did_you_mean(_normal(given), by_name)
    return (
        f"{command}: unknown option {given!r}.{hint} `{command} --help` lists the options; "
        "options of a script come after its name."
    )
