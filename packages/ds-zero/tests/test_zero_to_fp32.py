"""Export: exact values, the hub's layout, shard limits, tied and frozen weights, small memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from ds_comm.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from ds_zero.checkpoint import (
    Chunk,
    Manifest,
    SoloCoordinator,
    TensorInfo,
    open_checkpoint,
    save_checkpoint,
)
from ds_zero.checkpoint.export import export_weights, parse_size
from ds_zero.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)


class Model(nn.Module):
    """Sizes 7, 13 and 1, a frozen layer, a tied head, buffers."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 13)
        self.frozen = nn.Linear(13, 13)
        self.one = nn.Linear(13, 1)
        self.norm = nn.BatchNorm1d(13)
        self.head = nn.Linear(13, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)


def save_model(
    model: nn.Module, directory: Path, tag: str | int = "step1", *, excluded: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Save a model as an engine in bf16 would, and return the expected float32 state dict."""
    owners: dict[int, str] = {}
    aliases: dict[str, str] = {}
    infos: list[TensorInfo] = []
    chunks: list[Chunk] = []
    expected: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owners:
            aliases[name] = owners[id(parameter)]
            continue
        owners[id(parameter)] = name
        trainable = parameter.requires_grad
        infos.append(TensorInfo(name, tuple(parameter.shape), "bfloat16", trainable, 0))
        value = parameter.detach().reshape(-1)
        stored = value.clone() if trainable else value.bfloat16()
        expected[name] = stored.float().reshape(parameter.shape)
        if name in excluded:
            continue
        half = stored.numel() // 2
        chunks += [
            Chunk("param", name, 0, stored[:half]),
            Chunk("param", name, half, stored[half:]),
        ]
        if trainable:
            chunks.append(Chunk("exp_avg", name, 0, torch.ones_like(stored)))
    buffers = []
    for name, buffer in model.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        buffers.append(TensorInfo(name, tuple(buffer.shape), dtype, False, -1))
        chunks.append(Chunk("buffer", name, 0, buffer.reshape(-1)))
        expected[name] = buffer.clone()
    manifest = Manifest(tuple(infos), tuple(buffers), aliases, excluded=excluded)
    save_checkpoint(directory, tag, manifest, chunks, {}, SoloCoordinator())
    expected.update({alias: expected[owner] for alias, owner in aliases.items()})
    return expected


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


def test_state_dict_is_bit_equal_and_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = save_model(Model(), tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert_equal(state, expected)
    assert state["head.weight"] is state["embed.weight"]
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "step1"), expected)
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step1"), expected)


def test_lazy_mode_reads_when_asked(tmp_path: Path) -> None:
    expected = save_model(Model(), tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert all(isinstance(tensor, LazyTensor) for tensor in state.values())
    assert state["one.weight"].shape == (1, 13)
    assert state["one.weight"].numel() == 13
    assert_equal({name: tensor.contiguous() for name, tensor in state.items()}, expected)


def test_frozen_parameters(tmp_path: Path) -> None:
    """B38: all with, only trained ones (and buffers) without."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    expected = save_model(model, tmp_path)
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected)
    some = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert list(some) == ["1.weight", "1.bias"]
    save_model(model, tmp_path, "lean", excluded=("0.weight", "0.bias"))
    with pytest.raises(CheckpointError, match=r"saved without 2 frozen parameters \(0.weight"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    some = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert list(some) == ["1.weight", "1.bias"]


def test_explicit_tag(tmp_path: Path) -> None:
    """B45: the tag given is the one loaded, integers too, and without a `latest` file."""
    early, late = nn.Linear(3, 2), nn.Linear(3, 2)
    first = save_model(early, tmp_path, 100)
    save_model(late, tmp_path, "late")
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, 100), first)
    (tmp_path / "latest").unlink()
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "100"), first)
    with pytest.raises(CheckpointNotFoundError, match="give a tag, one of: '100', 'late'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_load_into_a_model(tmp_path: Path) -> None:
    expected = save_model(Model(), tmp_path)
    model = Model()
    assert load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert model.head.weight is model.embed.weight
    assert_equal(dict(model.state_dict()), expected)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), tmp_path)


def test_one_file(tmp_path: Path) -> None:
    expected = save_model(Model(), tmp_path / "ckpt")
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    found = load_file(out / "model.safetensors")
    del expected["head.weight"]  # stored once, under its owner
    assert_equal(found, expected)
    model = Model()
    missing, unexpected = load_model(model, out / "model.safetensors")
    assert not missing and not unexpected
    assert torch.equal(model.head.weight, expected["embed.weight"])


