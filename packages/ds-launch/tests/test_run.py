from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Ds

HOSTILE = ["--name", "a b", "it's", "$HOME", "x;y", "é", "", "--", "--num-ranks", "9", "\n", "*"]

SHOW_ARGS = """
import os, sys
print(os.environ["RANK"], [os.fsencode(word) for word in sys.argv[1:]])
"""


def listed(*words: str | bytes) -> bytes:
    return repr([os.fsencode(word) for word in words]).encode()


def test_environment_of_a_rank(ds: Ds) -> None:
    script = ds.script(
        """
        import json, os
        print(json.dumps(dict(os.environ)))
        """
    )
    done = ds(
        "run", "--quiet", "--num-ranks", "2", "--no-tag", "--master-addr", "localhost", script
    )
    assert (done.status, done.err) == (0, b"")
    ranks = {env["RANK"]: env for env in map(json.loads, done.out.splitlines())}
    assert sorted(ranks) == ["0", "1"]
    for rank, env in ranks.items():
        assert env["LOCAL_RANK"] == rank
        assert (env["WORLD_SIZE"], env["LOCAL_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2", "2")
        assert (env["CROSS_RANK"], env["CROSS_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "localhost"
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert env["PYTHONUNBUFFERED"] == "1"
    assert ranks["0"]["MASTER_PORT"] == ranks["1"]["MASTER_PORT"]


@pytest.mark.parametrize(
    ("environ", "words", "ranks"),
    [
        ({}, [], 1),
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, [], 2),
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, ["--num_gpus", "1"], 1),
        ({"CUDA_VISIBLE_DEVICES": "4,7", "DS_ACCELERATOR": "cpu"}, [], 1),
    ],
)
def test_number_of_ranks(ds: Ds, environ: dict[str, str], words: list[str], ranks: int) -> None:
    if not environ and os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has GPUs, which would be counted")
    script = ds.script("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    done = ds("run", "--no-tag", *words, script, env=environ)
    shown = environ.get("CUDA_VISIBLE_DEVICES", "None").encode() + b"\n"
    assert done.out == shown * ranks


def test_more_ranks_than_accelerators_is_said(ds: Ds) -> None:
    done = ds("run", "-n", "2", ds.script("pass"), env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.status == 0
    assert b"2 ranks share 1 accelerator" in done.err


@pytest.mark.parametrize("words", [["run", "-n", "2"], ["--num_accelerators=2"]])
def test_arguments_arrive_byte_for_byte(ds: Ds, words: list[str]) -> None:
    hostile: list[str | bytes] = [*HOSTILE, b"\xff\xfe\x80"]
    done = ds(*words, ds.script(SHOW_ARGS), *hostile)
    assert sorted(done.out.splitlines()) == [
        b"0 " + listed(*hostile),
        b"[r1] 1 " + listed(*hostile),
    ]


def test_arguments_of_a_module(ds: Ds) -> None:
    ds.script(SHOW_ARGS, name="toy_module.py")
    done = ds("run", "--module", "toy_module", *HOSTILE)
    assert done.out == b"0 " + listed(*HOSTILE) + b"\n"


def test_arguments_of_a_program(ds: Ds) -> None:
    done = ds("run", "--no_python", "sh", "-c", 'printf "%s|" "$RANK" "$@"', "sh", *HOSTILE)
    assert done.out == "|".join(["0", *HOSTILE, ""]).encode()


def test_double_dash_before_the_script(ds: Ds) -> None:
    ds.script(SHOW_ARGS, name="-odd.py")
    assert ds("run", "--", "-odd.py", "--", "x").out == b"0 " + listed("--", "x") + b"\n"


def test_local_rank_argument(ds: Ds) -> None:
    script = ds.script("import sys; print(sys.argv[1:])")
    done = ds("run", "-n", "2", "--no-tag", "--pass-local-rank", script, "--x")
    assert sorted(done.out.splitlines()) == [
        b"['--local_rank=0', '--x']",
        b"['--local_rank=1', '--x']",
    ]
    assert ds("run", "--no_local_rank", script, "--x").out == b"['--x']\n"


def test_folder_with_main(ds: Ds, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("print('main')")
    assert ds("run", "app").out == b"main\n"


def test_standard_input_goes_to_rank_0(ds: Ds, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("typed")
    script = ds.script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    with open(tmp_path / "input") as stdin:
        done = ds("run", "-n", "2", script, stdin=stdin)
    assert sorted(done.out.splitlines()) == [b"0 'typed'", b"[r1] 1 ''"]


def test_closed_standard_streams(ds: Ds) -> None:
    script = ds.script("open('done' + __import__('os').environ['RANK'], 'w').close()")
    done = ds("run", "--no-python", "sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-',
              sys.executable, "-m", "ds_launch", "run", "-n", "2", script)  # fmt: skip
    assert done.status == 0
    assert {"done0", "done1"} <= set(os.listdir(ds.folder))


def test_dry_run_starts_nothing(ds: Ds) -> None:
    script = ds.script("raise SystemExit('started')")
    done = ds("run", "-n", "2", "--dry-run", "--master_port", "29777", script, "a b")
    lines = done.out.decode().splitlines()
    assert done.status == 0
    assert len(lines) == 2
    assert "RANK=1 LOCAL_RANK=1 " in lines[1]
    assert "MASTER_PORT=29777" in lines[1]
    assert lines[1].endswith(f"{script} 'a b'")


def test_default_port_taken(ds: Ds) -> None:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("127.0.0.1", 29500))
        server.listen()
    except OSError:
        pass  # somebody else has it, which does as well
    with server:
        script = ds.script("import os; print(os.environ['MASTER_PORT'])")
        done = ds("run", script)
    assert done.status == 0
    assert 29500 < int(done.out) < 29700
    assert b"port 29500 is taken" in done.err
    assert ds("run", "--quiet", script).err == b""


def test_requested_port_taken(ds: Ds) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = ds("run", "--master-port", port, ds.script("print('started')"))
    assert (done.status, done.out) == (2, b"")
    assert port.encode() in done.err and b"another process listens" in done.err


def test_two_launches_get_two_ports(ds: Ds) -> None:
    script = ds.script(
        """
        import os, pathlib, time
        port = os.environ["MASTER_PORT"]
        pathlib.Path("port" + port).touch()
        while len(list(pathlib.Path(".").glob("port*"))) < 2:
            time.sleep(0.01)
        """
    )
    both = [ds.start("run", script) for _ in range(2)]
    assert [process.communicate(timeout=20) and process.returncode for process in both] == [0, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-ranks", "0"], "--num-ranks must be between 1 and"),
        (["--num-ranks", "-1"], "--num-ranks must be between 1 and"),
        (["--num-ranks", "two"], "whole number"),
        (["--num_gpus=1000000"], "must be between"),
        (["--master-port", "65536"], "--master-port must be between"),
        (["--hostfile", "h"], "--hostfile is not available yet"),
        (["--include=a"], "--include is not available yet"),
        (["--num_nodes", "2"], "--num-nodes 2 is not available yet"),
        (["--launcher", "pdsh"], "--launcher pdsh is not available yet"),
        (["--elastic_training"], "--elastic_training is not available yet"),
        (["--num-rank", "2"], "Did you mean '--num-ranks'"),
        (["--module", "--no-python"], "contradict each other"),
        (["--tag-output", "--no-tag"], "contradict each other"),
        (["-n", "2", "--nproc_per_node", "3"], "given twice"),
    ],
)
def test_refused_options(ds: Ds, words: list[str], message: str) -> None:
    done = ds("run", *words, ds.script("print('started')"))
    assert (done.status, done.out) == (2, b"")
    assert message in done.err.decode()
    assert b"Traceback" not in done.err


def test_accepted_for_one_machine(ds: Ds) -> None:
    script = ds.script("print('ok')")
    assert ds("run", "--num_nodes", "1", "--launcher=local", script).out == b"ok\n"


def test_no_script(ds: Ds) -> None:
    done = ds("run", "-n", "2")
    assert done.status == 2
    assert b"no script is given" in done.err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "folder without __main__.py"),
        (lambda path: path.write_text("#!/bin/bash\necho hi\n"), "--no-python"),
        (lambda path: path.write_bytes(b"\x7fELF\x02\x01"), "--no-python"),
    ],
)
def test_impossible_scripts(
    ds: Ds, tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "train.py")
    done = ds("run", "-n", "2", "train.py")
    assert (done.status, done.out) == (2, b"")
    assert message in done.err.decode()
    assert b"Traceback" not in done.err


