"""init_distributed: a world of one, several ranks, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import CommError, ConfigError, MeshError, init_distributed
from ds_comm.init import timeout_from
from ds_comm.testing.plugin import Ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environ() -> None:
    for name in NAMES:
        os.environ.pop(name, None)


def total() -> float:
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    return float(tensor)


def again() -> tuple[bool, float]:
    before = dist.group.WORLD
    init_distributed(world_size=17, rank=3)
    return dist.group.WORLD is before, total()


def from_torchrun() -> tuple[float, str]:
    ds_comm.destroy()
    assert not ds_comm.is_initialized()
    init_distributed(verbose=False)
    assert ds_comm.is_initialized()
    return total(), dist.get_backend()


def from_launcher(rank_name: str, size_name: str, local_name: str) -> tuple[float, dict[str, str]]:
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    port = os.environ["MASTER_PORT"]
    ds_comm.destroy()
    clean_environ()
    os.environ.update({rank_name: rank, size_name: world_size, local_name: rank})
    if rank_name == "SLURM_PROCID":
        os.environ["SLURM_JOB_NODELIST"] = "localhost"
    else:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    init_distributed(distributed_port=int(port), timeout=timedelta(seconds=30))
    return total(), {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def from_arguments(folder: str) -> float:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ds_comm.destroy()
    clean_environ()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="5")  # stale, from an earlier world
    init_distributed("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    return total()


def alone() -> dict[str, str]:
    ds_comm.destroy()
    clean_environ()
    init_distributed()
    assert total() == 1.0
    first = {name: os.environ[name] for name in NAMES}
    ds_comm.destroy()
    ds_comm.destroy()
    init_distributed()  # now from the environment that it has filled itself
    assert total() == 1.0
    return first


def refused() -> dict[str, str]:
    ds_comm.destroy()
    clean_environ()
    messages = {}

    def expect(name: str, kind: type[Exception], **arguments: object) -> None:
        with pytest.raises(kind) as caught:
            init_distributed(**arguments)  # type: ignore[arg-type]
        messages[name] = str(caught.value)
        assert not dist.is_initialized()
        assert "MASTER_PORT" not in os.environ

    expect("not required", CommError, dist_init_required=False)
    expect("half", MeshError, rank=1)
    expect("other half", MeshError, world_size=1)
    expect("outside", MeshError, rank=2, world_size=2, init_method="tcp://127.0.0.1:1")
    expect("backend", CommError, dist_backend="no_such")
    expect("method", CommError, rank=0, world_size=1, init_method="bogus://x")
    os.environ["DEEPSPEED_TIMEOUT"] = "soon"
    expect("time-out", ConfigError)
    return messages


def too_few(port: int) -> str:
    ds_comm.destroy()
    clean_environ()
    with pytest.raises(CommError) as caught:
        init_distributed(
            rank=1,
            world_size=2,
            init_method=f"tcp://127.0.0.1:{port}",
            timeout=timedelta(seconds=1),
        )
    return str(caught.value)


def test_second_call_does_nothing(ranks: Ranks) -> None:
    assert ranks(2, again) == [(True, 3.0)] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_torchrun_environment(ranks: Ranks, world_size: int) -> None:
    expected = float(sum(range(1, world_size + 1)))
    assert ranks(world_size, from_torchrun) == [(expected, "gloo")] * world_size


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ],
)
def test_manager_environments(ranks: Ranks, names: tuple[str, str, str]) -> None:
    results = ranks(2, from_launcher, *names)
    for rank, (value, environ) in enumerate(results):
        assert value == 3.0
        assert environ == {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


def test_arguments_win_over_a_stale_environment(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    assert ranks(2, from_arguments, str(folder)) == [3.0, 3.0]


def test_world_of_one_without_environment(ranks: Ranks) -> None:
    (environ,) = ranks(1, alone)
    port = int(environ.pop("MASTER_PORT"))
    assert 1024 <= port <= 65535
    assert environ == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_what_is_refused(ranks: Ranks) -> None:
    (messages,) = ranks(1, refused)
    assert "there is no default process group" in messages["not required"]
    assert "rank=1 and world_size=-1 must be given together" in messages["half"]
    assert "rank=-1 and world_size=1 must be given together" in messages["other half"]
    assert "RANK=2 is not possible with WORLD_SIZE=2" in messages["outside"]
    assert "'no_such' is not available" in messages["backend"]
    assert "gloo" in messages["backend"]
    assert "bogus" in messages["method"]
    assert "DEEPSPEED_TIMEOUT='soon'" in messages["time-out"]


def test_ranks_that_do_not_meet(ranks: Ranks) -> None:
    (text,) = ranks(1, too_few, 9)
    assert "rank 1 of 2 could not join the others at tcp://127.0.0.1:9" in text
    assert "within 1 s" in text


@pytest.mark.parametrize(
    ("environ", "minutes"),
    [
        ({}, 10),
        ({"DEEPSPEED_TIMEOUT": "30"}, 30),
        ({"DS_TIMEOUT": "0.5"}, 0.5),
        ({"DS_TIMEOUT": "5", "DEEPSPEED_TIMEOUT": "30"}, 5),
        ({"DS_TIMEOUT": "", "DEEPSPEED_TIMEOUT": "30"}, 30),
    ],
)
def test_timeout_in_minutes(environ: dict[str, str], minutes: float) -> None:
    assert timeout_from(environ) == timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e30", "ten"])
def test_timeout_that_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="not a positive number of minutes"):
        timeout_from({"DS_TIMEOUT": text})


def test_import_is_quiet_and_light() -> None:
    program = """
import json, sys, threading, time
import pydantic, torch, torch.distributed
start = time.perf_counter()
import ds_comm
spent = time.perf_counter() - start
leaves = [n for n in sys.modules if n.startswith("ds_comm.") and n.split(".")[1] in
          ("testing", "config", "tensor", "sequence", "telemetry")]
print(json.dumps([spent, threading.active_count(), torch.cuda.is_initialized(), leaves,
                  torch.distributed.is_initialized()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    spent, threads, accelerator, leaves, formed = json.loads(done.stdout)
    assert done.stderr == ""
    assert (threads, accelerator, leaves, formed) == (1, False, [], False)
    assert spent < 0.5, "the budget is 50 ms on a quiet machine"
