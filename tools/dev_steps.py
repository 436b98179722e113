"""Runs the commands of dev.py one after another and shows what each one costs in time."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DevError", "Outcome", "Step", "report", "run_logged", "run_shown"]

_NOTICE_EVERY_S = 30.0
_TAIL_LINES = 30


class DevError(Exception):
    """Something a developer can mend; the message says how."""


@dataclass(frozen=True)
class Step:
    """One command with the title it is shown under."""

    title: str
    command: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """How a step ended: ``status`` is its exit status."""

    title: str
    status: int
    seconds: float


def run_shown(step: Step, *, cwd: Path, env: Mapping[str, str]) -> Outcome:
    """Run a step with its output going straight to the terminal.

    Raises:
        DevError: The program does not exist.
    """
    print(f"\n==> {step.title}: {shlex.join(step.command)}", flush=True)
    start = time.monotonic()
    try:
        status = subprocess.run(step.command, cwd=cwd, env=dict(env), check=False).returncode
    except FileNotFoundError as error:
        raise DevError(
            f"{step.command[0]} is missing: run `python3 tools/dev.py setup --again`"
        ) from error
    return Outcome(step.title, status, time.monotonic() - start)


def run_logged(step: Step, *, cwd: Path, env: Mapping[str, str], log: Path) -> None:
    """Run a long quiet step: its output goes to ``log``, its last line and time are shown.

    Raises:
        DevError: The step failed; the message holds the end of the log.
    """
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"$ {shlex.join(step.command)}\n")
        sink.flush()
        child = subprocess.Popen(
            step.command, cwd=cwd, env=dict(env), stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            _watch(child, step.title, log, start)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode != 0:
        raise DevError(
            f"{step.title} failed with status {child.returncode}. The end of {log}:\n\n"
            f"{_tail(log, _TAIL_LINES)}\n\nMend what it says and run the same command again."
        )
    _say(f"    {step.title}: {time.monotonic() - start:.1f} s", last=True)


def report(outcomes: Sequence[Outcome]) -> int:
    """Print one line for each step; returns 0 if all passed, else 1."""
    print()
    for outcome in outcomes:
        verdict = "ok" if outcome.status == 0 else f"FAILED (status {outcome.status})"
        print(f"    {outcome.seconds:7.1f} s  {outcome.title}: {verdict}")
    failed = [outcome.title for outcome in outcomes if outcome.status != 0]
    total_s = sum(outcome.seconds for outcome in outcomes)
    if failed:
        print(f"{len(failed)} of {len(outcomes)} steps failed in {total_s:.0f} s:", *failed)
        return 1
    print(f"all {len(outcomes)} steps ok in {total_s:.0f} s")
    return 0


def _watch(child: subprocess.Popen[bytes], title: str, log: Path, start: float) -> None:
    """Wait for the child and show that it lives."""
    interactive = sys.stdout.isatty()
    interval_s = 0.5 if interactive else _NOTICE_EVERY_S
    while True:
        try:
            child.wait(timeout=interval_s)
            return
        except subprocess.TimeoutExpired:
            elapsed_s = time.monotonic() - start
            last_line = _tail(log, 1).strip()[:60]
            _say(f"    {title}: {elapsed_s:.0f} s  {last_line}", last=not interactive)


def _say(text: str, *, last: bool) -> None:
    """Write over the current line of a terminal; elsewhere print a line of its own."""
    if sys.stdout.isatty():
        text = f"\r\033[K{text}"
    print(text, end="\n" if last else "", flush=True)


def _tail(log: Path, num_lines: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])
