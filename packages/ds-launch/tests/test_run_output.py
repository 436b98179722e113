from __future__ import annotations

import fcntl
import os
import subprocess
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Ds

TALK = """
import os, sys
rank = os.environ["RANK"]
print("out", rank)
print("err", rank, file=sys.stderr)
"""


def test_lines_of_other_ranks_are_marked(ds: Ds) -> None:
    done = ds("run", "--quiet", "-n", "3", ds.script(TALK))
    assert sorted(done.out.splitlines()) == [b"[r1] out 1", b"[r2] out 2", b"out 0"]
    assert sorted(done.err.splitlines()) == [b"[r1] err 1", b"[r2] err 2", b"err 0"]


def test_all_lines_are_marked_on_request(ds: Ds) -> None:
    done = ds("run", "-n", "2", "--tag-output", ds.script(TALK))
    assert sorted(done.out.splitlines()) == [b"[r0] out 0", b"[r1] out 1"]
    assert ds("run", "--tag_output", ds.script(TALK)).out == b"[r0] out 0\n"


def test_no_lines_are_marked_on_request(ds: Ds) -> None:
    done = ds("run", "-n", "2", "--no-tag", ds.script(TALK))
    assert sorted(done.out.splitlines()) == [b"out 0", b"out 1"]


def test_single_rank_is_unmarked_and_unchanged(ds: Ds) -> None:
    script = ds.script("import os; os.write(1, b'a\\r\\xff\\x00b')")
    assert ds("run", script).out == b"a\r\xff\x00b"


@pytest.mark.parametrize("name", ["hello.py", "é ü.py"])
def test_logs_hold_both_streams_of_each_rank(ds: Ds, tmp_path: Path, name: str) -> None:
    done = ds("run", "-n", "2", "--log-dir", "a/b", ds.script(TALK, name=name))
    assert sorted(done.out.splitlines()) == [b"[r1] out 1", b"out 0"]
    for rank in (b"0", b"1"):
        log = (tmp_path / "a" / "b" / f"rank{rank.decode()}.log").read_bytes()
        assert sorted(log.splitlines()) == [b"err " + rank, b"out " + rank]


def test_one_destination_keeps_the_order_of_both_streams(ds: Ds, tmp_path: Path) -> None:
    script = ds.script(
        """
        import os
        for i in range(2000):
            os.write(1 + i % 2, b"%d\\n" % i)
        """
    )
    done = ds(
        "run",
        "--quiet",
        "-n",
        "2",
        "--enable_each_rank_log",
        "logs",
        script,
        stderr=subprocess.STDOUT,
    )
    expected = [b"%d" % i for i in range(2000)]
    lines = done.out.splitlines()
    assert [line for line in lines if not line.startswith(b"[r1]")] == expected
    assert [line[5:] for line in lines if line.startswith(b"[r1]")] == expected
    assert (tmp_path / "logs" / "rank1.log").read_bytes().splitlines() == expected


def test_log_of_an_earlier_run_is_replaced(ds: Ds, tmp_path: Path) -> None:
    for text in ("long text", "x"):
        ds("run", "--log-dir", "logs", ds.script(f"print({text!r})"))
    assert (tmp_path / "logs" / "rank0.log").read_bytes() == b"x\n"


def test_bytes_that_are_no_text(ds: Ds) -> None:
    script = ds.script("import os; os.write(1, bytes(range(14, 256)) + b'\\n')")
    done = ds("run", "-n", "2", script)
    raw = bytes(range(14, 256)) + b"\n"
    assert done.out in (raw + b"[r1] " + raw, b"[r1] " + raw + raw)


def test_very_long_lines_are_not_mixed(ds: Ds) -> None:
    script = ds.script(
        """
        import os
        mark = b"ab"[int(os.environ["RANK"]):][:1]
        for _ in range(5):
            os.write(1, mark * 50_000 + b"\\n")
        """
    )
    done = ds("run", "-n", "2", script)
    lines = done.out.splitlines()
    assert sorted(lines) == [b"[r1] " + b"b" * 50_000] * 5 + [b"a" * 50_000] * 5


def test_much_output_arrives_whole(ds: Ds) -> None:
    script = ds.script("import sys; sys.stdout.write('0123456789abcde\\n' * 100_000)")
    done = ds("run", "-n", "2", "--no-tag", script, env={"PYTHONUNBUFFERED": ""})
    assert done.out == b"0123456789abcde\n" * 200_000


def test_no_newline_at_the_end(ds: Ds) -> None:
    script = ds.script(
        """
        import os, time
        time.sleep(0.3 * (1 - int(os.environ["RANK"])))
        os.write(1, b"end " + os.environ["RANK"].encode())
        """
    )
    assert ds("run", "-n", "2", script).out == b"[r1] end 1\nend 0"


def test_progress_of_rank_0_stays_live_behind_a_pipe(ds: Ds) -> None:
    script = ds.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            os.write(1, b"\\r 10%")
            time.sleep(60)
        """
    )
    process = ds.start("run", "-n", "2", script)
    try:
        start = time.monotonic()
        assert process.stdout is not None
        assert process.stdout.read(5) == b"\r 10%"
        assert time.monotonic() - start < 5
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_terminal(ds: Ds, ranks: str) -> None:
    """On a terminal rank 0 sees one of the same size; its bytes pass unchanged."""
    script = ds.script(
        """
        import os, sys
        if os.environ["RANK"] == "0":
            print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(1))
            os.write(2, b"\\r 50%\\r100%\\n")
        """
    )
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x21\x00\x7b\x00" + bytes(4))  # 33 rows, 123 columns
    try:
        done = ds("run", "--quiet", "-n", ranks, script, stdout=slave, stderr=slave)
        got = b""
        while not got.endswith(b"100%\r\n"):
            got += os.read(master, 4096)
    finally:
        os.close(master)
        os.close(slave)
    assert done.status == 0
    # The terminal itself turns \n into \r\n; a second one would have made it \r\r\n.
    assert got == b"True True 123 33\r\n\r 50%\r100%\r\n"


def test_reader_that_goes_away_ends_the_job(ds: Ds) -> None:
    script = ds.script(
        """
        import time
        while True:
            print("x" * 100)
            time.sleep(0.01)
        """
    )
    process = ds.start("run", "-n", "2", script)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(timeout=15) == 141
    assert b"its output cannot be written (Broken pipe)" in process.stderr.read()
    process.stderr.close()


def test_reader_that_pauses_does_not_hold_up_the_end(ds: Ds) -> None:
    script = ds.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            sys.exit(5)
        while True:
            os.write(1, b"x" * 1000 + b"\\n")
        """
    )
    process = ds.start("run", "-n", "2", script)
    ds.wait_until(lambda: len(ds.alive()) > 2)
    # Nobody reads; the failure of rank 1 must end rank 0 all the same.
    ds.wait_until(lambda: len(ds.alive()) <= 2, timeout_s=8)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 5
    assert set(out.splitlines()[:-1]) == {b"x" * 1000}
    assert b"rank 1 of 2 failed: exit status 5" in err
