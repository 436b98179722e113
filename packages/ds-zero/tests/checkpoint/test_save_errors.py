"""A failing rank fails the save on all ranks, and nothing half-written is seen."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zero.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    Chunk,
    Coordinator,
    Manifest,
    SoloCoordinator,
    TensorInfo,
    list_tags,
    open_checkpoint,
    save_checkpoint,
)


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_all_raise_the_same(errors: list[Any], *fragments: str) -> None:
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    for fragment in fragments:
        assert fragment in str(errors[0])


def test_tags_that_differ_are_named(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    parts = state.cut(3)

    def work(coordinator: Coordinator) -> Path:
        tag = "a" if coordinator.rank < 2 else "b"
        mine = parts[coordinator.rank]
        return save_checkpoint(tmp_path, tag, state.manifest(), mine, {}, coordinator)

    errors = tools.run_ranks(3, work)
    for error in errors:
        assert "the ranks gave different tags (rank 0: 'a', rank 2: 'b')" in str(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        "a/b",
        "/abs",
        "a\\b",
        "latest",
        " a",
        "a\n",
        "a\0",
        "x" * 201,
        True,
        1.5,
        None,
    ],
)
def test_tags_that_are_no_folder_name_are_refused(tmp_path: Path, tools: Any, tag: Any) -> None:
    errors = tools.save(tmp_path, tag, tools.example_state(), 2)
    check_all_raise_the_same(errors, "tag")
    if tag is not None:
        with pytest.raises(CheckpointError, match="tag"):
            open_checkpoint(tmp_path, tag)


def test_an_iterable_that_raises_on_one_rank(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "old", state)
    before = contents(tmp_path)
    parts = state.cut(3)

    def work(coordinator: Coordinator) -> Path:
        def chunks() -> Iterator[Chunk]:
            yield from parts[coordinator.rank][:2]
            if coordinator.rank == 1:
                raise RuntimeError("device lost")
            yield from parts[coordinator.rank][2:]

        return save_checkpoint(tmp_path, "new", state.manifest(), chunks(), {}, coordinator)

    errors = tools.run_ranks(3, work)
    check_all_raise_the_same(errors, "on rank 1: RuntimeError: device lost")
    assert isinstance(errors[1].__cause__.__cause__, RuntimeError)
    assert contents(tmp_path) == before


def test_no_space_on_one_rank(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "x", state)
    before = contents(tmp_path)
    real = os.write
    full: set[int] = set()

    def write(descriptor: int, data: memoryview) -> int:
        if "rank-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            if descriptor in full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            full.add(descriptor)
            return real(descriptor, data[: max(1, len(data) // 2)])  # a short write comes first
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for tag in ("y", "x"):
        errors = tools.save(tmp_path, tag, state, 2)
        check_all_raise_the_same(errors, "on rank 1", "No space left on device", "free space")
        full.clear()
    monkeypatch.undo()
    assert contents(tmp_path) == before
    open_checkpoint(tmp_path).verify()


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """The kernel itself refuses the bytes, as on a full disk."""
    data = torch.ones(100_000)
    manifest = Manifest((TensorInfo("w", (100_000,), "float32", True, 0),))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save_checkpoint(
                tmp_path, "x", manifest, [Chunk("param", "w", 0, data)], {}, SoloCoordinator()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == set()


def test_a_directory_that_cannot_be_made(tmp_path: Path, tools: Any) -> None:
    (tmp_path / "file").write_text("x")
    errors = tools.save(tmp_path / "file" / "sub", "x", tools.example_state(), 2)
    check_all_raise_the_same(errors, "on rank 0", "Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, tools: Any) -> None:
    tmp_path.chmod(0o500)
    errors = tools.save(tmp_path, "x", tools.example_state(), 2)
    tmp_path.chmod(0o700)
    check_all_raise_the_same(errors, "Permission denied")


def test_folders_that_are_no_checkpoint_are_not_overwritten(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    check_all_raise_the_same(tools.save(tmp_path, "notes", state), "is not overwritten")
    check_all_raise_the_same(tools.save(tmp_path, "file", state), "is no folder")
    assert contents(tmp_path) == {"notes", "notes/thesis.txt", "file", "empty"}
    tools.save(tmp_path, "empty", state)
    open_checkpoint(tmp_path, "empty").verify()


def test_overwriting_keeps_only_the_new_files(tmp_path: Path, tools: Any) -> None:
    for seed, world in ((0, 3), (1, 2), (2, 2)):
        state = tools.example_state(seed)
        tools.save(tmp_path, "x", state, world)
        checkpoint = open_checkpoint(tmp_path)
        weight = checkpoint.read_tensor("param", "embed.weight")
        assert torch.equal(weight, state.tensors["param", "embed.weight"])
        assert len(contents(tmp_path / "x")) == world + 1
        assert contents(tmp_path) == {"x", "latest"} | {f"x/{n}" for n in contents(tmp_path / "x")}


def test_latest_moves_only_when_asked(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    tools.save(tmp_path, "first", state, save_latest=False)
    with pytest.raises(CheckpointNotFoundError, match=r"latest does not exist.*'first'"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, "first").tag == "first"
    tools.save(tmp_path, 2, state)
    tools.save(tmp_path, "third", state, save_latest=False)
    assert open_checkpoint(tmp_path).tag == "2"
    assert list_tags(tmp_path) == ["first", "2", "third"]
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint 'fourth'.*'third'"):
        open_checkpoint(tmp_path, "fourth")


def test_latest_that_cannot_be_written_is_said(tmp_path: Path, tools: Any) -> None:
    (tmp_path / "latest").mkdir()
    errors = tools.save(tmp_path, "x", tools.example_state())
    check_all_raise_the_same(errors, "is saved and whole", "load it by its tag")
    open_checkpoint(tmp_path, "x").verify()


def weight_manifest(numel: int = 4) -> Manifest:
    return Manifest((TensorInfo("w", (numel,), "float32", True, 0),))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], r"no rank wrote 'param' of 'w' \(4 elements\)"),
        ([(0, 2)], r"no rank wrote elements \[2, 4\)"),
        ([(0, 1), (3, 4)], r"no rank wrote elements \[1, 3\)"),
        ([(0, 3), (2, 4)], r"elements \[2, 3\) were written twice"),
        ([(0, 4), (0, 4)], r"elements \[0, 4\) were written twice"),
        ([(1, 5)], r"lies outside the tensor's 4"),
        ([(-1, 3)], r"lies outside the tensor's 4"),
    ],
)
def test_gaps_and_overlaps_are_refused(
    tmp_path: Path, chunks: list[tuple[int, int]], message: str
) -> None:
    parts = [Chunk("param", "w", low, torch.zeros(high - low)) for low, high in chunks]
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, "x", weight_manifest(), parts, {}, SoloCoordinator())
    assert contents(tmp_path) == set()


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk("param", "v", 0, torch.zeros(4)), "not in the manifest"),
        (Chunk("buffer", "w", 0, torch.zeros(4)), "not in the manifest"),
        (Chunk("client", "w", 0, torch.zeros(4)), "reserved or malformed kind"),
        (Chunk("a/b", "w", 0, torch.zeros(4)), "reserved or malformed kind"),
        (Chunk("param", "w", 0, torch.zeros(2, 2)), "contiguous 1-D"),
        (Chunk("param", "w", 0, torch.zeros(8)[::2]), "contiguous 1-D"),
        (Chunk("param", "w", 0, torch.zeros(4, dtype=torch.complex128)), "complex128"),
        (Chunk("exp_avg", "w", 0, torch.zeros(3)), "no rank wrote"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(tmp_path: Path, chunk: Chunk, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, "x", weight_manifest(), [chunk], {}, SoloCoordinator())
    assert contents(tmp_path) == set()


def test_states_shaped_unlike_their_parameter(tmp_path: Path) -> None:
    manifest = replace(weight_manifest(), state_shapes={"w": {"row": (2, 3)}})
    chunks = [Chunk("param", "w", 0, torch.zeros(4)), Chunk("row", "w", 0, torch.arange(6.0))]
    save_checkpoint(tmp_path, "x", manifest, chunks, {}, SoloCoordinator())
    row = open_checkpoint(tmp_path).read_tensor("row", "w")
    assert torch.equal(row, torch.arange(6.0).reshape(2, 3))


def test_excluded_parameters_are_known_but_not_stored(tmp_path: Path) -> None:
    frozen = TensorInfo("f", (3,), "float32", False, -1)
    base = weight_manifest()
    manifest = replace(base, parameters=(*base.parameters, frozen), excluded=("f",))
    part = Chunk("param", "w", 0, torch.zeros(4))
    save_checkpoint(tmp_path, "x", manifest, [part], {}, SoloCoordinator())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kinds("f") == set()
    with pytest.raises(CheckpointError, match="saved without frozen parameters"):
        checkpoint.read("param", "f", 0, torch.empty(3))
    with pytest.raises(CheckpointError, match="in the model but not stored: f"):
        checkpoint.require(manifest.parameters)
    checkpoint.require(manifest.parameters, strict=False)


def test_ranks_with_different_parameters_are_joined(tmp_path: Path, tools: Any) -> None:
    def work(coordinator: Coordinator) -> Path:
        name = f"stage{coordinator.rank}.w"
        info = TensorInfo(name, (2,), "float32", True, 0)
        shared = TensorInfo("shared", (1,), "float32", True, 0)
        scalars = {name: {"step": 1.0 + coordinator.rank}}
        chunks = [Chunk("param", name, 0, torch.full((2,), float(coordinator.rank)))]
        if coordinator.rank == 1:
            chunks.append(Chunk("param", "shared", 0, torch.ones(1)))
        manifest = Manifest((info, shared), scalars=scalars)
        return save_checkpoint(tmp_path, "x", manifest, chunks, {}, coordinator)

    assert tools.run_ranks(3, work) == [tmp_path / "x"] * 3
    checkpoint = open_checkpoint(tmp_path)
    names = [info.name for info in checkpoint.manifest.parameters]
    assert names == ["stage0.w", "shared", "stage1.w", "stage2.w"]
    assert checkpoint.manifest.scalars["stage2.w"] == {"step": 3.0}
    assert checkpoint.read_tensor("param", "stage2.w").tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counters": {"global_steps": 9}}, "disagree about 'counters'"),
        ({"parameters": (TensorInfo("w", (2, 2), "float32", True, 0),)}, "disagree about param"),
        ({"scalars": {"w": {"step": 2}}}, "disagree about scalars of 'w'"),
    ],
)
def test_ranks_that_disagree_are_refused(
    tmp_path: Path, tools: Any, change: dict[str, Any], message: str
) -> None:
    def work(coordinator: Coordinator) -> Path:
        manifest = replace(weight_manifest(), scalars={"w": {"step": 1}})
        if coordinator.rank:
            manifest = replace(manifest, **change)
        part = [Chunk("param", "w", 2 * coordinator.rank, torch.zeros(2))]
        return save_checkpoint(tmp_path, "x", manifest, part, {}, coordinator)

    check_all_raise_the_same(tools.run_ranks(2, work), message)
    assert contents(tmp_path) == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aliases": {"v": "nobody"}}, "tied to 'nobody', which is not in the manifest"),
        ({"aliases": {"w": "w"}}, "both tied to 'w' and stored"),
        ({"counters": {"global_steps": 1.5}}, "global_steps should be an integer"),
        ({"optimizer": {"lr": torch.tensor(1.0)}}, "optimizer holds a tensor"),
        ({"schedule": object()}, "schedule is a builtins.object"),
        ({"parameters": (TensorInfo("w", (4,), "bf16", True, 0),)}, "unknown dtype 'bf16'"),
    ],
)
def test_manifests_that_could_not_be_read_back_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    manifest = replace(weight_manifest(), **change)
    part = [Chunk("param", "w", 0, torch.zeros(4))]
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, "x", manifest, part, {}, SoloCoordinator())
    assert contents(tmp_path) == set()
