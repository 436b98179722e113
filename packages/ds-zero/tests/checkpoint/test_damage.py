"""Damaged, missing, mixed-up and future checkpoints are refused, never loaded in part."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zero.checkpoint import CheckpointError, CheckpointNotFoundError, open_checkpoint, rank_files


def load_everything(folder: Path, state: Any) -> None:
    """Load as an engine would; any value that comes out must be right."""
    checkpoint = open_checkpoint(folder, "x")
    client = checkpoint.client_state
    assert isinstance(client["t"], torch.Tensor) and client["t"].tolist() == [1, 2, 3]
    for (kind, name), tensor in state.tensors.items():
        assert torch.equal(checkpoint.read_tensor(kind, name), tensor)


@pytest.fixture
def saved(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    monkeypatch.setattr(rank_files, "FIRST_HEADER_BYTES", 2048)
    state = tools.example_state()
    results = tools.save(tmp_path, "x", state, 2, client={"t": torch.tensor([1, 2, 3])})
    assert results == [tmp_path / "x"] * 2
    load_everything(tmp_path, state)
    return tmp_path, state


def test_a_flipped_bit_anywhere(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    detected = harmless = 0
    for path in sorted((folder / "x").iterdir()):
        content = path.read_bytes()
        step = 29 if path.suffix == ".json" else 11
        for position in range(0, len(content), step):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            try:
                load_everything(folder, state)
                harmless += 1
            except CheckpointError as error:
                assert str(folder) in str(error)
                detected += 1
        path.write_bytes(content)
    assert detected > 400
    assert harmless <= 4  # alignment bytes between tensors, which nobody reads


@pytest.mark.parametrize("keep", [0, 1, 8, 100, 2055, -1])
def test_truncated_files(saved: tuple[Path, Any], keep: int) -> None:
    folder, state = saved
    for path in sorted((folder / "x").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            open_checkpoint(folder, "x")
        path.write_bytes(content)
    path = folder / "x" / "rank-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="too long"):
        open_checkpoint(folder, "x")


def test_truncated_after_opening(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    checkpoint = open_checkpoint(folder, "x")
    for path in (folder / "x").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:2100])
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.verify()


def test_missing_file(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    path = folder / "x" / "rank-00001-of-00002.safetensors"
    path.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{re.escape(str(path))} is missing"):
        open_checkpoint(folder, "x")


def test_missing_index_tag_and_latest(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    (folder / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match="give a tag, one of: 'x'"):
        open_checkpoint(folder)
    for content in (b"", b"../x\n", b"\xff\xfe", b"a\nb\n"):
        (folder / "latest").write_bytes(content)
        with pytest.raises(CheckpointError, match="latest"):
            open_checkpoint(folder)
    (folder / "latest").write_text("gone")
    with pytest.raises(CheckpointNotFoundError, match=r"'gone', which .*latest names.*'x'"):
        open_checkpoint(folder)
    (folder / "latest").write_text("x")  # no newline, as other tools write it
    assert open_checkpoint(folder).tag == "x"
    (folder / "x" / "index.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"holds no index\.json"):
        open_checkpoint(folder, "x")


def test_shard_from_another_run(saved: tuple[Path, Any], tools: Any, tmp_path: Path) -> None:
    folder, state = saved
    other = tmp_path / "other"
    tools.save(other, "x", state, 2, client={"t": torch.tensor([1, 2, 3])})
    name = "rank-00001-of-00002.safetensors"
    shutil.copy(other / "x" / name, folder / "x" / name)
    with pytest.raises(CheckpointError, match=f"{name} belongs to another save"):
        load_everything(folder, state)
    tools.save(other, "longer", tools.example_state(scale=9), 2)
    shutil.copy(other / "longer" / name, folder / "x" / name)
    with pytest.raises(CheckpointError, match=f"{name} belongs to another save"):
        open_checkpoint(folder, "x")


def rewrite(index: Path, edit: Callable[[dict[str, Any]], None], version: int = 1) -> None:
    """Change an index and give it a right checksum, as no accident would."""
    document = json.loads(index.read_text())
    edit(document)
    for key in ("format", "version", "crc32"):
        document.pop(key, None)
    body = json.dumps(document)[1:].encode() + b"\n"
    first = (
        f'{{"format": "ds-zero-checkpoint", "version": {version}, '
        f'"crc32": "{zlib.crc32(body):08x}",\n'
    )
    index.write_bytes(first.encode() + body)


def test_newer_format_version(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    rewrite(folder / "x" / "index.json", lambda document: None, version=2)
    with pytest.raises(CheckpointError, match=r"has format version 2, .* reads version 1; install"):
        open_checkpoint(folder, "x")


def test_rewriting_unchanged_is_accepted(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    rewrite(folder / "x" / "index.json", lambda document: document.update(future_hint=1))
    load_everything(folder, state)


def _edit_range(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["ranges"][0].update(change)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("ranges"), "ranges"),
        (lambda d: d["parameters"][0].update(shape=[-1]), "shape"),
        (lambda d: d["parameters"][0].update(shape="7"), "shape should be a list"),
        (lambda d: d.update(mesh=[]), "mesh should be an object"),
        (lambda d: d["counters"].update(a=True), "a should be an integer"),
        (lambda d: d.update(save_id="../.."), "malformed save_id"),
        (lambda d: d.update(block_bytes=0), "block_bytes"),
        (lambda d: d["files"][0].update(name="../../etc/passwd"), "malformed file name"),
        (lambda d: d["files"][0].update(name="/etc/passwd"), "malformed file name"),
        (_edit_range(file="rank-00009-of-00002.safetensors"), "lies outside"),
        (_edit_range(offset=0), "lies outside"),
        (_edit_range(offset=10**9), "lies outside"),
        (_edit_range(numel=10**12), "lies outside"),
        (_edit_range(dtype="object"), "unknown dtype"),
        (_edit_range(crc32=[]), "checksums"),
        (_edit_range(crc32=["xyz"]), "hex digits"),
        (lambda d: d.update(optimizer={"$tensor": "0", "shape": [], "dtype": "int64"}), "tensors"),
        (lambda d: d.update(schedule={"$pickle": "gASV"}), "unknown keys"),
    ],
)
def test_hostile_indices(
    saved: tuple[Path, Any], edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder, _ = saved
    rewrite(folder / "x" / "index.json", edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, "x")


def test_ranges_left_out_of_the_index(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    rewrite(folder / "x" / "index.json", lambda document: document["ranges"].pop(0))
    with pytest.raises(CheckpointError, match="incomplete|missing|stores no"):
        load_everything(folder, state)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b"\x80\x04", b'{"format": "ds-zero-checkpoint"}']
)
def test_something_else_called_index(saved: tuple[Path, Any], content: bytes) -> None:
    folder, _ = saved
    (folder / "x" / "index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder, "x")
