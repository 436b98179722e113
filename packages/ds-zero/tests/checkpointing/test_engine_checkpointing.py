"""The module-level functions with engines: stages, tensor ranks, configuration, transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import engine_of, inputs
from zoo import Block, Stack

import ds_zero
from ds_comm.collectives import RecordingCollectives
from ds_comm.errors import ConfigError
from ds_comm.mesh import Mesh
from ds_comm.testing.plugin import Ranks
from ds_zero import checkpointing
from ds_zero.checkpointing import api

RUNS: dict[str, Any] = {
    "plain": lambda function, *args: function(*args),
    "reentrant": checkpointing.checkpoint,
    "non-reentrant": checkpointing.non_reentrant_checkpoint,
}


def _forget() -> None:
    api._present = api._Present()


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Begin and end as a process that never called ``configure``."""
    _forget()
    yield
    _forget()


class Noisy(Block):
    """Dropout from the device's state and from the tensor ranks' own."""

    def forward(self, x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            x = F.dropout(x, 0.1)
        return super().forward(F.dropout(x, 0.1))


class Model(Stack):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))
        self.mode = mode

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = RUNS[self.mode](block, x)
        return out


def _trained(mode: str, stage: int, data_rank: int, **extra: Any) -> dict[str, Tensor]:
    torch.manual_seed(11)
    engine = engine_of(Model(mode), stage, **extra)
    checkpointing.model_parallel_cuda_manual_seed(100 * data_rank)
    for step in range(2):
        engine.backward(engine(inputs(2 * step + data_rank)).square().mean())
        engine.step()
    return engine.module_state_dict()


def _every_stage() -> None:
    rank = torch.distributed.get_rank()
    for stage in range(4):
        wanted = _trained("plain", stage, rank)
        for mode in ("reentrant", "non-reentrant"):
            got = _trained(mode, stage, rank)
            assert all(torch.equal(got[name], wanted[name]) for name in wanted), (mode, stage)


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage(ranks: Ranks, world: int) -> None:
    """Parameters after two steps with dropout, bit for bit those without checkpoints."""
    ranks(world, _every_stage)


class Megatron:
    """Two tensor ranks, two data ranks; the names of Megatron-LM."""

    def __init__(self) -> None:
        self.mesh = Mesh.build(world_size=4, rank=torch.distributed.get_rank(), tensor=2)

    def get_data_parallel_group(self) -> Any:
        return self.mesh.data.handle

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.data.size

    def get_tensor_model_parallel_group(self) -> Any:
        return self.mesh.tensor.handle

    def get_tensor_model_parallel_rank(self) -> int:
        return self.mesh.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.mesh.tensor.size


class Quiet(Model):
    """Without randomness, so that activations are equal on tensor ranks."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def _tensor_ranks(stage: int) -> None:
    mpu = Megatron()
    found = []
    for mode in ("plain", "reentrant", "non-reentrant"):
        torch.manual_seed(11)
        engine = ds_zero.initialize(
            model=Quiet(mode),
            mpu=mpu,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "activation_checkpointing": {"partition_activations": True},
            },
        ).engine
        assert checkpointing.is_configured()
        store = api._present.get()._store
        assert store is not None and store._tensor is not None
        log = RecordingCollectives(store._tensor)
        store._tensor = log
        for step in range(2):
            engine.backward(engine(inputs(2 * step + mpu.mesh.data.rank)).square().mean())
            engine.step()
        assert len(log.calls) == (0 if mode == "plain" else 6)
        found.append(engine.module_state_dict())
        engine.destroy()
    for state in found[1:]:
        assert all(torch.equal(state[name], found[0][name]) for name in state)
    checkpointing.model_parallel_cuda_manual_seed(10)
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(())
    seed = 10 + 2718 + mpu.mesh.tensor.rank
    assert torch.equal(drawn, torch.rand((), generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(torch.rand(()), torch.rand((), generator=torch.Generator().manual_seed(10)))
    _forget()


@pytest.mark.parametrize("stage", [1, 3])
def test_partitioned_over_tensor_ranks(ranks: Ranks, stage: int) -> None:
    """Two data ranks by two tensor ranks: one gather a checkpoint, bit-equal parameters."""
    ranks(4, _tensor_ranks, stage)


def test_configure() -> None:
    """Arguments win over the document; what neither says stays."""
    assert not checkpointing.is_configured()
    section = {"cpu_checkpointing": True, "number_checkpoints": 4}
    checkpointing.configure(
        None,
        {"activation_checkpointing": section, "train_batch_size": 1},
        num_checkpoints=7,
        profile=True,
    )
    assert checkpointing.is_configured()
    options = api._present.get().options
    assert options.cpu_checkpointing and options.profile and options.number_checkpoints == 7
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.set_num_layers(3)
    checkpointing.configure(contiguous_checkpointing=True)
    checkpointing.reset()
    options = api._present.get().options
    assert options.partition_activations and options.number_checkpoints == 3
    assert options.contiguous_memory_optimization and options.profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"contiguous_checkpointing": True, "checkpoint_in_cpu": True}, "number_checkpoints"),
        ({"contiguous_checkpointing": True, "num_checkpoints": 3}, "partition_activations or"),
        ({"num_checkpoints": 0}, "number_checkpoints"),
        ({"profile": "yes"}, "profile"),
        ({"deepspeed_config": {"activation_checkpointing": {"profil": True}}}, "profile"),
        ({"deepspeed_config": {"activation_checkpointing": 3}}, "activation_checkpointing"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpointing.configure(**arguments)
    assert not checkpointing.is_configured()


def test_the_section_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """It configures, unless ``configure`` was called, which is told where they differ."""
    engine_of(Stack(), 0)
    assert not checkpointing.is_configured()
    engine_of(Stack(), 0, activation_checkpointing={"profile": True})
    assert checkpointing.is_configured() and api._present.get().options.profile
    checkpointing.configure(profile=False)
    with caplog.at_level("WARNING"):
        engine_of(Stack(), 0, activation_checkpointing={"profile": True})
    assert "not applied" in caplog.text
    assert not api._present.get().options.profile


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_transformers_use_it(mode: str, stage: int) -> None:
    """Hugging Face's own switch takes the function; three steps, bit for bit."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    states = []
    calls: list[int] = []

    def counting(function: Any, *args: Any) -> Any:
        calls.append(1)
        return RUNS[mode](function, *args)

    for run in (None, counting):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if run is not None:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
        engine = engine_of(model, stage)
        engine.train()
        for step in range(3):
            ids = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        states.append(engine.module_state_dict())
    assert len(calls) == 3 * 2
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
