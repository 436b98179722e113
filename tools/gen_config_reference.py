"""Writes docs/config.md, the reference of every configuration key, from the schema.

``python tools/gen_config_reference.py`` writes the page; with ``--check`` it only compares and
exits with status 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config_schema import KeyRow, key_rows, summary_of
from ds_all.config import DSConfig
from ds_comm.config import Pending, Section

__all__ = ["PAGE", "main", "render"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
"""The generated page."""

_INTRO = """\
# Configuration reference

<!-- Written by tools/gen_config_reference.py from the schema; change the schema, not this page. -->

A configuration is a JSON object: a Python mapping, a file (in which `//`, `#` and `/* */` comments
and trailing commas are allowed), or URL-safe base64 of the JSON text. Every problem in it is
reported at once. A key that is unknown, misspelt, given twice, or of a feature that is not
available yet is an error, never ignored. Keys that are accepted and change nothing are listed in
one warning, and an old name is mapped with a warning.

Whole numbers may be written as `5e8` or `"5e8"`. `"auto"` is accepted where the type says so and
means the default; everywhere else it is an error that lists all such keys.

`ds_all.DSConfig` reads everything on this page. `ds_zero.config.EngineConfig` reads the same
without [the blocks of other packages](#blocks-that-are-not-available-yet), which it refuses by
name.

## Batch sizes

`train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks`, where
*ranks* is the data-parallel size. Give one or two of them, or all three if they fit:

| given | the rest |
|---|---|
| train and micro | accumulation = train / (micro × ranks) |
| train and accumulation | micro = train / (accumulation × ranks) |
| micro and accumulation | train = micro × accumulation × ranks |
| train | accumulation = 1, micro = train / ranks |
| micro | accumulation = 1, train = micro × ranks |
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def _code(text: str) -> str:
    return text if text in ("required", "no limit") else f"`{text}`"


def _section_lines(title: str, section: type[Section]) -> Iterator[str]:
    yield f"\n## {title}\n"
    summary = summary_of(section)
    yield f"{_cell(summary.split(': ', 1)[-1][:1].upper() + summary.split(': ', 1)[-1][1:])}\n"
    yield "| key | type | default | meaning | status |"
    yield "|---|---|---|---|---|"
    for row in key_rows(section):
        cells = (f"`{row.key}`", row.kind, _code(row.default), row.meaning, row.status)
        yield f"| {' | '.join(map(_cell, cells))} |"


def _nested(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    rows: list[KeyRow] = list(key_rows(section))
    for row in rows:
        if row.section is not None:
            full = f"{path}.{row.key}" if path else row.key
            yield full, row.section
            yield from _nested(row.section, full)


def _old_lines(sections: list[tuple[str, type[Section]]]) -> Iterator[str]:
    yield "\n## Old names\n"
    yield "Each is mapped with one warning; giving the old and the new name is an error.\n"
    yield "| old | new |"
    yield "|---|---|"
    for path, section in sections:
        prefix = f"{path}." if path else ""
        for rule in section.key_rules.renamed:
            new = " and ".join(f"`{prefix}{target}`" for target in rule.new)
            yield f"| `{prefix}{rule.old}` | {new} |"
        for short in section.key_rules.shorthands:
            for value, text in ((True, "true"), (False, "false")):
                meant = short.convert(value).items()
                new = ", ".join(f"`{prefix}{short.key}.{k}` = {v}" for k, v in meant)
                yield f"| `{prefix}{short.key}` = {text} | {new} |"


def _removed_lines(sections: list[tuple[str, type[Section]]]) -> Iterator[str]:
    yield "\n## Keys that are refused for good\n"
    yield 'Refused whatever their value, `null`, `{}` and `{"enabled": false}` included.\n'
    yield "| key | instead |"
    yield "|---|---|"
    for path, section in sections:
        prefix = f"{path}." if path else ""
        for rule in section.key_rules.removed:
            yield f"| `{prefix}{rule.key}` | {_cell(rule.instead)} |"


def _tree_text(keys: Mapping[str, Any]) -> str:
    parts = [
        key if inner is None else f"{key} {{{_tree_text(inner)}}}" for key, inner in keys.items()
    ]
    return ", ".join(parts)


def _on_text(rule: Pending) -> str:
    if not rule.switches:
        return "anything is in it"
    test = f" is above {rule.neutral}" if rule.neutral else ""
    return " or ".join(f"`{switch}`{test}" for switch in rule.switches)


def _pending_lines(section: type[Section]) -> Iterator[str]:
    yield "\n## Blocks that are not available yet\n"
    yield "Accepted while they are off, refused while they are on; unknown keys in them are found"
    yield "either way.\n"
    yield "| block | comes with | on when | instead | keys |"
    yield "|---|---|---|---|---|"
    for rule in section.key_rules.pending:
        cells = (
            f"`{rule.key}`",
            rule.owner,
            _on_text(rule),
            rule.instead,
            f"`{_tree_text(rule.keys)}`",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def render() -> str:
    """The whole page."""
    inner = list(_nested(DSConfig))
    everything: list[tuple[str, type[Section]]] = [("", DSConfig), *inner]
    lines = [_INTRO]
    lines += _section_lines("Top level", DSConfig)
    for path, section in inner:
        lines += _section_lines(f"`{path}`", section)
    lines += _old_lines(everything)
    lines += _removed_lines(everything)
    lines += _pending_lines(DSConfig)
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the page.

    Args:
        argv: Arguments; those of the process if ``None``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args(argv)
    text = render()
    if not arguments.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE} is out of date: run python tools/gen_config_reference.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
