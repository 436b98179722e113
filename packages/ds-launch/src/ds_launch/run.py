"""``ds run``: start a script on every rank of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_launch.errors import LaunchError, UsageError
from ds_launch.machine import accelerator_count, usable_cores
from ds_launch.options import Option, describe, parse, whole_number
from ds_launch.plan import Program, plan_local, shell_lines
from ds_launch.ports import DEFAULT_PORT, reserve_port

_COMMAND = "ds run"
_MOST_RANKS = 4096

OPTIONS = (
    Option(
        ("--num-ranks", "-n", "--num-gpus", "--num-accelerators", "--nproc-per-node"),
        "ranks to start; without it one per visible accelerator,\none on a machine without any",
        "N",
    ),
    Option(
        ("--master-port",),
        f"port on which rank 0 listens; without it {DEFAULT_PORT}, or the\n"
        "next free one when that is taken",
        "PORT",
    ),
    Option(("--master-addr",), "address on which rank 0 listens (127.0.0.1)", "ADDRESS"),
    Option(("--module", "-m"), "SCRIPT is a module, run as `python -m SCRIPT`"),
    Option(("--no-python",), "SCRIPT is a program, run without Python"),
    Option(
        ("--pass-local-rank",),
        "put --local_rank=N before the script's arguments; without\n"
        "it the rank is told by the environment (LOCAL_RANK)",
    ),
    Option(("--no-local-rank",), "the default, accepted for command lines of DeepSpeed"),
    Option(
        ("--log-dir", "--enable-each-rank-log"),
        "also write all output of each rank to DIR/rankN.log\n(replacing those of an earlier run)",
        "DIR",
    ),
    Option(("--tag-output",), "mark the lines of every rank, the first one's too"),
    Option(("--no-tag",), "mark no lines"),
    Option(
        ("--grace",),
        "seconds that ranks get to end by themselves after Ctrl-C or\n"
        "SIGTERM before they are killed (10)",
        "SECONDS",
    ),
    Option(("--num-nodes",), "only 1 for now", "N"),
    Option(("--launcher",), "only `local` for now", "NAME"),
    Option(("--quiet", "-q"), "do not tell of the port and the like"),
    Option(("--dry-run",), "print one shell command per rank and start nothing"),
    Option(("--help", "-h"), "show this text"),
)

_SEVERAL_MACHINES = "this version starts ranks on one machine only"
_BINDING = "this version leaves the placement on cores to the system (OMP_NUM_THREADS is set)"
_ELASTIC = "this version has no elastic training"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "-H",
            "--hostfile",
            "-i",
            "--include",
            "-e",
            "--exclude",
            "--node-rank",
            "--launcher-args",
            "--no-ssh",
            "--no-ssh-check",
            "--ssh-port",
            "--force-multi",
            "--venv-script",
        ),
        _SEVERAL_MACHINES,
    ),
    **dict.fromkeys(("--bind-cores-to-rank", "--bind-core-list"), _BINDING),
    **dict.fromkeys(("--elastic-training", "--min-elastic-nodes", "--max-elastic-nodes"), _ELASTIC),
    "--autotuning": "this version does not tune configurations",
    "--save-pid": "this version writes no pid file; a job's processes carry DS_RUN_ID",
    "--log-level": "use --quiet to hide the launcher's own lines",
}
"""Options of DeepSpeed's launcher that are refused by name, with the reason."""

HELP = f"""\
usage: ds run [options] SCRIPT [arguments of SCRIPT...]
       ds SCRIPT.py [arguments...]

Start SCRIPT on several ranks of this machine and wait for them. Options end at SCRIPT: all that
follows reaches it unchanged. Underscores are accepted for hyphens (--num_gpus).

{describe(OPTIONS)}

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, LOCAL_WORLD_SIZE, CROSS_RANK,
CROSS_SIZE, MASTER_ADDR, MASTER_PORT and DS_RUN_ID, and where they are not set OMP_NUM_THREADS,
PYTHONUNBUFFERED and PYTHONFAULTHANDLER. Rank 0 reads standard input.

The first rank that fails ends the others; ds run says which, shows the last lines it wrote and
exits with its status (128 + N for signal N). Ctrl-C and SIGTERM reach every rank; the status is
then 130 or 143. Nothing that a rank started is left running, unless it removes DS_RUN_ID from
its environment and starts a session of its own.

examples:
  ds run --num-ranks 2 train.py --deepspeed_config ds_config.json
  ds run -n 2 --module my_package.train --epochs 3
  ds run -n 4 --log-dir logs train.py
  ds run --dry-run train.py
"""


class RunOptions(NamedTuple):
    """What the options of ``ds run`` ask for.

    Attributes:
        num_ranks: Ranks, or ``None`` for one per accelerator.
        master_addr: Where rank 0 listens.
        master_port: The port, or ``None`` for a free one.
        log_dir: Folder for the ranks' logs, or ``None``.
        tags: ``auto``, ``all`` or ``none``.
        grace_s: Seconds between a signal and the kill.
        quiet: Whether the launcher keeps its own remarks to itself.
        dry_run: Whether only the commands are printed.
        program: What the ranks run.
    """

    num_ranks: int | None
    master_addr: str
    master_port: int | None
    log_dir: str | None
    tags: str
    grace_s: float
    quiet: bool
    dry_run: bool
    program: Program


