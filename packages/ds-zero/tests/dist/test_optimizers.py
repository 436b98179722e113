"""Optimisers under the engine: every stage has the bits of stage 0, and the values of no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_zero
import ds_zero.optim
from ds_comm.collectives import Call, RecordingCollectives, collectives_for
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero import CoreOptions, ZeroCore
from ds_zero.config.optim import OptimizerSection
from ds_zero.optim import StepGradients, attach_optimizer, optimizer_from_config
from ds_zero.units import UnitRules

STEPS = 6


class Model(nn.Module):
    """Tied, frozen, unused, zero-size and one-element parameters; a unit with nothing on a rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(29, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.up = nn.Linear(8, 40, bias=False)
        self.down = nn.Linear(40, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.late = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 3)
        self.empty = nn.Linear(8, 0)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, late: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = x + self.down(torch.relu(self.up(self.frozen(x)))) * self.scale + self.empty(x).sum()
        x = x + self.late(x) if late else x
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _batch(step: int, world: int) -> Tensor:
    return torch.randint(29, (world, 3, 7), generator=torch.Generator().manual_seed(step))


CHOICES: dict[str, dict[str, Any]] = {
    "Lion": {"lr": 3e-3},
    "Adagrad": {"lr": 0.05},
    "Lamb": {"lr": 0.02},
    "Muon": {"lr": 0.02, "adam_lr": 1e-3},
    "Adafactor": {"lr": 0.02},
    "RMSprop": {"lr": 1e-3},
    "Adam8bit": {"lr": 1e-3},
}


def _engine(name: str, stage: int, model: nn.Module) -> ds_zero.Engine:
    return ds_zero.initialize(
        model=model,
        model_parameters=_groups(model),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": name, "params": CHOICES[name]},
            "gradient_clipping": 0.4,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        },
    ).engine


def _steps(engine: ds_zero.Engine, first: int, last: int) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(first, last):
        loss = engine(_batch(step, world)[rank], step % 3 == 1)
        engine.backward(loss)
        engine.step()


def train(name: str, stage: int) -> dict[str, Tensor]:
    """The parameters after some steps."""
    engine = _engine(name, stage, Model())
    _steps(engine, 0, STEPS)
    state = engine.module_state_dict()
    engine.destroy()
    return state


def reference(name: str, world: int) -> dict[str, Tensor]:
    """The same without an engine, on the whole batch."""
    model = Model()
    section = OptimizerSection(type=name, params=CHOICES[name])
    optimizer = optimizer_from_config(section, _groups(model), model)
    for step in range(STEPS):
        batch = _batch(step, world)
        for part in batch:
            (model(part, step % 3 == 1) / world).backward()
        for param in (p for p in model.parameters() if p.grad is not None and not p.numel()):
            param.grad = None  # torch's Adafactor divides by the size
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CHOICES)
def test_every_stage_equals_no_engine(ranks: Ranks, name: str, world: int) -> None:
    """fp32: stages bit-identical, on every rank; 2e-5 from one process without an engine."""
    wanted = reference(name, world)
    results = [found for stage in range(4) for found in ranks(world, train, name, stage)]
    for found in results:
        for key, value in results[0].items():
            assert torch.equal(found[key], value), key
            torch.testing.assert_close(value, wanted[key], rtol=2e-5, atol=2e-5, msg=key)


def save(name: str, stage: int, folder: str) -> dict[str, Tensor]:
    """Train, save half-way, and return what comes out at the end."""
    engine = _engine(name, stage, Model())
    _steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    engine.destroy()
    return {}


def resume(name: str, stage: int, folder: str, world: int) -> dict[str, Tensor]:
    """Continue from the checkpoint on the batches of ``world`` ranks, and return the parameters."""
    engine = _engine(name, stage, Model())
    engine.load_checkpoint(folder)
    rank, here = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(3, STEPS):
        batch = _batch(step, world)
        share = batch.flatten(0, 1).chunk(here)[rank] if here != world else batch[rank]
        engine.backward(engine(share, step % 3 == 1))
        engine.step()
    state = engine.module_state_dict()
    engine.destroy()
    return state


