"""Checkpoints of the engine: any stage and world size loads what any other saved (B45, B46)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_zero
from ds_comm.errors import CheckpointError, CheckpointNotFoundError
from ds_comm.testing.plugin import Ranks


class Net(nn.Module):
    """Odd sizes, a tied pair, a frozen layer, a buffer, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.out = nn.Linear(7, 13)
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(13))
        self.unused = nn.Linear(3, 1)
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.out(x) + self.shift.to(x.dtype)).square().mean() + x.abs().mean()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in params if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in params if n.endswith("bias")], "lr": 0.02},
    ]


def build(stage: int, precision: str = "fp32", optimizer: str = "AdamW") -> ds_zero.Engine:
    """An engine on :class:`Net` whose batch is 12 samples on any number of ranks."""
    model = Net()
    return ds_zero.initialize(
        model=model,
        model_parameters=_groups(model),
        config={
            "train_batch_size": 12,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        },
    ).engine


def _steps(engine: ds_zero.Engine, first: int, count: int) -> list[float]:
    """Train on the global batches of the given steps; the mean loss over ranks of each."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    dtype = torch.bfloat16 if engine.config.bf16.enabled else torch.float32
    for step in range(first, first + count):
        batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(batch.chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def save(folder: str, stage: int, precision: str, optimizer: str) -> list[float]:
    """Three steps, save, three more."""
    engine = build(stage, precision, optimizer)
    engine.module.shift.fill_(0.25)
    _steps(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"note": "mine", "tensor": torch.arange(3)})
    return _steps(engine, 3, 3)


def load(folder: str, stage: int, precision: str, optimizer: str) -> list[float]:
    """Load and train the same three steps."""
    engine = build(stage, precision, optimizer)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and path.endswith("global_step3")
    assert client is not None and client["note"] == "mine"
    assert torch.equal(client["tensor"], torch.arange(3))
    assert engine.global_steps == 3 and engine.global_samples == 36
    assert engine.lr_scheduler is not None
    assert (engine.module.shift == 0.25).all()
    return _steps(engine, 3, 3)


def _assert_resumes(
    ranks: Ranks, tmp: Path, stages: tuple[int, int], worlds: tuple[int, int], *how: str
) -> None:
    wanted = ranks(worlds[0], save, str(tmp), stages[0], *how)[0]
    found = ranks(worlds[1], load, str(tmp), stages[1], *how)[0]
    tolerance = 1e-6 if how[0] == "fp32" else 2e-2
    assert found == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    ("stages", "worlds"),
    [((1, 1), (2, 1)), ((2, 2), (2, 3)), ((3, 3), (2, 4)), ((3, 0), (3, 2)), ((0, 3), (1, 2)),
     ((2, 1), (4, 2)), ((1, 3), (3, 4))],
)  # fmt: skip
def test_resume_on_another_world_and_stage(
    ranks: Ranks, tmp_path: Path, stages: tuple[int, int], worlds: tuple[int, int]
) -> None:
    """B46: the next losses equal those of the uninterrupted run to 1e-6 (fp32, AdamW)."""
    _assert_resumes(ranks, tmp_path, stages, worlds, "fp32", "AdamW")


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "AdamW"), ("fp32", "RMSprop")])
def test_resume_other_precision_and_optimizer(
    ranks: Ranks, tmp_path: Path, precision: str, optimizer: str
) -> None:
    """bf16 with fp32 masters, and a torch optimiser on pieces of parameters."""
    _assert_resumes(ranks, tmp_path, (3, 2), (2, 3), precision, optimizer)


def moments(folder: str, stage: int, world: int) -> dict[str, Any]:
    """Save after two steps and describe the optimiser exactly."""
    engine = build(stage)
    _steps(engine, 0, 2)
    engine.save_checkpoint(folder, tag=7)
    from ds_zero.checkpoint import open_checkpoint

    stored = open_checkpoint(folder, 7)
    return {
        f"{kind}/{name}": stored.read_tensor(kind, name)
        for name in ("layers.0.weight", "out.bias")
        for kind in ("param", "exp_avg", "exp_avg_sq")
    } | {"step": stored.manifest.scalars["out.bias"]["step"]}


def reload(folder: str, stage: int) -> None:
    """Load and save again."""
    engine = build(stage)
    engine.load_checkpoint(folder, tag=7)
    engine.save_checkpoint(folder, tag="again")


def test_states_survive_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Masters, moments and step counts are the same bits after 2 -> 3 ranks, stage 1 -> 3."""
    from ds_zero.checkpoint import open_checkpoint

    wanted = ranks(2, moments, str(tmp_path), 1, 2)[0]
    ranks(3, reload, str(tmp_path), 3)
    again = open_checkpoint(tmp_path, "again")
    assert again.manifest.scalars["out.bias"]["step"] == wanted.pop("step") == 2
    for key, value in wanted.items():
        kind, name = key.split("/")
        assert torch.equal(again.read_tensor(kind, name), value), key
    assert "exp_avg" not in again.kinds("unused.weight")