def read_export(out: Path) -> dict[str, Tensor]:
    """Read an export of either form through its index, as the hub's loaders do."""
    indices = list(out.glob("*.index.json"))
    if not indices:
        (file,) = out.iterdir()
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    index = json.loads(indices[0].read_text())
    files = {path.name for path in out.iterdir()} - {indices[0].name}
    assert files == set(index["weight_map"].values())
    found: dict[str, Tensor] = {}
    for name in sorted(files):
        path = out / name
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
        assert all(index["weight_map"][key] == name for key in content)
        found.update(content)
    assert found.keys() == index["weight_map"].keys()
    owned = {t.data_ptr(): t.numel() * t.element_size() for t in found.values()}
    assert index["metadata"]["total_size"] == sum(owned.values())
    return found


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    limit=st.integers(1, 6000),
    safe=st.booleans(),
)
def test_no_shard_exceeds_the_limit(
    sizes: list[int], limit: int, safe: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """B49: files in bytes on disk; only a tensor that is too big alone exceeds, and is alone."""
    folder = tmp_path_factory.mktemp("export")
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(n)) for i, n in enumerate(sizes)})
    expected = save_model(model, folder / "ckpt")
    convert_zero_checkpoint_to_fp32_state_dict(folder / "ckpt", folder / "out", limit, safe)
    assert_equal(read_export(folder / "out"), expected)
    for path in (folder / "out").iterdir():
        if path.suffix != ".json" and path.stat().st_size > limit:
            content = load_file(path) if safe else torch.load(path)
            assert len(content) == 1


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_and_tied(tmp_path: Path, safe: bool) -> None:
    expected = save_model(Model(), tmp_path / "ckpt")
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", out, "500B", safe)
    names = sorted(path.name for path in out.iterdir())
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    count = len(names) - 1
    assert count > 3
    assert names == sorted(
        [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]
        + [f"{stem}.{suffix}.index.json"]
    )
    index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"]["tied_weights"] == {"head.weight": "embed.weight"}
    found = read_export(out)
    if safe:
        del expected["head.weight"]
    else:
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert_equal(found, expected)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["5GB", "20KB"])
def test_transformers_loads_it(tmp_path: Path, safe: bool, limit: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model(torch.arange(4)[None])
    save_model(model, tmp_path / "ckpt")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", tmp_path / "out", limit, safe)
    config.save_pretrained(tmp_path / "out")
    if safe:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True, dtype=torch.float32
        )
        assert not info["missing_keys"]
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, use_safetensors=False
        )
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_stale_weights_are_not_left_beside_new_ones(tmp_path: Path) -> None:
    save_model(Model(), tmp_path / "ckpt")
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", out)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", out)  # the same name: replaced
    with pytest.raises(CheckpointError, match=r"already holds weights.*model\.safetensors"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", out, 500)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_a_damaged_checkpoint_exports_nothing(tmp_path: Path) -> None:
    save_model(Model(), tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt" / "step1").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[65600] ^= 1
    file.write_bytes(content)
    for safe in (True, False):
        with pytest.raises(CheckpointError, match="is damaged"):
            convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "ckpt", tmp_path / "out", safe_serialization=safe
            )
        assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("200MB", 2 * 10**8),
        ("10KiB", 10240),
        ("7", 7),
        ("7B", 7),
        ("2 TB", 2 * 10**12),
        (123, 123),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "0", 0, -3, True, None, 1.5, "0.1B"])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)  # type: ignore[arg-type]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = save_model(Model(), tmp_path / "ckpt", "step 1")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "ckpt"), str(out), "-t", "step 1", "--max_shard_size", "1GB"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [str(out / "model.safetensors")]
    assert "100%" in shown.err  # the bar
    assert_equal(
        {**load_file(out / "model.safetensors"), "head.weight": expected["head.weight"]}, expected
    )
    assert main([str(tmp_path / "ckpt"), str(tmp_path / "bin"), "--no-safe_serialization"]) == 0
    assert_equal(torch.load(tmp_path / "bin" / "pytorch_model.bin"), expected)
    assert main([str(tmp_path / "none"), str(out)]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main([str(tmp_path / "ckpt"), str(out), "--max_shard_size", "lots"]) == 2
    assert "'lots' is no size" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        main([str(tmp_path / "none"), str(out), "--debug"])


def test_help_shows_examples() -> None:
    command = [sys.executable, "-m", "ds_zero.zero_to_fp32", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for flag in (
        "--max_shard_size",
        "--safe_serialization",
        "--tag",
        "--exclude_frozen_parameters",
    ):
        assert flag in shown
    assert "examples:" in shown and "pickled" in shown


@pytest.mark.parametrize("safe", [True, False])
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, safe: bool) -> None:
    def anonymous_kb() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    data = torch.ones(16 * 2**20)  # 64 MiB
    manifest = Manifest((TensorInfo("w", (4096, 4096), "bfloat16", True, 0),))
    save_checkpoint(
        tmp_path / "ckpt", "x", manifest, [Chunk("param", "w", 0, data)], {}, SoloCoordinator()
    )
    before = anonymous_kb()
    peak = [before]
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        export_weights(
            checkpoint,
            tmp_path / "out",
            max_shard_bytes=10**9,
            safe_serialization=safe,
            progress=lambda _: peak.append(anonymous_kb()),
        )
    assert max(*peak, anonymous_kb()) - before < 24_000
