from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MARK = "DS_LAUNCH_TEST_MARK"


class Done(NamedTuple):
    """How a `ds` command ended."""

    status: int
    out: bytes
    err: bytes
    seconds: float


def _default_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Ds:
    """Runs the `ds` command as users do, in processes that can all be found by one mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = os.urandom(8).hex()

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script and return its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    def plugin(self, dist: str, entries: str, **modules: str) -> dict[str, str]:
        """Lay out an installed distribution; return the variables that make it found."""
        site = self.folder / "site"
        info = site / f"{dist}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
        before = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": f"{site}{os.pathsep}{before}" if before else str(site)}

    def environ(self, **variables: str) -> dict[str, str]:
        """An environment without what a surrounding job or user may have set."""
        dropped = (
            "OMP_NUM_THREADS",
            "PYTHONUNBUFFERED",
            "PYTHONFAULTHANDLER",
            "DS_RUN_ID",
            "CUDA_VISIBLE_DEVICES",
        )
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, MARK: self.mark, **variables}

    def start(
        self, *words: str | bytes, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start the command with piped output."""
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        # Under nohup pytest ignores SIGHUP, and what it starts would inherit that.
        streams["preexec_fn"] = _default_hangup
        return subprocess.Popen(
            [sys.executable, "-m", "ds_launch", *words],
            env=self.environ(**(env or {})),
            cwd=self.folder,
            **{**streams, **options},
        )

    def __call__(
        self,
        *words: str | bytes,
        env: dict[str, str] | None = None,
        timeout: float = 30.0,
        **options: Any,
    ) -> Done:
        """Run the command to its end."""
        start_s = time.monotonic()
        process = self.start(*words, env=env, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Done(process.returncode, out or b"", err or b"", time.monotonic() - start_s)

    def alive(self) -> list[str]:
        """Command lines of the living processes that were started through this object."""
        found = []
        mark = f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().decode())
            except OSError:
                continue
        return found

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not reached; alive: {self.alive()}"
            time.sleep(0.02)


@pytest.fixture
def ds(tmp_path: Path) -> Iterator[Ds]:
    runner = Ds(tmp_path)
    yield runner
    assert runner.alive() == []
