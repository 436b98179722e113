from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Ds

OTHERS_SLEEP = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank != 1:
    time.sleep(60)
time.sleep(0.2)
"""


def test_failing_rank_ends_the_others(ds: Ds) -> None:
    script = ds.script(OTHERS_SLEEP + "raise ValueError('wrong shape é')")
    done = ds("run", "-n", "3", script)
    assert done.status == 1
    assert done.seconds < 5
    lines = done.err.decode().splitlines()
    assert lines[-1].startswith("ds run: rank 1 of 3 failed: exit status 1 (pid ")
    assert lines[-2] == "    ValueError: wrong shape é"
    report = lines.index("ds run: the last that rank 1 wrote:")
    assert lines[report + 1] == "    Traceback (most recent call last):"


def test_exit_status_is_that_of_the_rank(ds: Ds) -> None:
    assert ds("run", "-n", "2", ds.script(OTHERS_SLEEP + "sys.exit(42)")).status == 42


def test_single_rank(ds: Ds) -> None:
    done = ds("run", "--quiet", ds.script("import sys; sys.exit('no data')"))
    assert done.status == 1
    lines = done.err.decode().splitlines()
    assert lines[0] == "no data"
    assert lines[1].startswith("ds run: rank 0 failed: exit status 1 (pid ")
    assert len(lines) == 2


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_rank_that_a_signal_ends(ds: Ds, name: str) -> None:
    script = ds.script(OTHERS_SLEEP + f"os.kill(os.getpid(), signal.{name})")
    done = ds("run", "-n", "2", script)
    assert done.status == 128 + signal.Signals[name]
    assert f"rank 1 of 2 failed: signal {name}".encode() in done.err
    if name != "SIGKILL":
        # faulthandler shows where it was, though no exception was raised
        assert b"most recent call first" in done.err


def test_rank_0_that_fails_on_a_terminal(ds: Ds) -> None:
    script = ds.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            raise ValueError("rank 0 boom")
        time.sleep(60)
        """
    )
    master, slave = os.openpty()
    try:
        done = ds("run", "-n", "2", script, stdout=slave, stderr=slave)
        got = os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert done.status == 1
    assert "    ValueError: rank 0 boom\r\n" in got
    assert "ds run: rank 0 of 2 failed: exit status 1" in got


def test_ranks_that_ignore_sigterm_are_killed(ds: Ds) -> None:
    script = ds.script(
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "1":
            while not pathlib.Path("deaf").exists():
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("deaf").touch()
        while True:
            time.sleep(1)
        """
    )
    done = ds("run", "-n", "2", script)
    assert done.status == 3
    assert done.seconds < 6
    assert b"rank 0 did not end when asked and had to be killed" in done.err


def test_sigterm_lets_the_others_clean_up(ds: Ds, tmp_path: Path) -> None:
    script = ds.script(
        """
        import os, pathlib, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            pathlib.Path("saved").touch()
            sys.exit(0)
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, save)
            pathlib.Path("ready").touch()
            time.sleep(60)
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        sys.exit(1)
        """
    )
    done = ds("run", "-n", "2", script)
    assert done.status == 1
    assert (tmp_path / "saved").exists()
    assert b"also failed" not in done.err


def test_rank_that_ends_early_is_no_failure(ds: Ds) -> None:
    script = ds.script(
        """
        import os, time
        time.sleep(0.5 * int(os.environ["RANK"]))
        print("end")
        """
    )
    done = ds("run", "-n", "2", script)
    assert (done.status, done.out) == (0, b"end\n[r1] end\n")


def test_log_is_named(ds: Ds) -> None:
    done = ds("run", "-n", "2", "--log-dir", "logs", ds.script(OTHERS_SLEEP + "1 / 0"))
    assert done.status == 1
    assert done.err.endswith(b"its log: logs/rank1.log\n")


SPAWN = """
import os, pathlib, signal, subprocess, sys, time
kinds = {
    "same group": {},
    "own group": {"preexec_fn": os.setpgrp},
    "own session": {"start_new_session": True},
}
def child(kind):
    return subprocess.Popen(["sleep", "77"], **kinds[kind])
"""


@pytest.mark.parametrize("kind", ["same group", "own group", "own session"])
def test_children_of_ranks_go_too(ds: Ds, kind: str) -> None:
    script = ds.script(SPAWN + f"child({kind!r})\n" + OTHERS_SLEEP + "sys.exit(1)")
    done = ds("run", "-n", "2", script)
    assert done.status == 1
    assert ds.alive() == []


def test_children_that_ignore_sigterm_go_too(ds: Ds) -> None:
    script = ds.script(
        SPAWN
        + "subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'])\n"
        + "time.sleep(0.5)\n"
        + OTHERS_SLEEP
        + "sys.exit(1)"
    )
    done = ds("run", "-n", "2", script)
    assert done.status == 1
    assert done.seconds < 6
    assert ds.alive() == []


def test_what_is_left_after_success_is_ended_and_said(ds: Ds) -> None:
    done = ds("run", ds.script(SPAWN + "child('own session')"))
    assert done.status == 0
    assert b"ds run: ended what the ranks had left running: sleep (pid " in done.err
    assert ds.alive() == []


def test_a_service_may_leave_the_job_on_purpose(ds: Ds) -> None:
    script = ds.script(
        SPAWN
        + "env = {k: v for k, v in os.environ.items() if k != 'DS_RUN_ID'}\n"
        + "p = subprocess.Popen(['sleep', '77'], env=env, start_new_session=True,"
        + "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        + "print(p.pid)"
    )
    done = ds("run", "--quiet", script)
    assert (done.status, done.err) == (0, b"")
    os.kill(int(done.out), signal.SIGKILL)  # still there
    ds.wait_until(lambda: not ds.alive())


def test_launch_inside_a_launch(ds: Ds) -> None:
    inner = ds.script("import time; time.sleep(60)", name="inner.py")
    outer = ds.script(
        f"""
        import os, subprocess, sys, time
        command = [sys.executable, "-m", "ds_launch", "run", "-n", "2", {inner!r}]
        if os.environ["RANK"] == "0":
            subprocess.Popen(command).wait()
        time.sleep(1)
        sys.exit(6)
        """
    )
    done = ds("run", "-n", "2", outer)
    assert done.status == 6
    assert ds.alive() == []


def test_failure_is_found_while_children_hold_the_output(ds: Ds) -> None:
    script = ds.script(SPAWN + "child('own session')\nsys.exit(4)")
    done = ds("run", "-n", "2", script, stderr=subprocess.STDOUT)
    assert done.status == 4
    assert done.seconds < 5