def explicit_tag(folder: str, stage: int) -> None:
    """B45 on every rank."""
    engine = build(stage)
    _steps(engine, 0, 1)
    engine.save_checkpoint(folder, tag="early", save_latest=False)
    early = engine.module_state_dict()
    _steps(engine, 1, 3)
    engine.save_checkpoint(folder, tag="late", save_latest=False)
    engine.save_checkpoint(folder, tag=12, save_latest=False)
    engine.load_checkpoint(folder, tag="early", load_optimizer_states=False)
    found = engine.module_state_dict()
    assert all(torch.equal(found[name], early[name]) for name in early)
    engine.load_checkpoint(folder, tag=12)
    late = engine.module_state_dict()
    assert any(not torch.equal(late[name], early[name]) for name in early)
    with pytest.raises(CheckpointNotFoundError, match="latest"):
        engine.load_checkpoint(folder)
    assert engine.load_checkpoint(folder, missing_ok=True) == (None, None)
    with pytest.raises(CheckpointNotFoundError, match="early"):
        engine.load_checkpoint(folder, tag="erly")


@pytest.mark.parametrize("stage", [0, 3])
def test_explicit_tag(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """B45: the tag that was asked for is loaded, integer tags too, without ``latest``."""
    ranks(2, explicit_tag, str(tmp_path), stage)


def misfit(folder: str) -> None:
    """Another model and another optimiser."""
    trained = build(2)
    _steps(trained, 0, 2)
    trained.save_checkpoint(folder)
    plain = build(2, optimizer="SGD")
    before = plain.module_state_dict()
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        plain.load_checkpoint(folder)
    after = plain.module_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)  # nothing was loaded
    with pytest.raises(CheckpointError, match="cannot write"):
        plain.save_16bit_model("/proc/nowhere")
    with pytest.raises(CheckpointError, match="must end in"):
        plain.save_16bit_model(folder, "weights")
    other = ds_zero.initialize(
        model=nn.Linear(7, 7),
        config={"train_batch_size": 12, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ).engine
    with pytest.raises(CheckpointError, match="out.weight"):
        other.load_checkpoint(folder)


def test_a_checkpoint_of_something_else(ranks: Ranks, tmp_path: Path) -> None:
    """Named errors, never a partial load."""
    ranks(2, misfit, str(tmp_path))


def export(folder: str, stage: int, precision: str) -> dict[str, Tensor]:
    """Save, and return the gathered masters."""
    engine = build(stage, precision)
    _steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder + "/weights")
    return engine.module_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_export(ranks: Ranks, tmp_path: Path, stage: int, precision: str) -> None:
    """zero_to_fp32 gives the masters; the 16-bit file gives the compute dtype."""
    from safetensors.torch import load_file

    from ds_zero.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wanted = ranks(3, export, str(tmp_path), stage, precision)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].to(value.dtype), value), name
    file = load_file(tmp_path / "weights" / "model.safetensors")
    assert "layers.2.weight" not in file  # tied: stored once
    assert all(torch.equal(value, wanted[name]) for name, value in file.items())
    fewer = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert "layers.1.weight" not in fewer and "layers.1.bias" in fewer


def data_position(folder: str, resume: bool) -> list[list[float]]:
    """Samples that this rank sees: before the save, or after the load."""
    dataset = TensorDataset(torch.arange(30.0).reshape(30, 1))
    world = torch.distributed.get_world_size()
    engine, _, loader, _ = ds_zero.initialize(
        model=nn.Linear(1, 1),
        training_data=dataset,
        config={
            "train_batch_size": 6,
            "train_micro_batch_size_per_gpu": 6 // world,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        },
    )
    assert loader is not None
    if resume:
        engine.load_checkpoint(folder)
    seen: list[list[float]] = []
    for (batch,) in loader:
        engine.backward(engine(batch).sum())
        engine.step()
        seen.append(batch.flatten().tolist())
        if not resume and len(seen) == 2:
            engine.save_checkpoint(folder)
            break
    return seen


def test_data_position_resumes_on_another_world(ranks: Ranks, tmp_path: Path) -> None:
    """Two steps on 2 ranks and the rest of the epoch on 3: every sample exactly once."""
    before = ranks(2, data_position, str(tmp_path), False)
    after = ranks(3, data_position, str(tmp_path), True)
    seen = [x for result in (*before, *after) for batch in result for x in batch]
    assert sorted(seen) == list(range(30))
