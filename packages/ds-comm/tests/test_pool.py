"""The pool of ranks: results, and every way in which a rank can fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_comm.testing import RankError, RankPool
from ds_comm.testing.plugin import Ranks


@dataclass(frozen=True)
class Pair:
    """A class of this file, to travel in both directions."""

    left: int
    right: int


class Unpicklable(Exception):
    """Cannot be pickled, for it holds a lambda; cannot be rebuilt either."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first}{second}")
        self.hook = lambda: None


@pytest.fixture(scope="module")
def short_pool() -> Iterator[RankPool]:
    """A pool of its own with a short grace, for the tests that break workers."""
    with RankPool(2, grace_s=1.0) as pool:
        yield pool


def who() -> tuple[int, int, dict[str, str], int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    environ = {name: os.environ[name] for name in names}
    return dist.get_rank(), dist.get_world_size(), environ, torch.get_num_threads()


def summed(value: float, *, factor: float = 1.0) -> float:
    tensor = torch.tensor([value + dist.get_rank()]) * factor
    dist.all_reduce(tensor)
    return float(tensor)


def swap(pair: Pair) -> Pair:
    return Pair(pair.right, pair.left + dist.get_rank())


def draw() -> float:
    return float(torch.rand(()))


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        broken = 41
        assert broken == 42, "the answer"
    dist.barrier()


def fail_while_others_sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("early")
    time.sleep(3600)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.stderr.write("last words\n")
        os._exit(7)
    dist.barrier()


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def return_unpicklable() -> object:
    return lambda: None


def big(numel: int) -> torch.Tensor:
    return torch.full((numel,), float(dist.get_rank()))


def length(blob: bytes) -> int:
    return len(blob)


def leave_state() -> bool:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0])
    torch.set_default_dtype(torch.float64)
    return dist.get_world_size() > 1


def read_state() -> tuple[str | None, str, torch.dtype, int]:
    return (
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        torch.get_default_dtype(),
        len(dist.distributed_c10d._world.pg_map),
    )


def destroy_own_group() -> None:
    dist.destroy_process_group()


def fail_to_form_a_group(path: str) -> None:
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        with pytest.raises(RuntimeError, match="rank < size"):
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=5, world_size=2)


def exit_cleanly() -> None:
    sys.exit(3)


def skip() -> None:
    pytest.skip("not here")


def say() -> None:
    sys.stdout.write("hello\n")


@pytest.mark.parametrize("world_size", [1, 4, 2, 3, 1, 2])
def test_each_world_size_gets_its_own_group(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, who)
    assert [result[0] for result in results] == list(range(world_size))
    for rank, (_, size, environ, threads) in enumerate(results):
        assert size == world_size
        assert threads == 1
        assert environ == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
    # ranks 0..n-1 hold 10 + r: n * 10 + n * (n - 1) / 2, times 2
    expected = 2 * (10 * world_size + world_size * (world_size - 1) / 2)
    assert ranks(world_size, summed, 10.0, factor=2.0) == [expected] * world_size


def test_classes_of_the_test_file_travel_both_ways(ranks: Ranks) -> None:
    assert ranks(2, swap, Pair(1, 2)) == [Pair(2, 1), Pair(2, 2)]


