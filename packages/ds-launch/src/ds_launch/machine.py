"""What this machine offers to ranks, found without torch: cores and accelerators."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_CGROUP_CPU = "/sys/fs/cgroup/cpu.max"


class DeviceKind(NamedTuple):
    """How accelerators of one vendor show without their runtime.

    Attributes:
        variable: Environment variable that lists the visible ones.
        prefix: Path of a device file without the number at its end.
    """

    variable: str
    prefix: str


DEVICE_KINDS = (
    DeviceKind("CUDA_VISIBLE_DEVICES", "/dev/nvidia"),
    DeviceKind("ASCEND_RT_VISIBLE_DEVICES", "/dev/davinci"),
)
"""Vendors whose devices are counted. Others: say the number of ranks with ``--num-ranks``."""


def usable_cores(cgroup_file: str = _CGROUP_CPU) -> int:
    """Return how many cores this process may use: its affinity mask, cut by a container's quota.

    Args:
        cgroup_file: The cgroup v2 file with quota and period in microseconds.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        with open(cgroup_file, encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):  # no cgroup v2, or none mounted in this container
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, -(-int(quota) // int(period))))  # rounded up


def accelerator_count(environ: Mapping[str, str], root: str = "/") -> int:
    """Return the number of accelerators that ranks started with ``environ`` would see.

    A visible-devices variable is honoured as a list; without one, device files are counted: the
    first vendor of ``DEVICE_KINDS`` that has either decides.
    ``DS_ACCELERATOR=cpu`` means none.

    Args:
        environ: The environment of the job.
        root: Where the device files are looked for (tests pass another one).
    """
    if environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    for kind in DEVICE_KINDS:
        listed = environ.get(kind.variable)
        if listed is not None:
            return _visible(listed)
        present = _device_files(os.path.join(root, kind.prefix.lstrip("/")))
        if present:
            return present
    return 0


def _visible(listed: str) -> int:
    """Count a visible-devices list as the CUDA runtime does: it ends at the first invalid entry."""
    count = 0
    for entry in listed.split(","):
        entry = entry.strip()
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def _device_files(prefix: str) -> int:
    """Count the files that are named ``prefix`` and a number."""
    folder, start = os.path.split(prefix)
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return sum(name.startswith(start) and name[len(start) :].isdecimal() for name in names)
