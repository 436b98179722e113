from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ds_launch import __version__

if TYPE_CHECKING:
    from conftest import Ds

HEAVY = {"argparse", "subprocess", "importlib.metadata", "pydantic", "torch", "dataclasses"}


def test_help_has_examples(ds: Ds) -> None:
    done = ds("--help")
    assert done.status == 0
    assert b"ds run --num-ranks 2 train.py" in done.out
    assert b"report" in done.out
    assert done.err == b""


def test_no_words_shows_help_and_fails(ds: Ds) -> None:
    done = ds()
    assert done.status == 2
    assert b"usage: ds" in done.out


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(ds: Ds, words: list[str]) -> None:
    code = (
        "import sys; from ds_launch.cli import main; main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *words],
        env=ds.environ(PYTHONPATH=str(Path(__file__).parents[1] / "src")),
        capture_output=True,
        check=True,
    )
    assert HEAVY.isdisjoint(done.stderr.decode().split())


def test_run_imports_no_torch_or_pydantic(ds: Ds) -> None:
    script = ds.script("pass")
    code = (
        "import sys; from ds_launch.cli import main; main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "-n", "1", script],
        env=ds.environ(),
        capture_output=True,
        check=True,
    )
    modules = set(done.stderr.decode().split())
    assert "ds_launch.supervisor" in modules
    assert {"torch", "pydantic", "importlib.metadata", "numpy"}.isdisjoint(modules)


def test_help_takes_under_100_ms_beyond_python(ds: Ds) -> None:
    def cpu_s(*words: str) -> float:
        """Least processor time of a few runs: what other processes do hardly shows in it."""
        times = []
        for _ in range(7):
            before = os.times()
            subprocess.run([sys.executable, *words], env=ds.environ(), capture_output=True)
            after = os.times()
            times.append(sum(after[2:4]) - sum(before[2:4]))
        return min(times)

    assert cpu_s("-m", "ds_launch", "--help") - cpu_s("-c", "pass") < 0.1


def test_version(ds: Ds) -> None:
    assert ds("--version").out.decode() == f"ds-launch {__version__}\n"


@pytest.mark.parametrize("words", [[], ["--num_gpus", "1"], ["run"]])
def test_script_means_run(ds: Ds, words: list[str]) -> None:
    script = ds.script("import sys; print(sys.argv[1:])")
    assert ds(*words, script, "--help").out == b"['--help']\n"


def test_existing_file_without_suffix_means_run(ds: Ds) -> None:
    ds.script("print('no suffix')", name="train")
    assert ds("train").out == b"no suffix\n"


def test_unknown_command_suggests(ds: Ds) -> None:
    done = ds("reprot")
    assert done.status == 2
    assert b"Did you mean 'report'?" in done.err
    assert b"Traceback" not in done.err


def test_entry_point_command(ds: Ds) -> None:
    env = ds.plugin(
        "toy",
        "[ds.commands]\ntoy = toymod:main\n",
        toymod="def main(words):\n    print('toy', words)\n    return 7\n",
    )
    done = ds("toy", "--x", "a b", env=env)
    assert (done.status, done.out) == (7, b"toy ['--x', 'a b']\n")
    assert b"toy" in ds("commands", env=env).out
    assert b"Did you mean 'toy'?" in ds("tooy", env=env).err


def test_entry_point_never_shadows_a_builtin(ds: Ds) -> None:
    env = ds.plugin("toy", "[ds.commands]\nreport = nowhere:main\n")
    assert ds("report", "--help", env=env).status == 0


def test_entry_point_that_cannot_be_imported(ds: Ds) -> None:
    env = ds.plugin("toy", "[ds.commands]\ntoy = nowhere:main\n")
    done = ds("toy", env=env)
    assert done.status == 2
    assert b"toy" in done.err and b"No module named 'nowhere'" in done.err
    assert b"Traceback" not in done.err


def test_command_declared_twice(ds: Ds) -> None:
    ds.plugin("one", "[ds.commands]\ntoy = one:main\n")
    env = ds.plugin("two", "[ds.commands]\ntoy = two:main\n")
    done = ds("toy", env=env)
    assert done.status == 2
    assert b"one" in done.err and b"two" in done.err
