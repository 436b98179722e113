"""The device this process computes on, through ``torch.accelerator``; the CPU is a device.

Nothing here runs at import.  ``DS_ACCELERATOR`` chooses the device type: ``cpu``, or the type of
the accelerator that the installed torch was built for.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ds_comm.errors import CommError, ConfigError, MeshError
from ds_comm.logging import get_logger, log_once

__all__ = [
    "MemoryStats",
    "backend_name",
    "current_device",
    "device_count",
    "device_type",
    "manual_seed",
    "memory",
    "reset_peak_memory",
    "rng_state",
    "set_device",
    "set_rng_state",
    "supports_bf16",
    "synchronize",
]

_LOGGER = get_logger(__name__)
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process on its device."""

    allocated_bytes: int
    """In use by tensors; on the CPU the resident set of the process."""
    peak_bytes: int
    """High-water mark of the above since the start or the last ``reset_peak_memory``."""


def device_type() -> str:
    """Return the type of the device in use, e.g. ``cpu``, ``cuda`` or ``xpu``.

    Local; may initialise the accelerator's driver, not a context on it.

    Raises:
        ConfigError: ``DS_ACCELERATOR`` names a device that this torch or machine has not.
    """
    wanted = os.environ.get("DS_ACCELERATOR", "").strip().lower()
    if wanted == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = "cpu" if accelerator is None else accelerator.type
    if wanted not in ("", present):
        allowed = "cpu" if present == "cpu" else f"cpu, {present}"
        raise ConfigError(
            f"DS_ACCELERATOR={wanted!r} is not available: torch {torch.__version__} finds on this "
            f"machine: {allowed}. Unset DS_ACCELERATOR or set it to one of these"
        )
    return present


def device_count() -> int:
    """Return how many devices of ``device_type`` this process can use; 1 for the CPU."""
    return 1 if device_type() == "cpu" else torch.accelerator.device_count()


def current_device() -> torch.device:
    """Return the device that new tensors of this process should be on."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def set_device(local_rank: int) -> torch.device:
    """Make device number ``local_rank`` current and return it; on the CPU only returns it.

    Raises:
        MeshError: there are fewer devices than ranks on this machine.
    """
    if device_type() == "cpu":
        return torch.device("cpu")
    count = device_count()
    if not 0 <= local_rank < count:
        raise MeshError(
            f"local rank {local_rank} has no device: {count} of type {device_type()} are visible. "
            "Start at most that many ranks on this machine, or set DS_ACCELERATOR=cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return current_device()


def backend_name() -> str:
    """Return torch's communication backend for the device, e.g. ``gloo`` or ``nccl``.

    Raises:
        CommError: the installed torch was built without it.
    """
    kind = device_type()
    name = str(dist.get_default_backend_for_device(kind))
    if not dist.is_backend_available(name):
        raise CommError(f"torch {torch.__version__} has no backend {name!r}, which {kind} needs")
    return name


def synchronize() -> None:
    """Wait until the work queued on the current device is done; nothing to do on the CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def memory() -> MemoryStats:
    """Return current and peak memory of this process on its device.  Local, does not synchronise.

    On Linux the CPU's numbers are the kernel's resident set and its high-water mark; elsewhere
    only the high-water mark is known and stands for both.
    """
    kind = device_type()
    if kind != "cpu":
        module = torch.get_device_module(kind)
        return MemoryStats(
            allocated_bytes=int(module.memory_allocated()),
            peak_bytes=int(module.max_memory_allocated()),
        )
    if not _STATM.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return MemoryStats(allocated_bytes=peak, peak_bytes=peak)
    # The peak is read last, so that it cannot be below the current value.
    allocated = int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return MemoryStats(allocated_bytes=allocated, peak_bytes=max(allocated, _high_water_bytes()))


def _high_water_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory() -> None:
    """Start a new measurement of ``memory().peak_bytes``.

    Where the system keeps only one mark for the life of a process (not Linux, or a container that
    forbids it), this logs so once, and peaks go on counting from the start of the process.
    """
    kind = device_type()
    if kind != "cpu":
        torch.get_device_module(kind).reset_peak_memory_stats()
        return
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size
    except OSError as error:
        log_once(_LOGGER, "warning", "peak memory counts from the process start: %s", error)


def rng_state() -> torch.Tensor:
    """Return the state of the default random generator of the current device, as bytes."""
    kind = device_type()
    state: torch.Tensor = (
        torch.get_rng_state() if kind == "cpu" else torch.get_device_module(kind).get_rng_state()
    )
    return state


def set_rng_state(state: torch.Tensor) -> None:
    """Set the default random generator of the current device to a state of ``rng_state``."""
    kind = device_type()
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(kind).set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the default random generator of the current device, and no other."""
    kind = device_type()
    if kind == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(kind).manual_seed(seed)


def supports_bf16() -> bool:
    """Tell whether the device computes in bfloat16 itself, not by emulation."""
    kind = device_type()
    if kind == "cpu":
        return True
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        torch.ones(2, dtype=torch.bfloat16, device=kind).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True
