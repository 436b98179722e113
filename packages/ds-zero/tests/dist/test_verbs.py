"""The engine's smaller verbs: what it tells, what it sets, loaders, names of checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from twin import engine_of, inputs
from zoo import Stack

import ds_zero
from ds_comm.errors import CheckpointError, ConfigError
from ds_comm.mesh import Mesh
from ds_comm.testing.plugin import Ranks
from ds_zero import DistributedLoader


def _groups_engine(**extra: Any) -> ds_zero.Engine:
    model = Stack()
    return ds_zero.initialize(
        model=model,
        dist_init_required=False,
        model_parameters=[
            {"params": list(model.blocks.parameters()), "lr": 0.1, "type": "blocks"},
            {"params": [*model.inp.parameters(), *model.out.parameters()], "lr": 0.2},
        ],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.8, 0.9]}},
            **extra,
        },
    ).engine


def test_readings_of_the_optimiser() -> None:
    engine = _groups_engine(gradient_clipping=0.5)
    assert engine.get_lr() == [0.1, 0.2]
    assert [tuple(betas) for betas in engine.get_mom()] == [(0.8, 0.9)] * 2
    assert engine.get_type() == ["blocks", 0.0]
    assert engine.gradient_clipping() == 0.5
    assert engine.get_global_grad_norm() is None
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert not engine.zero_optimization() and engine.zero_optimization_stage() == 0
    assert not engine.wall_clock_breakdown() and engine.steps_per_print() is None
    bf16 = engine_of(Stack(), 2, bf16={"enabled": True}, steps_per_print=3)
    assert bf16.bfloat16_enabled() and bf16.zero_optimization() and bf16.steps_per_print() == 3


def test_set_lr() -> None:
    engine = _groups_engine()
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5, 0.5]
    engine.set_lr([np.float32(0.25), 0])
    assert engine.get_lr() == [0.25, 0.0] and all(type(rate) is float for rate in engine.get_lr())
    held = torch.tensor(1.0)
    engine.optimizer.param_groups[1]["lr"] = held  # type: ignore[union-attr]
    engine.set_lr((0.5, 0.75))
    assert held.item() == 0.75 and engine.get_lr() == [0.5, 0.75]
    for wrong in ([0.1], [0.1] * 3, -0.1, float("nan"), [0.1, float("inf")]):
        with pytest.raises(ConfigError, match="each of the 2"):
            engine.set_lr(wrong)
    assert engine.get_lr() == [0.5, 0.75]


def _places() -> tuple[int, ...]:
    rank = torch.distributed.get_rank()
    mesh = Mesh.build(world_size=4, rank=rank, tensor=2)

    class Mpu:
        get_data_parallel_group = staticmethod(lambda: mesh.data.handle)
        get_data_parallel_rank = staticmethod(lambda: mesh.data.rank)
        get_data_parallel_world_size = staticmethod(lambda: mesh.data.size)
        get_model_parallel_group = staticmethod(lambda: mesh.tensor.handle)
        get_model_parallel_rank = staticmethod(lambda: mesh.tensor.rank)
        get_model_parallel_world_size = staticmethod(lambda: mesh.tensor.size)

    engine = ds_zero.initialize(
        model=Stack(), mpu=Mpu(), config={"train_micro_batch_size_per_gpu": 1}
    ).engine
    assert engine.get_data_parallel_group() is mesh.data.handle
    assert engine.get_sequence_parallel_group() is None
    assert engine.train_batch_size() == 2
    return (
        engine.world_size,
        engine.dp_world_size,
        engine.mp_world_size,
        engine.global_rank,
        engine.get_data_parallel_rank(),
    )


def test_places_of_ranks(ranks: Ranks) -> None:
    """Two data ranks by two tensor ranks; the tensor axis is the last."""
    found = ranks(4, _places)
    assert found == [(4, 2, 2, rank, rank // 2) for rank in range(4)]


class Slow(Stack):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 3])
def test_wall_clock_times(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """Milliseconds of a window of two micro-steps and of its last one; parts add up."""
    engine = engine_of(Slow(), stage, wall_clock_breakdown=True, gradient_accumulation_steps=2)
    assert engine.get_wall_clock_timers() == {}
    for step in range(2):
        engine.backward(engine(inputs(step)).sum())
        with caplog.at_level("INFO", logger="ds_zero"):
            engine.step()
    times = engine.get_wall_clock_timers()
    names = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    assert set(times) == {*names, *(f"{name}_microstep" for name in names)}
    assert times["forward"] >= 40 and 20 <= times["forward_microstep"] < times["forward"]
    assert times["backward"] == pytest.approx(
        times["backward_inner"] + times["backward_allreduce"], rel=1e-6
    )
    assert caplog.text.count("time (ms) | forward: ") == 1
    assert engine_of(Stack(), stage).get_wall_clock_timers() == {}


# ---- loaders -----------------------------------------------------------------------------------


def _io(engine: ds_zero.Engine, count: int = 10, **kwargs: Any) -> list[list[int]]:
    loader = engine.deepspeed_io(TensorDataset(torch.arange(count)), **kwargs)
    return [batch[0].tolist() for batch in loader]


def test_routes() -> None:
    """Training shuffles and may drop; evaluation keeps order and every sample."""
    engine = engine_of(Stack(), 0, dataloader_drop_last=True)
    trained = _io(engine, 9)
    assert [len(batch) for batch in trained] == [2] * 4
    assert sorted(sum(trained, [])) != sum(trained, [])
    for route in ("predict", "eval"):
        found = sum(_io(engine, 9, route=route), [])
        assert found[:9] == list(range(9)) and set(found) == set(range(9))
    assert _io(engine, 4, shuffle=False) == [[0, 1], [2, 3]]
    assert _io(engine, 4, batch_size=np.int64(4), route="eval") == [[0, 1, 2, 3]]


def test_positional_arguments_are_those_of_deepspeed() -> None:
    """(dataset, batch size, route, pinned, sampler, collate, workers)."""
    engine = engine_of(Stack(), 0)
    dataset = TensorDataset(torch.arange(6))
    loader = engine.deepspeed_io(
        dataset, 3, "train", True, SequentialSampler(dataset), lambda samples: len(samples), 0
    )
    assert isinstance(loader, DataLoader) and list(loader) == [3, 3]
    assert isinstance(engine.deepspeed_io(dataset), DistributedLoader)


def test_a_sampler_decides() -> None:
    engine = engine_of(Stack(), 0)
    assert _io(engine, data_sampler=[7, 3, 3, 1]) == [[7, 3], [3, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"route": "test"}, "'test'"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "True"),
        ({"batch_size": 2.0}, r"2\.0"),
    ],
)
def test_wrong_loader_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _io(engine_of(Stack(), 0), **arguments)


# ---- checkpoints -------------------------------------------------------------------------------


def test_names_of_checkpoints(tmp_path: Path) -> None:
    engine = engine_of(nn.Linear(2, 2), 0)
    assert engine.loaded_checkpoint_tag is None
    engine.save_checkpoint(tmp_path, tag=np.int64(7))
    engine.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "global_step0", "latest"]
    engine.load_checkpoint(tmp_path, tag=7)
    assert engine.loaded_checkpoint_tag == "7"
    engine.load_checkpoint(tmp_path)
    assert engine.loaded_checkpoint_tag == "global_step0"
    for tag in (True, 1.5, ["a"], ""):
        with pytest.raises(CheckpointError, match="tag"):
            engine.save_checkpoint(tmp_path, tag=tag)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="tag"):
            engine.load_checkpoint(tmp_path, tag=tag)  # type: ignore[arg-type]
    assert engine.load_checkpoint(tmp_path, tag="none", missing_ok=True) == (None, None)
    assert engine.loaded_checkpoint_tag == "global_step0"


@pytest.mark.parametrize("state", [[1, 2], "text", 5, ("a", 1)])
def test_a_client_state_without_names(tmp_path: Path, state: Any) -> None:
    engine = engine_of(nn.Linear(2, 2), 0)
    with pytest.raises(CheckpointError, match="client_state must be a mapping"):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert list(tmp_path.iterdir()) == []


def test_loading_begins_a_new_window(tmp_path: Path) -> None:
    """Gradients from before the load do not count, nor do their micro-steps."""
    torch.manual_seed(0)
    engine = engine_of(Stack(), 1, gradient_accumulation_steps=2)
    engine.save_checkpoint(tmp_path)
    before = engine.module_state_dict()
    engine.backward(1000 * engine(inputs(0)).sum())
    engine.step()
    engine.load_checkpoint(tmp_path)
    for index in range(2):
        engine.backward(0 * engine(inputs(index)).sum())
        engine.step()
        assert engine.was_step_applied() == (index == 1)
    after = engine.module_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_numpy_sizes_in_the_configuration() -> None:
    config = {
        "train_micro_batch_size_per_gpu": np.int64(2),
        "gradient_accumulation_steps": np.int32(3),
        "gradient_clipping": np.float32(0.5),
    }
    engine = ds_zero.initialize(model=Stack(), dist_init_required=False, config=config).engine
    assert engine.get_batch_info() == (6, 2, 3) and engine.gradient_clipping() == 0.5
    assert all(type(size) is int for size in engine.get_batch_info())
