from __future__ import annotations

import subprocess

from ds_launch.plan import Program, RankPlan, plan_local, shell_lines

HOSTILE = ["--name", "a b", "it's", "$HOME", "x;y", "é", "", "--", "-n", "\n", "*", "a\tb"]


def plan(
    num_ranks: int = 2,
    program: Program | None = None,
    environ: dict[str, str] | None = None,
    cores: int = 8,
) -> tuple[RankPlan, ...]:
    return plan_local(
        program or Program(("python3",), "s.py", ("--x",)),
        num_ranks=num_ranks,
        master_addr="127.0.0.1",
        master_port=29500,
        cores=cores,
        run_id="abc",
        environ=environ or {},
    )


def test_environment_of_each_rank() -> None:
    first, second = plan()
    assert first.variables == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_RUN_ID": "abc",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    assert second.variables == {**first.variables, "RANK": "1", "LOCAL_RANK": "1"}
    assert first.argv == second.argv == ("python3", "s.py", "--x")


def test_threads_are_shared_out() -> None:
    for ranks, threads in [(1, "8"), (3, "2"), (8, "1"), (100, "1")]:
        assert plan(ranks)[-1].variables["OMP_NUM_THREADS"] == threads


def test_what_the_user_set_is_left_alone() -> None:
    variables = plan(environ={"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""})[0].variables
    assert "OMP_NUM_THREADS" not in variables
    assert "PYTHONUNBUFFERED" not in variables


def test_job_inside_a_job_extends_the_mark() -> None:
    assert plan(environ={"DS_RUN_ID": "outer"})[0].variables["DS_RUN_ID"] == "outer/abc"


def test_local_rank_comes_before_the_user_words() -> None:
    program = Program(("python3", "-m"), "pkg.train", ("--", "x"), pass_local_rank=True)
    assert plan(program=program)[1].argv == (
        "python3",
        "-m",
        "pkg.train",
        "--local_rank=1",
        "--",
        "x",
    )


def test_shell_lines_run_in_a_shell() -> None:
    program = Program((), "sh", ("-c", 'printf "%s\\0" "$RANK" "$@"', "sh", *HOSTILE))
    done = subprocess.run(
        ["sh", "-c", shell_lines(plan(program=program))], capture_output=True, check=True
    )
    expected = b"".join(
        b"".join(word.encode() + b"\0" for word in [rank, *HOSTILE]) for rank in ("0", "1")
    )
    assert done.stdout == expected
