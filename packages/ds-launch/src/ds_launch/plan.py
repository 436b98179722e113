"""The plan of a job: one frozen description per rank, made before anything is started.

Pure functions: whoever starts the processes (this machine today) only reads the plan.

[Note: imports of a launch]
What is imported on the way to a rank is paid at every start, so what only some commands need is
imported where they need it, and plain records are named tuples: ``dataclasses`` imports
``inspect``, which costs as much as all of this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

RUN_ID = "DS_RUN_ID"
"""Variable that marks every process of a job, so that all of them can be found at its end."""


class RankPlan(NamedTuple):
    """How one rank is started.

    Attributes:
        rank: Global rank, from 0.
        argv: The command as a list of words; it is never joined and split again.
        variables: What is set in its environment on top of the launcher's own.
    """

    rank: int
    argv: tuple[str, ...]
    variables: Mapping[str, str]


class Program(NamedTuple):
    """What every rank runs.

    Attributes:
        interpreter: Python with its options, or empty when ``script`` is a program itself.
        script: Script path, module name or program.
        arguments: The user's words, kept byte for byte.
        pass_local_rank: Whether ``--local_rank=N`` is put before the user's words.
    """

    interpreter: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    pass_local_rank: bool = False

    def argv(self, local_rank: int) -> tuple[str, ...]:
        """Return the command of the rank with this local number."""
        flag = (f"--local_rank={local_rank}",) if self.pass_local_rank else ()
        return (*self.interpreter, self.script, *flag, *self.arguments)


def plan_local(
    program: Program,
    *,
    num_ranks: int,
    master_addr: str,
    master_port: int,
    cores: int,
    run_id: str,
    environ: Mapping[str, str],
) -> tuple[RankPlan, ...]:
    """Plan ``num_ranks`` ranks on this machine.

    Each gets the variables of torch's and DeepSpeed's launchers (RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_SIZE, LOCAL_WORLD_SIZE, CROSS_RANK, CROSS_SIZE, MASTER_ADDR, MASTER_PORT), a share of
    the cores as OMP_NUM_THREADS, PYTHONUNBUFFERED so that its lines appear when they are printed,
    and PYTHONFAULTHANDLER so that a crash in native code shows where it was. The last three are
    left alone where ``environ`` has them.

    Args:
        program: What to run.
        num_ranks: At least 1.
        master_addr: Where rank 0 listens.
        master_port: And on which port.
        cores: Cores of this machine to be shared.
        run_id: Mark of the job; a launch inside another one extends the outer mark.
        environ: The launcher's environment.
    """
    outer = environ.get(RUN_ID)
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        RUN_ID: f"{outer}/{run_id}" if outer else run_id,
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    shared.update({name: value for name, value in defaults.items() if name not in environ})
    return tuple(
        RankPlan(
            rank=rank,
            argv=program.argv(rank),
            variables={"RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
        )
        for rank in range(num_ranks)
    )


def shell_lines(plans: Sequence[RankPlan]) -> str:
    """Return one line per rank that a POSIX shell runs as the launcher would."""
    import shlex  # only a dry run needs it

    lines = []
    for plan in plans:
        variables = [f"{name}={shlex.quote(value)}" for name, value in plan.variables.items()]
        lines.append(" ".join(["env", *variables, shlex.join(plan.argv)]))
    return "".join(f"{line}\n" for line in lines)
