"""dev.py's command line: help with examples, errors that say what to do, steps and exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dev
from dev_env import Environment
from dev_steps import DevError, Outcome, Step, report, run_logged, run_shown

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Replaces installing and running by a record of the steps."""
    steps: list[Step] = []

    def run(environment: Environment, step: Step) -> Outcome:
        steps.append(step)
        return Outcome(step.title, 0, 0.0)

    monkeypatch.setattr(dev, "prepare", lambda root, again=False: Environment(root))
    monkeypatch.setattr(dev, "_run", run)
    return steps


@pytest.mark.parametrize("command", ["setup", "demo", "test", "bench", "lint"])
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        dev.main([command, "--help"])
    assert stop.value.code == 0
    assert f"python3 tools/dev.py {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["teste"], ["setup", "--nope"], ["lint", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        dev.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_test_runs_every_check_and_pytest_last(ran: list[Step]) -> None:
    assert dev.main(["test"]) == 0
    titles = [step.title for step in ran]
    assert titles[:3] == ["linter", "types", "package graph"]
    assert "tox" in ran[3].command
    assert titles[-1] == "tests"
    assert list(ran[-1].command[1:]) == ["-m", "pytest"]


def test_fast_leaves_out_slow_tests_and_tox(ran: list[Step]) -> None:
    assert dev.main(["test", "--fast"]) == 0
    assert not any("tox" in step.command for step in ran)
    assert list(ran[-1].command[-2:]) == ["-m", "not slow"]


def test_unknown_arguments_of_test_go_to_pytest_alone(ran: list[Step]) -> None:
    assert dev.main(["test", "packages/ds-zero", "-k", "layout"]) == 0
    (step,) = ran
    assert list(step.command[1:]) == ["-m", "pytest", "packages/ds-zero", "-k", "layout"]


def test_arguments_of_demo_are_passed_on(ran: list[Step]) -> None:
    assert dev.main(["demo", "--", "--help"]) == 0
    assert dev.main(["demo", "--steps", "3"]) == 0
    assert [list(step.command[2:]) for step in ran] == [["--help"], ["--steps", "3"]]


def test_bench_without_a_match_lists_what_there_is(
    ran: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dev.main(["bench", "no-such-benchmark"]) == 1
    assert "no benchmark has ['no-such-benchmark']" in capsys.readouterr().err
    assert ran == []


def test_error_of_a_step_is_shown_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(root: Path, again: bool = False) -> Environment:
        raise DevError("install a compiler")

    monkeypatch.setattr(dev, "prepare", fail)
    assert dev.main(["setup"]) == 1
    assert "dev.py: error: install a compiler" in capsys.readouterr().err


def test_missing_program_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="run `python3 tools/dev.py setup --again`"):
        run_shown(Step("x", [str(tmp_path / "absent")]), cwd=tmp_path, env={})


def test_failing_logged_step_keeps_only_the_end_of_its_output(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(4)"
    with pytest.raises(DevError) as error:
        run_logged(
            Step("pip", [sys.executable, "-c", code]), cwd=tmp_path, env={}, log=tmp_path / "log"
        )
    message = str(error.value)
    assert "pip failed with status 4" in message
    assert "line 99" in message
    assert "line 5\n" not in message


def test_report_counts_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Outcome("a", 0, 1.0), Outcome("b", 2, 3.0)]) == 1
    assert "1 of 2 steps failed in 4 s: b" in capsys.readouterr().out
    assert report([Outcome("a", 0, 1.0)]) == 0
