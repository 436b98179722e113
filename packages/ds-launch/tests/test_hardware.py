from __future__ import annotations

import pytest

from ds_launch.hardware import parse_cpuinfo, parse_meminfo, parse_nvidia_driver

V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = V2 + " abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level", "extras"),
    [
        ("fpu sse2", "x86-64-v1", ()),
        (V2, "x86-64-v2", ()),
        (V3, "x86-64-v3", ()),
        (V4 + " avx512_bf16 amx_tile", "x86-64-v4", ("avx512_bf16", "amx_tile")),
        # A level counts only on top of the ones below.
        (V4.replace("movbe", ""), "x86-64-v2", ()),
    ],
)
def test_x86(flags: str, level: str, extras: tuple[str, ...]) -> None:
    first = f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n"
    text = first + "\nprocessor\t: 1\nflags\t: x\n"
    assert parse_cpuinfo(text) == ("Some CPU", level, extras)


def test_arm() -> None:
    assert parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd sve\n") == (
        "",
        "",
        ("asimd", "sve"),
    )


def test_no_cpuinfo() -> None:
    assert parse_cpuinfo("") == ("", "", ())


def test_meminfo() -> None:
    text = "MemTotal:       24604448 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n"
    assert parse_meminfo(text) == {"MemTotal": 24604448 * 1024, "MemAvailable": 1048576}


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("", ""),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39\n"
            "GCC version:  gcc version 12.2.0\n",
            "535.54.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57  Release Build\n",
            "575.57",
        ),
    ],
)
def test_nvidia_driver(text: str, driver: str) -> None:
    assert parse_nvidia_driver(text) == driver
