#!/usr/bin/env python3
"""One command for everything a developer does here; needs nothing but Python 3.10 or newer.

The first call makes the environment `.venv` and installs every package in place; later calls
notice that nothing changed. A torch that is installed already is kept.

Examples:
    python3 tools/dev.py setup                  make or update .venv, no more
    python3 tools/dev.py demo                   train, resume, export and sample a language model
    python3 tools/dev.py demo -- --help         options of the demo itself
    python3 tools/dev.py test                   linter, types, package graph and every test
    python3 tools/dev.py test --fast            leave out slow tests and tox
    python3 tools/dev.py test packages/ds-zero/tests -k layout      only pytest, on these
    python3 tools/dev.py bench                  every benchmark
    python3 tools/dev.py lint                   linter, types and package graph
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# The standard library only, so that these run before anything is installed.
from dev_env import Environment, prepare
from dev_steps import DevError, Outcome, Step, report, run_shown

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
# Environments of tox that need no torch: they show in seconds that a package
# stands on its declared dependencies alone.
CHEAP_TOX = "launch,aio,graph"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    # What a command does not know itself belongs to the demo or to pytest.
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    rest = [item for item in rest if item != "--"]
    command: Callable[[argparse.Namespace, list[str]], int] = arguments.command
    if rest and command not in {_demo, _test}:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return command(arguments, rest)
    except DevError as error:
        print(f"\ndev.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndev.py: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace, list[str]], int], help_: str, examples: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=help_,
            description=f"{help_[0].upper()}{help_[1:]}.\n\nExamples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(command=run)
        return command

    setup = add(
        "setup",
        _setup,
        "make or update the environment .venv",
        "    python3 tools/dev.py setup\n    python3 tools/dev.py setup --again",
    )
    setup.add_argument("--again", action="store_true", help="install even if nothing changed")
    add(
        "demo",
        _demo,
        "train a small language model on Shakespeare under ZeRO on two ranks",
        "    python3 tools/dev.py demo\n    python3 tools/dev.py demo -- --help",
    )
    test = add(
        "test",
        _test,
        "run the linter, the type checker, the package graph, tox and every test",
        "    python3 tools/dev.py test\n    python3 tools/dev.py test --fast\n"
        "    python3 tools/dev.py test --tox\n"
        "    python3 tools/dev.py test packages/ds-zero/tests -k layout",
    )
    test.add_argument("--fast", action="store_true", help="leave out slow tests and tox")
    test.add_argument(
        "--tox",
        action="store_true",
        help="run every tox environment (each installs torch: minutes and gigabytes), no more",
    )
    bench = add(
        "bench",
        _bench,
        "run the benchmarks of the packages and the training step beside its peers",
        "    python3 tools/dev.py bench\n    python3 tools/dev.py bench train_step",
    )
    bench.add_argument("names", nargs="*", metavar="NAME", help="only those with NAME in the path")
    add("lint", _lint, "run the linter, types and package graph", "    python3 tools/dev.py lint")
    return parser


def _setup(arguments: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(ROOT, again=arguments.again)
    print(f"{environment.path} is up to date: activate it with `. {environment.path}/bin/activate`")
    return 0


def _demo(arguments: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(ROOT)
    script = ROOT / "examples" / "shakespeare" / "demo.py"
    return _run(environment, Step("demo", [str(environment.python), str(script), *rest])).status


def _test(arguments: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(ROOT)
    python = str(environment.python)
    pytest = [python, "-m", "pytest", *rest]
    if arguments.tox:
        return _run(environment, Step("tox", [python, "-m", "tox", "run"])).status
    if arguments.fast:
        pytest += ["-m", "not slow"]
    if rest:
        return _run(environment, Step("tests", pytest)).status
    steps = _lint_steps(environment)
    if not arguments.fast:
        tox = [python, "-m", "tox", "run", "-e", CHEAP_TOX]
        steps.append(Step("packages on their declared dependencies alone", tox))
    # Last, so that its closing line with the counts is what a reader of the log finds.
    steps.append(Step("tests", pytest))
    return report([_run(environment, step) for step in steps])


def _bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(ROOT)
    steps = [
        Step(str(path.relative_to(ROOT)), [str(environment.python), str(path)])
        for path in sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    ]
    chosen = [
        step
        for step in steps
        if not arguments.names or any(name in step.title for name in arguments.names)
    ]
    if not chosen:
        titles = ", ".join(step.title for step in steps) or "none"
        raise DevError(f"no benchmark has {arguments.names} in its path; there are: {titles}")
    return report([_run(environment, step) for step in chosen])


def _lint(arguments: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(ROOT)
    return report([_run(environment, step) for step in _lint_steps(environment)])


def _lint_steps(environment: Environment) -> list[Step]:
    python = str(environment.python)
    return [
        Step("linter", [python, "-m", "ruff", "check", "."]),
        Step("types", [python, "-m", "mypy"]),
        Step("package graph", [python, str(ROOT / "tools" / "check_graph.py")]),
    ]


def _run(environment: Environment, step: Step) -> Outcome:
    return run_shown(step, cwd=ROOT, env=environment.variables())


if __name__ == "__main__":
    sys.exit(main())