@pytest.mark.parametrize("name", CHOICES)
def test_states_reshard(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Saved at stage 2 by 2 ranks; loaded by 1, 2 and 3 at other stages: as if uninterrupted."""
    folder = str(tmp_path)
    ranks(2, save, name, 2, folder)
    wanted = ranks(2, train, name, 2)[0]
    for world, stage, bits in ((2, 3, True), (2, 0, True), (1, 1, False), (3, 3, False)):
        for found in ranks(world, resume, name, stage, folder, 2):
            for key, value in found.items():
                if bits:
                    assert torch.equal(value, wanted[key]), key
                torch.testing.assert_close(value, wanted[key], rtol=2e-5, atol=2e-5, msg=key)


# ---- objects of DeepSpeed's classes --------------------------------------------------------------


def _brought(kind: str, stage: int) -> tuple[dict[str, Tensor], bool]:
    """Train with an object, or with a function that makes one; did its groups stay the same?"""
    model = Model()
    given = _groups(model)
    optimizer: Any
    if kind == "MuonWithAuxAdam":
        matrices = [p for p in given[0]["params"] if p is not model.embed.weight]
        others = [model.embed.weight, *given[1]["params"]]
        groups = [
            {"params": matrices, "use_muon": True, "lr": 0.02, "weight_decay": 0.1},
            {"params": others, "use_muon": False, "lr": 1e-3},
        ]
        optimizer = ds_zero.optim.MuonWithAuxAdam(groups)
    elif kind == "function":
        optimizer = lambda params: ds_zero.optim.FusedAdam(params, lr=1e-3)  # noqa: E731
    else:
        make = vars(ds_zero.optim)[kind]
        optimizer = make(given, lr=1e-3)
    before = [] if kind == "function" else list(optimizer.param_groups)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    engine, found, *_ = ds_zero.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=given if kind == "function" else None,
        config=config,
    )
    _steps(engine, 0, 4)
    assert found is not None
    same = all(a is b for a, b in zip(found.param_groups, before, strict=bool(before)))
    state = engine.module_state_dict()
    engine.destroy()
    return state, same


@pytest.mark.parametrize(
    "kind",
    [
        "FusedAdam",
        "DeepSpeedCPUAdam",
        "DeepSpeedCPUAdagrad",
        "FusedLamb",
        "FusedLion",
        "DeepSpeedCPULion",
        "MuonWithAuxAdam",
        "function",
    ],
)
def test_objects_that_the_user_brings(ranks: Ranks, kind: str) -> None:
    """Groups stay the same objects; stages agree bit by bit; the parameters have moved."""
    first: dict[str, Tensor] | None = None
    for stage in (0, 3):
        for state, same in ranks(2, _brought, kind, stage):
            first = first or state
            assert same and all(torch.equal(state[name], value) for name, value in first.items())
    assert first is not None
    start = Model().state_dict()
    assert not torch.equal(first["up.weight"], start["up.weight"])
    assert torch.equal(first["frozen.weight"], start["frozen.weight"])
    assert torch.equal(first["unused.weight"], start["unused.weight"])


# ---- what whole-parameter algorithms send --------------------------------------------------------


def _sent(kind: str, stage: int) -> list[Call]:
    """What an update of four matrices of 8 x 8 sends, by kind of call."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    log = RecordingCollectives(collectives_for(Group.world()))
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if kind == "Muon":
        optimizer = ds_zero.optim.MuonWithAuxAdam([{"params": params, "use_muon": True}])
    elif kind == "Lamb":
        optimizer = ds_zero.optim.FusedLamb(params)
    else:
        optimizer = torch.optim.Adafactor(params)
    core = ZeroCore(
        model, [params], log, CoreOptions(stage=stage, rules=UnitRules(persistence_numel=0))
    )
    core.optimizer = attach_optimizer(
        optimizer, core.optimized_runs(), log, sharded=stage > 0, allow_untested=False
    )
    x = torch.randn(3, 8)
    for layer in model:
        x = layer(x)
    x.sum().backward()
    core.tracker.end_step()
    log.calls.clear()
    runs = core.gradients.all_runs()
    core.optimizer.update(StepGradients([run.reduced for run in runs], [[True] for _ in runs], 1.0))
    return log.calls


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_of_whole_parameter_updates(ranks: Ranks, stage: int) -> None:
    """Two ranks own two matrices each; half of a matrix is 32 elements of 4 bytes."""
    half = 32 * 4
    for rank in range(2):
        calls = ranks(2, _sent, "Muon", stage)[rank]
        # In: my half of the other's two.  Out: the other's half of my two, or at stage 0 all of it.
        wanted = [4 * half] if stage == 0 else [2 * half, 2 * half]
        assert [(c.kind, c.sent_bytes) for c in calls] == [("all_to_all", n) for n in wanted]
        calls = ranks(2, _sent, "Adafactor", stage)[rank]
        wanted = [4 * half] if stage == 0 else [2 * half, 2 * half, 2 * half]
        assert [(c.kind, c.sent_bytes) for c in calls] == [("all_to_all", n) for n in wanted]
        # Two sums of squares in fp64 for each of four parameters.
        calls = ranks(2, _sent, "Lamb", stage)[rank]
        assert [(c.kind, c.sent_bytes) for c in calls] == [("exchange", 4 * 2 * 8)]
