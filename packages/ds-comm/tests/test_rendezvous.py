"""What each launcher's environment means, and every way in which it can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.errors import MeshError
from ds_comm.rendezvous import Rendezvous, discover, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-008,011]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, None, id="address-only"),
        pytest.param({"RANK": "", "WORLD_SIZE": " "}, None, id="empty-is-not-set"),
        pytest.param(
            TORCHRUN,
            Rendezvous(3, 4, 1, "node0", 1234, 2, "RANK and WORLD_SIZE"),
            id="torchrun",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"},
            Rendezvous(0, 1, 0, "127.0.0.1", 29500, None, "RANK and WORLD_SIZE"),
            id="torchrun-one-rank",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"},
            Rendezvous(0, 1, 0, "node0", 29500, None, "RANK and WORLD_SIZE"),
            id="one-rank-with-address",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            Rendezvous(1, 2, 1, "localhost", 29500, None, "RANK and WORLD_SIZE"),
            id="one-machine-needs-no-local-rank",
        ),
        pytest.param(
            {**OPEN_MPI, "MASTER_ADDR": "10.0.0.1"},
            Rendezvous(5, 8, 1, "10.0.0.1", 29500, 4, "Open MPI"),
            id="open-mpi",
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"},
            Rendezvous(5, 8, 5, "127.0.0.1", 29500, 8, "Open MPI"),
            id="open-mpi-one-machine",
        ),
        pytest.param(
            {**OPEN_MPI, **TORCHRUN},
            Rendezvous(3, 4, 1, "node0", 1234, 2, "RANK and WORLD_SIZE"),
            id="torchrun-inside-mpirun",
        ),
        pytest.param(
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
            },
            Rendezvous(1, 2, 1, "127.0.0.1", 29500, 2, "MPICH"),
            id="mpich",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "4", **SLURM},
            Rendezvous(1, 4, 0, "gpu007", 29500, None, "MPICH"),
            id="pmi-under-slurm",
        ),
        pytest.param(SLURM, Rendezvous(2, 4, 0, "gpu007", 29500, None, "Slurm"), id="slurm"),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "77"},
            Rendezvous(2, 4, 0, "head", 77, None, "Slurm"),
            id="slurm-with-address",
        ),
        pytest.param(
            {
                **SLURM,
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "gpu011",
            },
            Rendezvous(1, 2, 0, "gpu011", 29500, None, "Slurm"),
            id="slurm-step-smaller-than-job",
        ),
        pytest.param(
            {**SLURM, "WORLD_SIZE": "4"},
            Rendezvous(2, 4, 0, "gpu007", 29500, None, "Slurm"),
            id="slurm-with-agreeing-world-size",
        ),
        pytest.param(
            {**SLURM, "WORLD_SIZE": "4", "RANK": "2"},
            Rendezvous(2, 4, 0, "gpu007", 29500, None, "Slurm"),
            id="slurm-completes-the-address",
        ),
        pytest.param(
            {**SLURM, "WORLD_SIZE": "1", "RANK": "0"},
            Rendezvous(0, 1, 0, "127.0.0.1", 29500, None, "RANK and WORLD_SIZE"),
            id="one-rank-inside-an-allocation",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None, id="salloc-shell-has-no-rank"
        ),
    ],
)
def test_environments(environ: dict[str, str], expected: Rendezvous | None) -> None:
    assert discover(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not possible with WORLD_SIZE=4: .* 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a non-negative integer"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a non-negative integer"),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0' is not"),
        ({**TORCHRUN, "WORLD_SIZE": "٤"}, "WORLD_SIZE='٤' is not"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not possible"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 is not possible: 2 ranks on this machine"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "5 ranks on this machine .* 4 in all"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "0 ranks on this machine"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "starts 4 ranks, but MASTER_ADDR is not set"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"},
            r"local rank is not known: LOCAL_RANK not set\. Set",
        ),
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE not set, LOCAL_RANK not set"),
        ({"WORLD_SIZE": "2"}, "RANK not set, WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0"),
        (OPEN_MPI, "Open MPI starts 8 ranks, but MASTER_ADDR is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "incomplete Open MPI .*OMPI_COMM_WORLD_SIZE not set"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not possible with SLURM_NTASKS=4"),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[007"}, r"'gpu\[007' cannot be read"),
        ({**SLURM, "SLURM_LOCALID": ""}, "local rank is not known: SLURM_LOCALID not set"),
        ({**SLURM, "WORLD_SIZE": "2"}, "contradictory .*WORLD_SIZE=2, but Slurm says 4"),
        ({**SLURM, "RANK": "1"}, "contradictory .*RANK=1, but Slurm says 2"),
    ],
)
def test_wrong_environments(environ: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        discover(environ)


def test_managers_can_be_left_out() -> None:
    assert discover(SLURM, managers=False) is None


def test_default_port_is_the_callers() -> None:
    found = discover(SLURM, default_port=4711)
    assert found is not None and found.master_port == 4711


def test_values_come_back_as_environment() -> None:
    found = discover(TORCHRUN)
    assert found is not None
    assert found.environ() == TORCHRUN
    assert discover(found.environ()) == found


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[001-004,007],m3", "n001"),
        ("n[7]", "n7"),
        ("n[12,3-5]", "n12"),
        ("gpu-[1,3-5]-x", "gpu-1-x"),
        ("r[1-2]n[01-04]", "r1n01"),
        ("a-b.example.org,c[1-2]", "a-b.example.org"),
        ("10.0.0.7,10.0.0.8", "10.0.0.7"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist", ["", ",", "n[", "n[]", "n[1-]", "n[a-b]", "n]1", "n[1-2", " n1", "n[1 - 2]"]
)
def test_malformed_nodelist(nodelist: str) -> None:
    with pytest.raises(MeshError, match="cannot be read"):
        first_host(nodelist)


@given(
    start=st.integers(0, 9999),
    length=st.integers(1, 50),
    width=st.integers(1, 6),
    tail=st.sampled_from(["", ",other", ",m[1-2]"]),
)
def test_first_host_keeps_leading_zeros(start: int, length: int, width: int, tail: str) -> None:
    first, last = f"{start:0{width}d}", f"{start + length:0{width}d}"
    assert first_host(f"node[{first}-{last}]{tail}") == f"node{first}"


@given(st.text(max_size=30))
def test_first_host_returns_a_plain_name_or_raises(nodelist: str) -> None:
    try:
        host = first_host(nodelist)
    except MeshError:
        return
    assert host and not set(host) & set("[], ")
