"""Facts about the machine for `ds report`, read from the kernel's text files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_X86_LEVELS = (
    ("x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"),
    ("x86-64-v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"),
    ("x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)
_EXTRAS = (
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
)


class Cpu(NamedTuple):
    """What a CPU is.

    Attributes:
        model: Its name as the kernel gives it, ``""`` if it gives none.
        level: ``x86-64-v1`` to ``-v4`` of the x86-64 psABI; ``""`` on other architectures.
        extras: Instruction sets beyond the level that kernels of this field use.
    """

    model: str
    level: str
    extras: tuple[str, ...]


def parse_cpuinfo(text: str) -> Cpu:
    """Read the first processor of ``/proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    level = ""
    if "flags" in fields:
        level = "x86-64-v1"
        for name, needed in _X86_LEVELS:
            if not flags.issuperset(needed.split()):
                break
            level = name
    extras = tuple(extra for extra in _EXTRAS if extra in flags)
    return Cpu(fields.get("model name", ""), level, extras)


def parse_meminfo(text: str) -> Mapping[str, int]:
    """Read ``/proc/meminfo``: field name to bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def parse_nvidia_driver(text: str) -> str:
    """Read the driver's version from ``/proc/driver/nvidia/version``; ``""`` if there is none."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else ""