def test_script_that_is_not_python_after_all(ds: Ds, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_bytes(bytes(range(1, 256)))
    done = ds("run", "-n", "2", "data.py")
    assert done.status == 1
    assert b"SyntaxError" in done.err
    assert b"of 2 failed: exit status 1" in done.err


def test_program_not_found(ds: Ds) -> None:
    done = ds("run", "--no-python", "no-such-program")
    assert done.status == 2
    assert b"'no-such-program' is not found" in done.err


def test_program_that_cannot_be_executed(ds: Ds, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = ds("run", "-n", "2", "--no-python", "./program")
    assert done.status == 2
    assert b"rank 0 cannot be started" in done.err
    assert b"Traceback" not in done.err


def test_rank_that_cannot_be_started_ends_the_others(ds: Ds) -> None:
    script = ds.script("import time; time.sleep(60)")
    # Each rank costs the launcher two descriptors; the limit stops it half way.
    done = ds("run", "--no-python", "sh", "-c", 'ulimit -n 20; exec "$0" "$@"',
              sys.executable, "-m", "ds_launch", "run", "-n", "40", script)  # fmt: skip
    assert done.status == 2
    assert b"cannot be started: [Errno 24]" in done.err
    assert done.seconds < 10


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/logs"])
def test_log_dir_that_cannot_be(ds: Ds, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    done = ds("run", "-n", "2", "--log-dir", path, ds.script("print('started')"))
    assert (done.status, done.out) == (2, b"")
    assert b"--log-dir" in done.err and path.encode() in done.err
    assert b"Traceback" not in done.err


def test_log_that_cannot_be_written(ds: Ds, tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank1.log").mkdir(parents=True)
    done = ds("run", "-n", "2", "--log-dir", "logs", ds.script("import time; time.sleep(60)"))
    assert done.status == 2
    assert b"rank 1 cannot be started" in done.err and b"rank1.log" in done.err


def test_log_on_a_full_disk(ds: Ds, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").symlink_to("/dev/full")
    script = ds.script("import os; print('hello', os.environ['RANK'])")
    done = ds("run", "-n", "2", "--log-dir", "logs", script)
    assert done.status == 0
    assert sorted(done.out.splitlines()) == [b"[r1] hello 1", b"hello 0"]
    assert b"rank1.log is incomplete: No space left on device" in done.err
