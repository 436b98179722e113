from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Ds

READY = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
def ready():
    pathlib.Path("ready" + rank).touch()
"""


def start_ready(
    ds: Ds, text: str, *words: str, ranks: int = 2, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a job and wait until every rank has called `ready()`."""
    process = ds.start("run", "-n", str(ranks), *words, ds.script(READY + text), **options)
    ds.wait_until(lambda: all((ds.folder / f"ready{rank}").exists() for rank in range(ranks)))
    return process


@pytest.mark.parametrize(
    ("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGQUIT", 131)]
)
def test_signal_ends_the_job(ds: Ds, name: str, status: int) -> None:
    process = start_ready(ds, "subprocess.Popen(['sleep', '77'])\nready()\ntime.sleep(60)")
    start = time.monotonic()
    process.send_signal(signal.Signals[name])
    _, err = process.communicate(timeout=10)
    assert process.returncode == status
    assert time.monotonic() - start < 5
    assert ds.alive() == []
    assert err.endswith(b"ds run: ended by " + name.encode() + b"\n")
    assert b"ds_launch" not in err  # no traceback of the launcher itself


def test_ctrl_c_shows_the_place_of_rank_0_only(ds: Ds) -> None:
    process = start_ready(ds, "ready()\ntime.sleep(60)", ranks=3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert err.count(b"Traceback") == 1
    assert err.count(b"KeyboardInterrupt") == 1
    assert b"[r1]" not in err


def take_terminal() -> None:
    """Lead a session whose controlling terminal is standard input, as a login shell does."""
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))


def test_ctrl_c_on_a_terminal(ds: Ds) -> None:
    """The terminal signals its foreground group: the launcher alone, as ranks left the group."""
    master, slave = os.openpty()
    try:
        process = start_ready(
            ds,
            "ready()\ntime.sleep(60)",
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=take_terminal,
        )
        os.write(master, b"\x03")
        assert process.wait(timeout=10) == 130
        got = os.read(master, 65536)
    finally:
        os.close(master)
        os.close(slave)
    assert got.count(b"KeyboardInterrupt") == 1
    assert got.endswith(b"ds run: ended by SIGINT\r\n")


def test_one_rank_ctrl_c(ds: Ds) -> None:
    process = start_ready(ds, "ready()\ntime.sleep(60)", ranks=1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err.count(b"Traceback") == 1


def test_ranks_may_finish_after_sigterm(ds: Ds) -> None:
    process = start_ready(
        ds,
        """
def save(*_):
    time.sleep(3.2)
    pathlib.Path("saved" + rank).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
ready()
time.sleep(60)
""",
    )
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=15) and process.returncode == 143
    assert (ds.folder / "saved0").exists() and (ds.folder / "saved1").exists()


DEAF = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
time.sleep(60)
"""


def test_grace_ends_with_a_kill(ds: Ds) -> None:
    process = start_ready(ds, DEAF, "--grace", "1")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert 0.9 < time.monotonic() - start < 4
    assert b"ranks 0, 1 did not end when asked" in err


def test_second_ctrl_c_kills_at_once(ds: Ds) -> None:
    process = start_ready(ds, DEAF)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) and process.returncode == 130
    assert time.monotonic() - start < 4


def test_other_signals_pass_through(ds: Ds) -> None:
    process = start_ready(
        ds,
        """
def got(signum, frame):
    print("got", signum)
    sys.exit(0)
signal.signal(signal.SIGUSR1, got)
ready()
time.sleep(60)
""",
    )
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    number = b"got %d" % signal.SIGUSR1
    assert sorted(out.splitlines()) == [b"[r1] " + number, number]


def test_ignored_signals_stay_ignored(ds: Ds) -> None:
    """As under nohup."""
    process = start_ready(
        ds,
        "ready()\ntime.sleep(1)\nprint('end')",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, sorted(out.splitlines())) == (0, [b"[r1] end", b"end"])


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_ctrl_z_stops_the_ranks_too(ds: Ds) -> None:
    process = start_ready(
        ds, "pathlib.Path('pid' + rank).write_text(str(os.getpid()))\nready()\ntime.sleep(60)"
    )
    ranks = [int((ds.folder / f"pid{rank}").read_text()) for rank in range(2)]
    process.send_signal(signal.SIGTSTP)
    ds.wait_until(lambda: [state_of(pid) for pid in (process.pid, *ranks)] == ["T"] * 3)
    process.send_signal(signal.SIGCONT)
    ds.wait_until(lambda: "T" not in [state_of(pid) for pid in (process.pid, *ranks)])
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10) and process.returncode == 143


@pytest.mark.parametrize("kill_output", [False, True])
def test_killed_launcher_leaves_nothing(ds: Ds, kill_output: bool) -> None:
    process = start_ready(
        ds,
        """
subprocess.Popen(["sleep", "77"], start_new_session=True)
subprocess.Popen(["sleep", "77"])
ready()
time.sleep(60)
""",
        stdout=subprocess.DEVNULL if kill_output else subprocess.PIPE,
    )
    process.kill()
    process.communicate(timeout=10)
    ds.wait_until(lambda: not ds.alive(), timeout_s=6)


def test_killed_keeper_is_no_loss(ds: Ds) -> None:
    process = start_ready(ds, "ready()\ntime.sleep(1)")
    children = [int(pid) for pid in _children(process.pid)]
    keepers = [pid for pid in children if _cmdline(pid) == _cmdline(process.pid)]
    assert len(keepers) == 1
    os.kill(keepers[0], signal.SIGKILL)
    assert process.communicate(timeout=10) and process.returncode == 0


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def _cmdline(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
