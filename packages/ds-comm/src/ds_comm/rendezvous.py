"""Who am I and where do the ranks meet: read from the environment of the launcher.

Pure: a mapping in, a value or a typed error out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_comm.errors import MeshError

__all__ = ["DEFAULT_PORT", "Rendezvous", "discover", "first_host"]

DEFAULT_PORT = 29500

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = re.compile(rf"(?:[^\[\],\s]|{_RANGES})+")


@dataclass(frozen=True)
class Rendezvous:
    """Place of this process among the ranks, and the address where they meet."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this machine; the number of the device."""
    master_addr: str
    master_port: int
    local_world_size: int | None = None
    """Ranks on this machine, where the launcher says so."""
    source: str = "RANK and WORLD_SIZE"
    """Which launcher's variables were read."""

    def environ(self) -> dict[str, str]:
        """Return the variables that torch and other libraries read."""
        values = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.local_world_size is not None:
            values["LOCAL_WORLD_SIZE"] = str(self.local_world_size)
        return values


@dataclass(frozen=True)
class _Launcher:
    """Names of one launcher's variables; of alternatives the first that is set counts."""

    source: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()


_TORCHRUN = _Launcher(
    source="RANK and WORLD_SIZE",
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
)

# In order of precedence: an MPI started inside a Slurm allocation numbers the ranks.
_MANAGERS = (
    _Launcher(
        source="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        source="MPICH",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=(
            "MPI_LOCALRANKID",
            "PMI_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "SLURM_LOCALID",
        ),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
        nodelist=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
    _Launcher(
        source="Slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        nodelist=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    ),
)


def discover(
    environ: Mapping[str, str],
    *,
    default_port: int = DEFAULT_PORT,
    managers: bool = True,
) -> Rendezvous | None:
    """Read this process's place from a launcher's environment.

    ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` (torchrun, ``ds run``) come first, then Open MPI,
    then MPICH and other PMI launchers, then Slurm.  ``MASTER_ADDR``, ``MASTER_PORT`` and
    ``LOCAL_RANK`` complete what a manager does not say.

    Args:
        environ: the environment, ``os.environ`` or a test's dictionary.
        default_port: used where ``MASTER_PORT`` is not set.
        managers: whether to look at MPI and Slurm variables at all.

    Returns:
        The rendezvous, or None when no launcher has left a trace.

    Raises:
        MeshError: variables are missing, malformed or contradict each other.
    """
    env = _Reader(environ)
    candidates = _MANAGERS if managers else ()
    manager = next((each for each in candidates if env.first(each.rank) is not None), None)
    has_rank, has_size = env.first(("RANK",)) is not None, env.first(("WORLD_SIZE",)) is not None
    alone = env.integer(("WORLD_SIZE",)) == 1
    if has_rank and has_size and (manager is None or alone or env.first(("MASTER_ADDR",))):
        return _read(env, _TORCHRUN, default_port)
    if manager is None:
        if has_rank or has_size or env.first(("LOCAL_RANK",)) is not None:
            raise MeshError(
                f"incomplete launch environment: {env.show('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}. "
                "Start with `ds run`, torchrun, mpirun or srun, set RANK and WORLD_SIZE, or unset "
                "all three to run one process"
            )
        return None
    found = _read(env, manager, default_port)
    for name, value in (("RANK", found.rank), ("WORLD_SIZE", found.world_size)):
        given = env.integer((name,))
        if given is not None and given != value:
            raise MeshError(
                f"contradictory launch environment: {name}={given}, but {manager.source} says "
                f"{value}. Unset {name}, or set all of RANK, WORLD_SIZE and MASTER_ADDR"
            )
    return found


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, e.g. ``n007`` of ``n[007-012,20],m1``.

    Raises:
        MeshError: the list is empty or malformed.
    """
    match = _HOST.match(nodelist)
    if match is None or nodelist[match.end() : match.end() + 1] not in ("", ","):
        raise MeshError(
            f"the Slurm node list {nodelist!r} cannot be read: expected hosts like n1,n2 or "
            "n[01-04,07]. Set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(_RANGES, lambda ranges: re.split(r"[-,\]]", ranges[0][1:])[0], match[0])


class _Reader:
    """Typed access to an environment; an empty value counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def first(self, names: tuple[str, ...]) -> tuple[str, str] | None:
        """Return (name, value) of the first of ``names`` that is set."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                return name, value
        return None

    def name(self, names: tuple[str, ...]) -> str:
        """Return the first of ``names`` that is set, else the first."""
        found = self.first(names)
        return names[0] if found is None else found[0]

    def integer(self, names: tuple[str, ...]) -> int | None:
        """Return the value of the first that is set, as a non-negative integer."""
        found = self.first(names)
        if found is None:
            return None
        name, value = found
        if not (value.isascii() and value.isdigit()):
            raise MeshError(f"{name}={value!r} is not a non-negative integer")
        return int(value)

    def show(self, *names: str) -> str:
        """Return ``A=1, B not set`` for a message."""
        parts = []
        for name in names:
            found = self.first((name,))
            parts.append(f"{name} not set" if found is None else f"{name}={found[1]}")
        return ", ".join(parts)


def _read(env: _Reader, launcher: _Launcher, default_port: int) -> Rendezvous:
    rank, world_size = env.integer(launcher.rank), env.integer(launcher.world_size)
    rank_name, size_name = env.name(launcher.rank), env.name(launcher.world_size)
    if rank is None or world_size is None:
        raise MeshError(
            f"incomplete {launcher.source} environment: {env.show(*launcher.rank)}, "
            f"{env.show(*launcher.world_size)}"
        )
    if world_size < 1:
        raise MeshError(f"{size_name}={world_size} is not possible: a job has at least one rank")
    if rank >= world_size:
        raise MeshError(
            f"{rank_name}={rank} is not possible with {size_name}={world_size}: "
            f"ranks go from 0 to {world_size - 1}"
        )
    local_world_size = env.integer(launcher.local_world_size)
    addr = _master_addr(env, launcher, world_size, local_world_size)
    local_rank = _local_rank(env, launcher, rank, world_size, local_world_size, addr)
    port = env.integer(("MASTER_PORT",))
    port = default_port if port is None else port
    if not 1 <= port <= 65535:
        raise MeshError(f"MASTER_PORT={port} is not a port: 1 to 65535")
    return Rendezvous(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=addr,
        master_port=port,
        local_world_size=local_world_size,
        source=launcher.source,
    )


def _master_addr(
    env: _Reader, launcher: _Launcher, world_size: int, local_world_size: int | None
) -> str:
    given = env.first(("MASTER_ADDR",))
    if given is not None:
        return given[1]
    nodelist = env.first(launcher.nodelist)
    if nodelist is not None:
        return first_host(nodelist[1])
    one_machine = launcher is not _TORCHRUN and local_world_size == world_size
    if world_size == 1 or one_machine:
        return "127.0.0.1"
    raise MeshError(
        f"{launcher.source} starts {world_size} ranks, but MASTER_ADDR is not set: set it to the "
        "host of rank 0 (127.0.0.1 when all ranks are on one machine), on every rank"
    )


def _local_rank(
    env: _Reader,
    launcher: _Launcher,
    rank: int,
    world_size: int,
    local_world_size: int | None,
    addr: str,
) -> int:
    names = tuple(dict.fromkeys((*launcher.local_rank, "LOCAL_RANK")))
    local_rank = env.integer(names)
    if local_world_size is not None and not 1 <= local_world_size <= world_size:
        raise MeshError(
            f"{local_world_size} ranks on this machine are not possible with {world_size} in all"
        )
    if local_rank is None:
        if world_size in (1, local_world_size) or addr in ("127.0.0.1", "localhost", "::1"):
            return rank
        raise MeshError(
            f"the local rank is not known: {env.show(*names)}. "
            "Set LOCAL_RANK to the index of this process on its machine"
        )
    limit = world_size if local_world_size is None else local_world_size
    if local_rank >= limit:
        raise MeshError(
            f"local rank {local_rank} is not possible: {limit} ranks "
            f"{'in all' if local_world_size is None else 'on this machine'}"
        )
    return local_rank
