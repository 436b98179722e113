"""Runs the commands of the demo one after another, shows and times each."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HERE", "ROOT", "DemoError", "Steps", "ranks_text", "shorten"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class DemoError(Exception):
    """A step of the demo failed; the message is for a person."""


class Steps:
    """The steps of one run and how long each took.

    Attributes:
        marks: seconds of each step by its name.
    """

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self._begin_s = time.perf_counter()

    def run(self, name: str, title: str, command: Sequence[str | Path]) -> None:
        """Show and run one command; time it.

        Args:
            name: of the step.
            title: what it does.
            command: begins with ``python`` or ``ds``, which are those of this environment.

        Raises:
            DemoError: it failed.
        """
        shown = [shorten(word) if isinstance(word, Path) else word for word in command]
        print(f"\n== {name}: {title}\n$ {shlex.join(shown)}", flush=True)
        with self.timed(name):
            status = _call([str(word) for word in command])
        if status != 0:
            raise DemoError(f"the step `{name}` failed with exit status {status}")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        begin_s = time.perf_counter()
        yield
        self.marks[name] = time.perf_counter() - begin_s

    def total(self) -> str:
        """Return how long all took, and each step."""
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.marks.items())
        return f"{time.perf_counter() - self._begin_s:.0f} s ({parts})"


def ranks_text(count: int) -> str:
    """Return ``1 rank`` or ``N ranks``."""
    return f"{count} rank{'s' if count > 1 else ''}"


def shorten(path: Path) -> str:
    """Return the path relative to the repository where it lies in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _call(command: list[str]) -> int:
    """Run a command of this environment in the foreground and return its exit status."""
    heads = {"python": [sys.executable], "ds": [sys.executable, "-m", "ds_launch"]}
    with subprocess.Popen([*heads[command[0]], *command[1:]], cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the command too, which is ending its ranks: wait for that.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.wait()
            raise
