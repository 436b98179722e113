"""Form, query and destroy the default process group."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from ds_comm import device
from ds_comm.errors import CommError, ConfigError, MeshError
from ds_comm.logging import get_logger
from ds_comm.rendezvous import DEFAULT_PORT, Rendezvous, discover

__all__ = ["destroy", "init_distributed", "is_initialized", "timeout_from"]

_LOGGER = get_logger(__name__)
_DEFAULT_TIMEOUT_MINUTES = 10.0
_TIMEOUT_NAMES = ("DS_TIMEOUT", "DEEPSPEED_TIMEOUT")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Form torch's default process group from the launcher's environment; collective.

    Does nothing if the group exists.  Otherwise reads torchrun's variables, then Open MPI's,
    MPICH's and Slurm's (see ``discover``); without any of them this process is a world of one.
    Makes the device of the local rank current, and sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` for libraries that read them.

    Args:
        dist_backend: torch's name of a backend, e.g. ``gloo``; by default the device's own, with
            gloo beside it for tensors on the CPU.
        auto_mpi_discovery: whether to look at MPI and Slurm variables.
        distributed_port: port of rank 0 where ``MASTER_PORT`` is not set.
        verbose: log one line on rank 0.
        timeout: for collectives; by default ``DS_TIMEOUT`` or ``DEEPSPEED_TIMEOUT`` minutes, else
            10 minutes.
        init_method: torch's rendezvous URL (``tcp://…``, ``file://…``) in place of
            ``MASTER_ADDR``.
        dist_init_required: False refuses to form a group: it must exist already.
        rank: this process's rank where no launcher says it; needs ``world_size``.
        world_size: number of ranks; needs ``rank``.

    Raises:
        MeshError: the environment or the arguments are incomplete or contradict each other.
        ConfigError: ``DS_ACCELERATOR`` or the time-out variable has no usable value.
        CommError: the backend is missing, or the ranks did not meet.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise CommError(
            "dist_init_required is False, but there is no default process group: form it first, "
            "or leave dist_init_required at None"
        )
    limit = timeout_from(os.environ) if timeout is None else timeout
    place = _place(rank, world_size, distributed_port, auto_mpi_discovery, init_method)
    backend = _checked_backend(dist_backend)
    device.set_device(place.local_rank)
    before = {name: os.environ.get(name) for name in place.environ()}
    os.environ.update(place.environ())
    try:
        _form(place, backend, limit, init_method)
    except CommError:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        raise
    if set(backend.replace("cpu:", "").split(",")) == {"gloo"}:
        # gloo's threads abort the process if they are still there when it ends.
        atexit.register(destroy)
    if verbose:
        _LOGGER.info(
            "process group of %d rank%s over %s (from %s)",
            place.world_size,
            "" if place.world_size == 1 else "s",
            backend,
            place.source,
        )


def is_initialized() -> bool:
    """Tell whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def destroy() -> None:
    """Destroy all process groups of this process, if any.

    Every rank should call it, after its last collective; it does not wait for the others.
    """
    if is_initialized():
        dist.destroy_process_group()


def timeout_from(environ: Mapping[str, str]) -> timedelta:
    """Return the time-out of collectives: ``DS_TIMEOUT`` or ``DEEPSPEED_TIMEOUT`` in minutes.

    Raises:
        ConfigError: the value is not a positive number.
    """
    for name in _TIMEOUT_NAMES:
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            limit = timedelta(minutes=float(text))
        except (ValueError, OverflowError):
            limit = timedelta(0)
        if limit <= timedelta(0):
            raise ConfigError(f"{name}={text!r} is not a positive number of minutes")
        return limit
    return timedelta(minutes=_DEFAULT_TIMEOUT_MINUTES)


def _place(
    rank: int, world_size: int, port: int, auto_mpi_discovery: bool, init_method: str | None
) -> Rendezvous:
    """Combine explicit arguments with the environment; a world of one without either."""
    environ = dict(os.environ)
    explicit = rank != -1 or world_size != -1
    if explicit:
        if rank == -1 or world_size == -1:
            raise MeshError(
                f"rank={rank} and world_size={world_size} must be given together, or neither"
            )
        _overlay(environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if init_method is not None:
        # The URL is the meeting point; all ranks are here unless it names another machine.
        url = urlsplit(init_method)
        environ["MASTER_ADDR"] = url.hostname or "127.0.0.1"
        if url.port is not None:
            environ["MASTER_PORT"] = str(url.port)
    found = discover(environ, default_port=port, managers=auto_mpi_discovery)
    if found is not None:
        return replace(found, source="arguments") if explicit else found
    return Rendezvous(
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=_free_port(),
        local_world_size=1,
        source="a single process",
    )


def _overlay(environ: dict[str, str], given: dict[str, str]) -> None:
    """Let arguments win over the environment, and say so where the two differ."""
    differing = [name for name, value in given.items() if environ.get(name, value) != value]
    if differing:
        _LOGGER.warning(
            "init_distributed was called with %s; the environment's %s and its local rank are "
            "ignored",
            ", ".join(f"{name.lower()}={value}" for name, value in given.items()),
            ", ".join(f"{name}={environ[name]}" for name in differing),
        )
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            environ.pop(name, None)
    environ.update(given)


def _checked_backend(name: str | None) -> str:
    if name is None:
        kind, own = device.device_type(), device.backend_name()
        return own if kind == "cpu" else f"cpu:gloo,{kind}:{own}"
    parts = [part.rpartition(":")[2] for part in name.lower().split(",")]
    missing = [part for part in parts if not dist.is_backend_available(part)]
    if missing:
        known = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
        raise CommError(
            f"backend {name!r} is not available in this torch: it has {', '.join(known)}"
        )
    return name.lower()


def _form(place: Rendezvous, backend: str, limit: timedelta, init_method: str | None) -> None:
    alone = place.world_size == 1 and init_method is None
    try:
        dist.init_process_group(
            backend,
            # A world of one meets nobody: no port that could be taken.
            store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]  # public
            init_method=None if alone else init_method or "env://",
            rank=place.rank,
            world_size=place.world_size,
            timeout=limit,
        )
    except (RuntimeError, ValueError, TimeoutError, OSError) as error:
        where = init_method or f"{place.master_addr}:{place.master_port}"
        raise CommError(
            f"rank {place.rank} of {place.world_size} could not join the others at {where} "
            f"over {backend} within {limit.total_seconds():g} s: {error}. "
            f"Check that all {place.world_size} ranks were started and can reach that address"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
