from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_launch.machine import accelerator_count, usable_cores


@pytest.fixture
def two_gpus(tmp_path: Path) -> str:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0, 1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-GPU-1/2/3"}, 2),
        ({"DS_ACCELERATOR": "cpu"}, 0),
        ({"DS_ACCELERATOR": "cuda"}, 2),
    ],
)
def test_accelerators(two_gpus: str, environ: dict[str, str], count: int) -> None:
    assert accelerator_count(environ, two_gpus) == count


def test_no_accelerator(tmp_path: Path) -> None:
    assert accelerator_count({}, str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("150000 100000", 2), ("100000 100000", 1), ("1000 100000", 1)],
)
def test_cores_are_cut_by_a_quota(tmp_path: Path, quota: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(str(file)) == (affinity if cores is None else min(cores, affinity))


def test_cores_without_a_cgroup(tmp_path: Path) -> None:
    assert usable_cores(str(tmp_path / "none")) == len(os.sched_getaffinity(0))
