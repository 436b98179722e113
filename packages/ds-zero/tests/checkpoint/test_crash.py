"""A process killed at any point of a save leaves every earlier checkpoint whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zero.checkpoint import Checkpoint, Chunk, Coordinator, open_checkpoint, save_checkpoint

CALLS = ("write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


def killed(work: Callable[[], None]) -> bool:
    """Run ``work`` in a forked child; returns whether a SIGKILL ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_at(count: int) -> None:
    """Make this process kill itself just before its ``count``-th call that changes the disk."""
    left = [count]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def holds(checkpoint: Checkpoint, state: Any) -> bool:
    checkpoint.verify()
    return all(
        torch.equal(checkpoint.read_tensor(kind, name), tensor)
        for (kind, name), tensor in state.tensors.items()
    )


@pytest.mark.parametrize("tag", ["new", "old"])
def test_killed_before_every_system_call(tmp_path: Path, tools: Any, tag: str) -> None:
    old, new = tools.example_state(1), tools.example_state(2)
    template = tmp_path / "template"
    tools.save(template, "older", old, 2)
    tools.save(template, "old", old, 2)
    points = 0
    while True:
        folder = tmp_path / str(points)
        shutil.copytree(template, folder)

        def save(target: Path = folder, count: int = points) -> None:
            die_at(count)
            tools.save(target, tag, new, 2)

        died = killed(save)
        latest = open_checkpoint(folder)
        assert holds(latest, new if not died else latest_state(latest, tag, old, new))
        assert holds(open_checkpoint(folder, "older"), old)
        if tag == "new":
            assert holds(open_checkpoint(folder, "old"), old)
        tools.save(folder, tag, new, 2)
        assert not list(folder.glob("*.tmp-*"))
        assert len(list((folder / tag).iterdir())) == 3
        assert holds(open_checkpoint(folder, tag), new)
        if not died:
            break
        points += 1
    assert points >= 30


def latest_state(latest: Checkpoint, tag: str, old: Any, new: Any) -> Any:
    """A save that was killed late may already be complete; then it is the new one entirely."""
    if latest.tag != tag:
        return old
    weight = latest.read_tensor("param", "one.bias")
    return new if torch.equal(weight, new.tensors["param", "one.bias"]) else old


def test_killed_while_chunks_are_produced(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "old", state, 2)
    parts = state.cut(2)
    for point in range(4):

        def save(at: int = point) -> None:
            def chunks(rank: int) -> Iterator[Chunk]:
                for index, chunk in enumerate(parts[rank]):
                    if rank == 1 and index == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield chunk

            def work(coordinator: Coordinator) -> Path:
                mine = chunks(coordinator.rank)
                return save_checkpoint(tmp_path, "new", state.manifest(), mine, {}, coordinator)

            tools.run_ranks(2, work)

        assert killed(save)
        assert open_checkpoint(tmp_path).tag == "old"
        assert holds(open_checkpoint(tmp_path), state)
        assert not (tmp_path / "new").exists()
    assert list(tmp_path.glob("new.tmp-*"))
    tools.save(tmp_path, "newer", state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "newer", "old"]


@pytest.mark.parametrize("tag", ["new", "old"])
def test_everything_is_on_disk_before_it_is_visible(
    tmp_path: Path, tools: Any, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses what was not forced to disk: the order of the calls is the guarantee."""
    tools.save(tmp_path, "old", tools.example_state(1), 2)
    log: list[tuple[str, str]] = []

    def record(name: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            log.append((name, path_of(*args)))
            return real(*args)

        monkeypatch.setattr(os, name, call)

    def relative(path: object) -> str:
        text = re.sub(r"[.-][0-9a-f]{8}(?=\.safetensors)|(?<=tmp-)[0-9a-f]{32}", "", str(path))
        return os.path.relpath(text, tmp_path)

    record("fsync", lambda fd: relative(os.readlink(f"/proc/self/fd/{fd}")))
    record("rename", lambda source, target: relative(target))
    record("replace", lambda source, target: relative(target))
    tools.save(tmp_path, tag, tools.example_state(2), 2)

    staged = f"{tag}.tmp-"
    files = [f"{staged}/rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(log[:2]) == [("fsync", file) for file in files]
    expected = [("fsync", f"{staged}/index.json"), ("fsync", staged)]
    if tag == "new":
        expected += [("rename", "new")]
    else:
        moved = [f"old/rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
        expected += [("rename", file) for file in moved]
        expected += [("fsync", "old"), ("replace", "old/index.json"), ("fsync", "old")]
    expected += [("fsync", "."), ("fsync", "latest.tmp-"), ("replace", "latest"), ("fsync", ".")]
    assert log[2:] == expected
