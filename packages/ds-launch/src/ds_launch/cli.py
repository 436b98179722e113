"""The ``ds`` command: find the subcommand and hand it the rest of the words.

Built-in commands are found without a look at installed packages; other packages add commands with
an entry point in the group ``ds.commands``::

    [project.entry-points."ds.commands"]
    bench = "ds_comm.bench.cli:main"

whose object is called with the list of words after the command's name and returns the exit status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from ds_launch._version import __version__
from ds_launch.errors import LaunchError, UsageError

COMMANDS_GROUP = "ds.commands"

HELP = """\
usage: ds COMMAND [arguments...]
       ds SCRIPT.py [arguments...]      the same as ds run SCRIPT.py

Start, watch and inspect training jobs.

commands:
  run         start a script on every rank of this machine
  report      show versions, compilers, hardware and native modules
  commands    list all commands, those of other installed packages too

options:
  --version   show the version
  --help, -h  show this text; `ds COMMAND --help` shows that of a command

examples:
  ds run --num-ranks 2 train.py --deepspeed_config ds_config.json
  ds train.py --epochs 3
  ds --num_gpus 2 train.py
  ds report
"""

_COMMANDS_HELP = """\
usage: ds commands

List the commands of ds and of every installed package that adds some.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the ``ds`` command and return its exit status.

    Args:
        words: The command line without the program's name; that of the process by default.
    """
    try:
        return _dispatch(list(sys.argv[1:] if words is None else words))
    except LaunchError as error:
        sys.stderr.write(f"ds: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; keep Python from failing again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        sys.stdout.write(HELP)
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        sys.stdout.write(f"ds-launch {__version__}\n")
        return 0
    builtin = _BUILTINS.get(name)
    if builtin is not None:
        return builtin(rest)
    if name.startswith("-") or name.endswith(".py"):
        return _run(words)
    return _plugin(name, rest, words)


def _run(words: list[str]) -> int:
    from ds_launch.run import main as run

    return run(words)


def _report(words: list[str]) -> int:
    from ds_launch.report import main as report

    return report(words)


def _commands(words: list[str]) -> int:
    from ds_launch.plugins import command_sources

    if words in (["--help"], ["-h"]):
        sys.stdout.write(_COMMANDS_HELP)
        return 0
    if words:
        raise UsageError(f"ds commands takes no arguments, not {words[0]!r}")
    rows = {name: "ds-launch" for name in _BUILTINS} | command_sources(COMMANDS_GROUP)
    width = max(map(len, rows))
    sys.stdout.writelines(f"{name:{width}}  {rows[name]}\n" for name in sorted(rows))
    return 0


_BUILTINS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "report": _report,
    "commands": _commands,
}


def _plugin(name: str, rest: list[str], words: list[str]) -> int:
    """Run another package's command, or the file of that name, or say what was not understood."""
    from ds_launch.plugins import command_sources, load_command
    from ds_launch.suggest import did_you_mean

    command = load_command(COMMANDS_GROUP, name)
    if command is not None:
        return command(rest)
    if os.path.exists(name):
        return _run(words)
    known = sorted({*_BUILTINS, *command_sources(COMMANDS_GROUP)})
    raise UsageError(
        f"there is no command or script {name!r}.{did_you_mean(name, known)} "
        f"Commands: {', '.join(known)}."
    )