def main(words: Sequence[str]) -> int:
    """Run ``ds run`` with these words and return its exit status.

    Raises:
        LaunchError: Nothing could be started.
    """
    values, rest = parse(words, OPTIONS, command=_COMMAND, refused=REFUSED)
    if "--help" in values:
        sys.stdout.write(HELP)
        return 0
    return _launch(read_options(values, rest), dict(os.environ))


def read_options(values: Mapping[str, str], rest: Sequence[str]) -> RunOptions:
    """Check parsed options and the script.

    Args:
        values: Option name to text.
        rest: The script and its arguments.

    Raises:
        UsageError: An option has an impossible value, or two contradict each other.
        LaunchError: The script does not exist or is not for Python.
    """

    def number(name: str, least: int, most: int) -> int | None:
        text = values.get(name)
        if text is None:
            return None
        return whole_number(name, text, least=least, most=most, command=_COMMAND)

    for first, second in (
        ("--module", "--no-python"),
        ("--tag-output", "--no-tag"),
        ("--pass-local-rank", "--no-local-rank"),
    ):
        if first in values and second in values:
            raise UsageError(f"{_COMMAND}: {first} and {second} contradict each other")
    for name, only in (("--num-nodes", "1"), ("--launcher", "local")):
        if values.get(name, only) != only:
            raise UsageError(
                f"{_COMMAND}: {name} {values[name]} is not available yet: {_SEVERAL_MACHINES}"
            )
    grace = number("--grace", 0, 86_400)
    return RunOptions(
        num_ranks=number("--num-ranks", 1, _MOST_RANKS),
        master_addr=values.get("--master-addr") or "127.0.0.1",
        master_port=number("--master-port", 1, 65_535),
        log_dir=values.get("--log-dir"),
        tags="all" if "--tag-output" in values else "none" if "--no-tag" in values else "auto",
        grace_s=10.0 if grace is None else float(grace),
        quiet="--quiet" in values,
        dry_run="--dry-run" in values,
        program=_read_program(values, rest),
    )


def _read_program(values: Mapping[str, str], rest: Sequence[str]) -> Program:
    if not rest:
        raise UsageError(f"{_COMMAND}: no script is given. `ds run --help` shows examples.")
    script, *arguments = rest
    interpreter: tuple[str, ...] = (sys.executable,)
    if "--module" in values:
        interpreter += ("-m",)
    elif "--no-python" in values:
        import shutil  # see [Note: imports of a launch]

        interpreter = ()
        found = shutil.which(script)
        if found is None:
            raise LaunchError(f"program {script!r} is not found or may not be executed")
        script = found
    else:
        check_script(script)
        if script.startswith("-"):  # after `--`: Python would read it as an option
            script = os.path.join(os.curdir, script)
    return Program(interpreter, script, tuple(arguments), "--pass-local-rank" in values)


def check_script(path: str) -> None:
    """Refuse what Python cannot run as a script.

    Raises:
        LaunchError: The file is missing, unreadable, a folder without ``__main__.py``, or
            evidently not Python.
    """
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise LaunchError(f"script {path!r} is a folder without __main__.py")
        return
    try:
        with open(path, "rb") as file:
            start = file.read(128)
    except OSError as error:
        raise LaunchError(f"script {path!r} cannot be read: {error.strerror}") from error
    first_line = start.partition(b"\n")[0]
    if start.startswith(b"\x7fELF") or (
        first_line.startswith(b"#!") and b"python" not in first_line
    ):
        raise LaunchError(
            f"script {path!r} is not a Python script; run programs and shell scripts with "
            "--no-python"
        )


def _launch(options: RunOptions, environ: Mapping[str, str]) -> int:
    if sys.platform != "linux":
        raise LaunchError(f"ds run needs Linux, this is {sys.platform}")
    devices = accelerator_count(environ)
    num_ranks = options.num_ranks or max(1, devices)
    reservation = reserve_port(options.master_port)
    plans = plan_local(
        options.program,
        num_ranks=num_ranks,
        master_addr=options.master_addr,
        master_port=reservation.port,
        cores=usable_cores(),
        run_id=os.urandom(6).hex(),
        environ=environ,
    )
    if options.dry_run:
        sys.stdout.buffer.write(os.fsencode(shell_lines(plans)))
        return 0
    # Imported here: --help and --dry-run start no process.
    from ds_launch.outcome import describe_outcome
    from ds_launch.output import Console
    from ds_launch.supervisor import Settings, run_job

    _open_standard_streams()
    console = Console()
    if not options.quiet:
        for remark in _remarks(options, num_ranks, devices, reservation.port):
            console.say(f"ds run: {remark}\n")
    if options.log_dir is not None:
        _make_log_dir(options.log_dir)
    settings = Settings(options.tags, options.log_dir, options.grace_s)
    outcome = run_job(plans, environ, settings, console)
    console.say(describe_outcome(outcome))
    console.flush()
    return outcome.exit_status


def _remarks(options: RunOptions, num_ranks: int, devices: int, port: int) -> list[str]:
    """Return what differs from what the user may expect."""
    remarks = []
    if options.master_port is None and port != DEFAULT_PORT:
        remarks.append(f"port {DEFAULT_PORT} is taken, the ranks use {port}")
    if 0 < devices < num_ranks:
        remarks.append(f"{num_ranks} ranks share {devices} accelerator(s)")
    return remarks


def _make_log_dir(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {path!r} cannot be made: {error.strerror}") from error


def _open_standard_streams() -> None:
    """Open closed standard streams (``<&-``) on the null device.

    Otherwise a pipe made later would get their number and be taken for them.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
