"""Any ranges written by any number of ranks are read as any other ranges."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ds_zero.checkpoint import (
    Checkpoint,
    CheckpointError,
    Chunk,
    Manifest,
    SoloCoordinator,
    TensorInfo,
    open_checkpoint,
    rank_files,
    save,
    save_checkpoint,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def assert_same(checkpoint: Checkpoint, state: Any) -> None:
    for (kind, name), tensor in state.tensors.items():
        found = checkpoint.read_tensor(kind, name)
        if tensor.numel():
            assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert raw(found) == raw(tensor)


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_layout_to_any_layout(data: st.DataObject, tools: Any, small_blocks: int) -> None:
    world = data.draw(st.integers(1, 4))
    tensors = {}
    for index in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = data.draw(st.sampled_from(DTYPES))
        size = int(np.prod(shape)) * dtype.itemsize
        seed = data.draw(st.integers(0, 2**32 - 1))
        content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        if dtype is torch.bool:
            content &= 1
        tensor = torch.from_numpy(content).view(dtype) if size else torch.empty(0, dtype=dtype)
        tensors["param" if index % 2 else "buffer", f"t{index}"] = tensor.reshape(shape)
    state = tools.State(tensors)
    with tempfile.TemporaryDirectory() as folder:
        results = tools.save(Path(folder), "x", state, world, data.draw(st.integers(0, 99)))
        assert results == [Path(folder) / "x"] * world
        with open_checkpoint(folder) as checkpoint:
            for (kind, name), tensor in tensors.items():
                numel = tensor.numel()
                for _ in range(3):
                    low = data.draw(st.integers(0, numel))
                    high = data.draw(st.integers(low, numel))
                    out = torch.empty(high - low, dtype=tensor.dtype)
                    checkpoint.read(kind, name, low, out)
                    assert raw(out) == raw(tensor.reshape(-1)[low:high])
            assert_same(checkpoint, state)
            checkpoint.verify()


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_reshard_of_awkward_sizes(tmp_path: Path, tools: Any, writers: int) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "x", state, writers)
    for readers in (1, 2, 3, 4):
        with open_checkpoint(tmp_path, "x") as checkpoint:
            assert_same(checkpoint, state)
            for (kind, name), tensor in state.tensors.items():
                width = -(-tensor.numel() // readers)
                shards = []
                for rank in range(readers):
                    low = min(rank * width, tensor.numel())
                    count = min(width, tensor.numel() - low)
                    shards.append(torch.empty(count, dtype=tensor.dtype))
                    checkpoint.read(kind, name, low, shards[-1])
                assert raw(torch.cat(shards)) == raw(tensor)


def test_everything_else_comes_back(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    manifest = {
        "mesh": {"world": 2, "shard": 2},
        "counters": {"global_steps": 7, "skipped_steps": 0},
        "scalars": {"embed.weight": {"step": 7.0, "n": 3, "on": True, "name": "x"}},
        "schedule": {"last": 3, "lrs": [0.1, float("inf")], "none": None},
        "data": {"epoch": 1, "position": 96},
        "optimizer": {"type": "AdamW", "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
    }
    tools.save(tmp_path, 12, state, 2, **manifest)
    checkpoint = open_checkpoint(tmp_path, 12)
    assert checkpoint.manifest == state.manifest(**manifest)
    assert isinstance(checkpoint.manifest.scalars["embed.weight"]["on"], bool)
    assert isinstance(checkpoint.manifest.scalars["embed.weight"]["step"], float)
    assert checkpoint.tag == "12"
    assert checkpoint.kinds("embed.weight") == {"param", "exp_avg", "exp_avg_sq"}
    assert checkpoint.kinds("head.weight") == {"param", "exp_avg", "exp_avg_sq"}
    assert checkpoint.kinds("nothing.weight") == {"param", "exp_avg"}
    assert checkpoint.kinds("count") == {"buffer"}
    assert checkpoint.shape("param", "scalar") == ()
    tied = checkpoint.read_tensor("param", "head.weight")
    assert torch.equal(tied, state.tensors["param", "embed.weight"])


def test_converts_between_floating_dtypes_only(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "x", state)
    checkpoint = open_checkpoint(tmp_path)
    source = state.tensors["param", "embed.weight"].reshape(-1)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        out = torch.empty(50, dtype=dtype)
        checkpoint.read("param", "embed.weight", 30, out)
        assert torch.equal(out, source[30:80].to(dtype))
    strided = torch.zeros(100)[::2]
    checkpoint.read("param", "embed.weight", 0, strided)
    assert torch.equal(strided, source[:50])
    with pytest.raises(CheckpointError, match="stored as float32 and cannot be read as int64"):
        checkpoint.read("param", "embed.weight", 0, torch.empty(1, dtype=torch.int64))
    with pytest.raises(CheckpointError, match="stored as int64 and cannot be read as int32"):
        checkpoint.read("buffer", "count", 0, torch.empty(1, dtype=torch.int32))


def test_wrong_requests_are_refused(tmp_path: Path, tools: Any) -> None:
    tools.save(tmp_path, "x", tools.example_state())
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no parameter.*'embed.wieght'; similar: embed.wei"):
        checkpoint.kinds("embed.wieght")
    with pytest.raises(CheckpointError, match="no 'momentum' of 'embed.weight'; stored: exp_avg"):
        checkpoint.read("momentum", "embed.weight", 0, torch.empty(1))
    for start, numel in ((-1, 1), (91, 1), (0, 92)):
        with pytest.raises(CheckpointError, match="has 91 elements"):
            checkpoint.read("param", "embed.weight", start, torch.empty(numel))
    with pytest.raises(CheckpointError, match="must be 1-D"):
        checkpoint.read("param", "embed.weight", 0, torch.empty(2, 2))


def test_require_lists_all_differences(tmp_path: Path, tools: Any) -> None:
    state = tools.example_state()
    tools.save(tmp_path, "x", state)
    checkpoint = open_checkpoint(tmp_path)
    manifest = state.manifest()
    checkpoint.require(manifest.parameters, manifest.buffers)
    tied = TensorInfo("head.weight", (7, 13), "float32", True, 0)
    checkpoint.require([tied], strict=False)
    other = [TensorInfo("embed.weight", (13, 7), "float32", True, 0), *manifest.parameters[1:]]
    extra = TensorInfo("new.weight", (1,), "float32", True, 0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.require([*other, extra], manifest.buffers[1:])
    text = str(caught.value)
    assert "embed.weight [7, 13] -> [13, 7]" in text
    assert "in the model but not stored: new.weight" in text
    assert "stored but not in the model: half" in text
    with pytest.raises(CheckpointError, match="another shape"):
        checkpoint.require(other, strict=False)


def test_reads_only_the_blocks_it_needs(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(save, "BLOCK_BYTES", 4096)
    weight = torch.arange(100_000, dtype=torch.float32)
    state = tools.State({("param", "w"): weight})
    save_checkpoint(
        tmp_path, "x", state.manifest(), [Chunk("param", "w", 0, weight)], {}, SoloCoordinator()
    )
    taken: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        taken.append(sum(len(b) for b in buffers))
        return preadv(fd, buffers, offset)

    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read("param", "w", 0, torch.empty(1))  # opens the file, reads its header
    monkeypatch.setattr(os, "preadv", counting)
    out = torch.empty(1000)
    checkpoint.read("param", "w", 50_000, out)  # bytes 200000..204000: blocks 48 and 49
    assert torch.equal(out, weight[50_000:51_000])
    assert taken == [4096, 4096]
    taken.clear()
    checkpoint.read("param", "w", 50_000, out)  # verified before: only what is wanted
    assert sum(taken) == 4000
    taken.clear()
    checkpoint.read("param", "w", 0, torch.empty(100_000))  # whole: nothing twice
    assert sum(taken) == 400_000


def test_files_are_what_the_format_page_says(tmp_path: Path, tools: Any, small_blocks: int) -> None:
    """Reads a checkpoint with struct, json and zlib alone."""
    state = tools.example_state()
    tools.save(tmp_path, "s", state, 3, client={"seen": 5})
    folder = tmp_path / "s"
    assert (tmp_path / "latest").read_text() == "s\n"
    text = (folder / "index.json").read_bytes()
    index = json.loads(text)
    assert index["format"] == "ds-zero-checkpoint"
    assert index["version"] == 1
    assert int(index["crc32"], 16) == zlib.crc32(text.split(b"\n", 1)[1])
    assert index["client_state"] == {"seen": 5}
    assert {f.name for f in folder.iterdir()} == {
        "index.json",
        *(f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)),
    }
    for entry in index["files"]:
        content = (folder / entry["name"]).read_bytes()
        assert len(content) == entry["size"]
        (length,) = struct.unpack("<Q", content[:8])
        assert length + 8 == entry["data_offset"]
        header = content[8 : 8 + length]
        assert zlib.crc32(header) == int(entry["header_crc32"], 16)
        assert json.loads(header)["__metadata__"]["save_id"] == index["save_id"]
    sizes: dict[tuple[str, str], int] = {}
    for entry in index["ranges"]:
        content = (folder / entry["file"]).read_bytes()
        dtype = getattr(torch, entry["dtype"])
        assert entry["offset"] % dtype.itemsize == 0
        data = content[entry["offset"] : entry["offset"] + entry["numel"] * dtype.itemsize]
        blocks = [data[i : i + 64] for i in range(0, len(data), 64)]
        assert [zlib.crc32(b) for b in blocks] == [int(c, 16) for c in entry["crc32"]]
        whole = raw(state.tensors[entry["kind"], entry["name"]])
        begin = entry["start"] * dtype.itemsize
        assert whole[begin : begin + len(data)] == data
        key = entry["kind"], entry["name"]
        sizes[key] = sizes.get(key, 0) + len(data)
    assert sizes == {key: len(raw(tensor)) for key, tensor in state.tensors.items()}


def test_the_safetensors_library_reads_every_file(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "FIRST_HEADER_BYTES", 512)  # forces several files per rank
    state = tools.example_state()
    tools.save(tmp_path, "x", state, 2)
    files = sorted((tmp_path / "x").glob("*.safetensors"))
    assert any("-part1" in file.name for file in files)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(load_file(file))
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, state)
    for item in checkpoint.index.ranges:
        flat = state.tensors[item.kind, item.name].reshape(-1)
        stored = found[f"{item.kind}:{item.name}:{item.start}"]
        assert raw(stored) == raw(flat[item.start : item.stop])


def test_a_first_version_checkpoint_still_loads() -> None:
    folder = Path(__file__).parent / "data" / "version1"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tag == "step3"
    checkpoint.verify()
    weight = checkpoint.read_tensor("param", "weight")
    assert torch.equal(weight, torch.arange(21.0).reshape(3, 7))
    assert torch.equal(checkpoint.read_tensor("exp_avg", "tied"), weight / 2)
    frozen = checkpoint.read_tensor("param", "frozen")
    assert torch.equal(frozen, torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    assert checkpoint.read_tensor("buffer", "steps").item() == 3
    manifest = checkpoint.manifest
    assert manifest.counters == {"global_steps": 3}
    assert manifest.mesh == {"world": 2, "shard": 2}
    assert manifest.scalars == {"weight": {"step": 3.0}}
    assert manifest.optimizer == {"type": "AdamW", "param_groups": [{"betas": (0.9, 0.95)}]}
    assert manifest.parameters[1].trainable is False
    state = checkpoint.client_state
    assert isinstance(state["seen"], torch.Tensor) and state["seen"].tolist() == [1, 2]
    assert state["note"] == ("a", float("inf"))


def test_host_memory_is_written_without_a_copy(tmp_path: Path) -> None:
    def anonymous_kb() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    weight = torch.ones(16 * 2**20)  # 64 MiB
    peak = [0]

    def chunks() -> Any:
        yield Chunk("param", "w", 0, weight)
        peak[0] = anonymous_kb()

    manifest = Manifest((TensorInfo("w", (16, 2**20), "float32", True, 0),))
    before = anonymous_kb()
    save_checkpoint(tmp_path, "x", manifest, chunks(), {}, SoloCoordinator())
    assert peak[0] - before < 16_000
