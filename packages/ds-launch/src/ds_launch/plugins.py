"""What other installed packages add to the ``ds`` command, found through entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from ds_launch.errors import LaunchError

Command = Callable[[list[str]], int]
"""A subcommand: takes the words after its name, returns the exit status."""


def command_sources(group: str) -> dict[str, str]:
    """Return the name of each entry point of a group with the distribution that declares it."""
    return {entry.name: _source(entry) for entry in entry_points(group=group)}


def load_command(group: str, name: str) -> Command | None:
    """Import the command of this name, ``None`` if no installed package declares it.

    Raises:
        LaunchError: Two packages declare it differently, or its import fails.
    """
    # An editable install can be listed twice; only different targets are a conflict.
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if not found:
        return None
    if len(found) > 1:
        sources = " and ".join(_source(entry) for entry in found.values())
        raise LaunchError(f"the command {name!r} is declared by {sources}: uninstall one of them")
    (entry,) = found.values()
    try:
        command: Command = entry.load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the command {name!r} of {_source(entry)} cannot be loaded: {error}"
        ) from error
    return command


def _source(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