def test_every_call_starts_from_seed_zero(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = float(torch.rand(()))
    assert ranks(2, draw) == [expected] * 2
    assert ranks(2, draw) == [expected] * 2


def test_big_results_and_arguments(ranks: Ranks) -> None:
    numel = 8 * 1024 * 1024
    results = ranks(2, big, numel)
    assert [float(result.sum()) for result in results] == [0.0, float(numel)]
    assert ranks(2, length, b"x" * (32 << 20)) == [32 << 20] * 2


def test_state_of_a_call_does_not_leak(ranks: Ranks) -> None:
    before = os.getcwd()
    assert ranks(2, leave_state) == [True, True]
    assert ranks(2, read_state) == [(None, before, torch.float32, 1)] * 2
    ranks(2, destroy_own_group)
    assert ranks(1, read_state) == [(None, before, torch.float32, 1)]


def test_a_failed_rendezvous_does_not_disturb_the_next(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, fail_to_form_a_group, str(tmp_path / "store"), timeout=20.0)
    assert ranks(2, summed, 0.0, timeout=20.0) == [1.0, 1.0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_failure_on_one_rank_shows_its_traceback_first(ranks: Ranks, rank: int) -> None:
    pids = ranks.pool.pids
    with pytest.raises(RankError) as caught:
        ranks(3, fail_on, rank)
    error = caught.value
    assert error.failures[0].rank == rank
    assert {failure.rank for failure in error.failures} == {0, 1, 2}
    text = str(error)
    assert text.startswith(f"fail_on on 3 ranks: rank {rank} raised: AssertionError: the answer")
    assert 'assert broken == 42, "the answer"' in text
    assert "broken = 41" in text
    assert "worker.py" not in text
    assert isinstance(error.__cause__, AssertionError)
    # The peers were freed by the closed connections, so no process had to be replaced.
    assert ranks.pool.pids[: len(pids)] == pids


def test_failure_while_the_others_do_not_react(short_pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        short_pool.run(2, fail_while_others_sleep, 1)
    kinds = [(failure.rank, failure.kind) for failure in caught.value.failures]
    assert kinds == [(1, "raised"), (0, "stuck")]
    assert 'raise ValueError("early")' in str(caught.value)
    assert time.monotonic() - started < 60.0
    assert short_pool.run(2, summed, 0.0) == [1.0] * 2


def test_hang_is_a_timeout_that_tells_where(short_pool: RankPool) -> None:
    short_pool.run(2, summed, 0.0)
    keeper, hanger = short_pool.pids[:2]
    with pytest.raises(RankError) as caught:
        short_pool.run(2, hang_on, 1, timeout=1.0)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "stuck")
    assert "time-out of 1 s" in failure.summary
    assert "in hang_on" in failure.details
    assert short_pool.run(2, summed, 0.0) == [1.0, 1.0]
    assert short_pool.pids[0] == keeper
    assert short_pool.pids[1] != hanger


def test_crash_is_named_with_status_and_output(short_pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        short_pool.run(2, crash_on, 1)
    first = caught.value.failures[0]
    assert (first.rank, first.kind, first.summary) == (1, "crashed", "exit status 7")
    assert "last words" in first.details
    assert short_pool.run(2, summed, 0.0) == [1.0, 1.0]


def test_exception_that_cannot_be_pickled(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="Unpicklable: odd 12") as caught:
        ranks(2, raise_unpicklable)
    assert caught.value.failures[0].exception is None
    assert ranks(1, summed, 5.0) == [5.0]


def test_result_that_cannot_be_pickled(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="result of return_unpicklable cannot be pickled"):
        ranks(2, return_unpicklable)
    assert ranks(1, summed, 5.0) == [5.0]


def test_sys_exit_is_a_failure_and_the_worker_stays(ranks: Ranks) -> None:
    pids = ranks.pool.pids
    with pytest.raises(RankError, match="SystemExit: 3"):
        ranks(1, exit_cleanly)
    assert ranks.pool.pids == pids


def test_skip_inside_ranks_skips_the_test(ranks: Ranks) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ranks(2, skip, timeout=20)


def test_output_is_shown_with_its_rank(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, say)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] hello", "[rank 1] hello"]


def test_functions_and_sizes_that_cannot_be_used(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="define it at module level"):
        ranks(2, lambda: None)
    with pytest.raises(ValueError, match="define it at module level"):
        ranks(2, len, "")
    for world_size in (0, -1, 5):
        with pytest.raises(ValueError, match="1 to 4 ranks"):
            ranks(world_size, draw)


def test_a_changed_file_is_read_again(ranks: Ranks, tmp_path: Path) -> None:
    source = tmp_path / "changing_module.py"
    for value in (1, 22):
        source.write_text(f"def value():\n    return {value}\n")
        spec = importlib.util.spec_from_file_location("odd-folder.changing_module", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert ranks(1, module.value) == [value]


def test_workers_end_when_their_parent_dies(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time
            from ds_comm.testing import RankPool

            def stuck():
                open(os.environ["FLAG"], "w").close()
                time.sleep(3600)

            if __name__ == "__main__":
                import threading
                pool = RankPool(1)
                threading.Thread(target=pool.run, args=(1, stuck), daemon=True).start()
                while not os.path.exists(os.environ["FLAG"]):
                    time.sleep(0.05)
                print(pool.pids[0], flush=True)
                os._exit(0)
            """
        )
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLAG": str(tmp_path / "flag"),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}").exists()
