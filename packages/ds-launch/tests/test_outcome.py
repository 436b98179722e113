from __future__ import annotations

import signal

import pytest

from ds_launch.outcome import Failure, Outcome, describe_outcome, describe_status
from ds_launch.processes import Leftover


def failure(status: int = 1, rank: int = 1, tail: bytes = b"", log: str | None = None) -> Failure:
    return Failure(rank, pid=100 + rank, status=status, tail=tail, log=log)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(2), 0),
        (Outcome(2, failures=(failure(3), failure(1, rank=0))), 3),
        (Outcome(2, failures=(failure(-signal.SIGSEGV),)), 139),
        (Outcome(2, signum=signal.SIGINT), 130),
        (Outcome(2, signum=signal.SIGTERM), 143),
        # The failure came first: signals that hurry its end do not hide it.
        (Outcome(2, failures=(failure(3),), signum=signal.SIGINT), 3),
        (Outcome(2, output_problem="Broken pipe"), 141),
    ],
)
def test_exit_status(outcome: Outcome, status: int) -> None:
    assert outcome.exit_status == status


def test_success_says_nothing() -> None:
    assert describe_outcome(Outcome(2)) == ""


def test_failed_rank_is_named_last_and_its_lines_shown() -> None:
    tail = b"\n".join(b"line %d" % i for i in range(100)) + b"\n\n"
    text = describe_outcome(Outcome(3, failures=(failure(tail=tail, log="logs/rank1.log"),)))
    lines = text.splitlines()
    assert lines[0] == "ds run: the last that rank 1 wrote:"
    assert lines[1:-1] == [f"    line {i}" for i in range(60, 100)]
    assert lines[-1] == (
        "ds run: rank 1 of 3 failed: exit status 1 (pid 101); the other ranks were ended; "
        "its log: logs/rank1.log"
    )


def test_single_rank_is_not_repeated() -> None:
    text = describe_outcome(Outcome(1, failures=(failure(rank=0, tail=b"seen already\n"),)))
    assert text == "ds run: rank 0 failed: exit status 1 (pid 100)\n"


def test_others_that_failed() -> None:
    text = describe_outcome(Outcome(3, failures=(failure(-9), failure(1, rank=2))))
    assert "signal SIGKILL (often the kernel, for want of memory)" in text
    assert "also failed: rank 2 (exit status 1)" in text


def test_odd_bytes_in_the_tail_survive() -> None:
    text = describe_outcome(Outcome(2, failures=(failure(tail=b"\xff\xfe" + b"y" * 9999),)))
    assert text.encode("utf-8", "surrogateescape").splitlines()[1] == (
        b"    \xff\xfe" + b"y" * 1998
    )


def test_signal_without_a_name() -> None:
    assert describe_status(-40) == "signal 40"


def test_other_things_to_know() -> None:
    outcome = Outcome(
        2, signum=signal.SIGTERM, killed=(0, 1), leftovers=(Leftover(7, "sleep"),),
        log_problems=("rank0.log is incomplete: No space left on device",),
    )  # fmt: skip
    assert describe_outcome(outcome) == (
        "ds run: ended by SIGTERM\n"
        "ds run: ranks 0, 1 did not end when asked and had to be killed\n"
        "ds run: ended what the ranks had left running: sleep (pid 7)\n"
        "ds run: rank0.log is incomplete: No space left on device\n"
    )
