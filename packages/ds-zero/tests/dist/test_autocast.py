"""``torch_autocast``: fp32 parameters under torch's autocast, low-precision gathers at stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16 import full_masters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_zero
from ds_comm.collectives import RecordingCollectives, collectives_for
from ds_comm.errors import ConfigError, EngineError
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero.precision import AutocastChoice, lowered_params
from ds_zero.units import UnitRules

STAGES = (0, 1, 2, 3)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The head is tied to the embedding, which autocast does not cast."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def _tokens(step: int) -> Tensor:
    return torch.randint(0, 11, (4, 3, 5), generator=torch.Generator().manual_seed(step))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def _config(stage: int, dtype: str, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "fp16": {"initial_scale_power": 8},
        **extra,
    }


def _train(stage: int, dtype: str, checkpointed: bool) -> tuple[list[float], list[Tensor]]:
    model = Net(checkpointed=checkpointed)
    engine = ds_zero.initialize(model=model, config=_config(stage, dtype)).engine
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(4):
        logits = engine(_tokens(step)[rank])
        assert logits.dtype == DTYPES[dtype]
        loss = _loss(logits, _tokens(step)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.skipped_steps == 0
    assert engine.loss_scale == (256.0 if dtype == "fp16" else 1.0)
    assert not torch.is_autocast_enabled("cpu")
    lowered = {"blocks.0.up.weight", "blocks.1.down.bias"}
    for name, param in model.named_parameters():
        if stage < 3 or "norm" in name or "embed" in name:
            assert param.dtype == torch.float32
        else:
            assert param.dtype == DTYPES[dtype]
            lowered.discard(name)
    assert (stage < 3) == bool(lowered)
    state = engine.module_state_dict()
    assert all(value.dtype == torch.float32 for value in state.values())
    return losses, [state[name] for name, _ in model.named_parameters()]


def _plain(dtype: str, world: int) -> tuple[list[list[float]], list[Tensor]]:
    """Plain torch under autocast, fp32 parameters; losses of each rank."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == "fp16")
    losses = []
    for step in range(4):
        row = []
        for rank in range(world):
            with torch.autocast("cpu", DTYPES[dtype]):
                logits = model(_tokens(step)[rank])
            loss = _loss(logits, _tokens(step)[rank])
            scaler.scale(loss / world).backward()
            row.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(row)
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_equals_torch_autocast(ranks: Ranks, dtype: str, checkpointed: bool) -> None:
    """Stages 0 to 2 reduce in fp32 and equal torch to 1e-5; stage 3 to the dtype's rounding."""
    wanted_losses, wanted = _plain(dtype, 2)
    found = {stage: ranks(2, _train, stage, dtype, checkpointed) for stage in STAGES}
    for stage, results in found.items():
        tolerance = 1e-5 if stage < 3 else 2e-3
        for rank, (losses, values) in enumerate(results):
            assert losses == pytest.approx([row[rank] for row in wanted_losses], abs=tolerance)
            for value, other in zip(values, wanted, strict=True):
                torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
    for stage in (1, 2):
        for value, other in zip(found[stage][0][1], found[0][0][1], strict=True):
            assert torch.equal(value, other)


def _windows(stage: int, mode: str, length: int) -> list[Tensor]:
    """Windows of ``length`` micro-steps with clipping."""
    rank = torch.distributed.get_rank()
    config = _config(stage, "bf16", gradient_accumulation_steps=length, gradient_clipping=0.1)
    if mode == "bf16":
        config = {**config, "torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}
    engine = ds_zero.initialize(model=Net(), config=config).engine
    for step in range(4):
        engine.backward(_loss(engine(_tokens(step)[rank]), _tokens(step)[rank]))
        engine.step()
    return list(full_masters(engine).values())


@pytest.mark.parametrize(
    ("mode", "length", "classes"),
    [
        ("bf16", 1, [(0,), (1, 2, 3)]),
        ("bf16", 2, [(0, 1), (2, 3)]),
        ("autocast", 1, [(0, 1, 2), (3,)]),
        ("autocast", 2, [(0, 1), (2,), (3,)]),
    ],
)
def test_which_stages_are_bit_identical(
    ranks: Ranks, mode: str, length: int, classes: list[tuple[int, ...]]
) -> None:
    """Within a class every bit is the same, across them the rounding of the low dtype differs."""
    found = {stage: ranks(2, _windows, stage, mode, length)[0] for stage in STAGES}
    for members in classes:
        for stage in members[1:]:
            for value, other in zip(found[stage], found[members[0]], strict=True):
                assert torch.equal(value, other)
    for stage in STAGES:
        for value, other in zip(found[stage], found[0], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-3)


def _traffic(fp32_gradients: bool) -> list[tuple[str, str, int]]:
    """Kind, unit and bytes of every collective of one step at stage 3."""
    model = Net()
    log = RecordingCollectives(collectives_for(Group.world()))
    options = ds_zero.CoreOptions(
        stage=3,
        autocast=AutocastChoice(torch.bfloat16, ("Linear",)),
        wire_dtype=torch.float32 if fp32_gradients else None,
        rules=UnitRules(persistence_numel=0),
        prefetch=False,
    )
    core = ds_zero.ZeroCore(model, [list(model.parameters())], log, options)
    log.calls.clear()
    tokens = _tokens(0)[0]
    _loss(model(tokens), tokens).backward()
    calls = [(call.kind, call.label, call.sent_bytes) for call in log.calls]
    core.destroy()
    return calls


def test_safe_modules_travel_in_the_low_dtype(ranks: Ranks) -> None:
    """A block is one bf16 run of its linear layers and one fp32 run of its norm."""
    # 2 * 8 * 16 + 16 + 8 elements of linear layers; a norm's 2 * 8 fill two slots of 16.
    numel = {"blocks.0[bfloat16]": 320, "blocks.0[float32]": 32}
    for fp32_gradients in (False, True):
        calls = ranks(2, _traffic, fp32_gradients)[0]
        for label, size in numel.items():
            low = 2 if "bfloat16" in label else 4
            gathers = {n for kind, name, n in calls if (kind, name) == ("gather", label)}
            reductions = {n for kind, name, n in calls if (kind, name) == ("reduce", label)}
            assert gathers == {size // 2 * low}
            assert reductions == {size // 2 * (4 if fp32_gradients else low)}


def _outer_regions() -> None:
    engine = ds_zero.initialize(model=Net(), config=_config(3, "bf16")).engine
    tokens = _tokens(0)[0]
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(EngineError, match="torch_autocast"):
            engine(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        inside = engine(tokens)
    # The model itself runs under autocast too, and an exception in it ends the region.
    with torch.no_grad():
        assert torch.equal(engine.module(tokens), inside)
    with pytest.raises(IndexError):
        engine(tokens + 100)
    assert not torch.is_autocast_enabled("cpu")
    engine.destroy()
    wanted = dict(Net().named_parameters())
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, wanted[name])
    assert engine.module(tokens).dtype == torch.float32


def test_regions_outside(ranks: Ranks) -> None:
    ranks(1, _outer_regions)


def test_which_parameters_are_safe() -> None:
    model = Net()

    def names(*classes: str) -> set[str]:
        found = lowered_params(model, classes)
        return {name for name, param in model.named_parameters() if id(param) in found}

    inner = {n for n, _ in model.named_parameters() if ".up." in n or ".down." in n}
    assert names("Linear") == names("torch.nn.Linear") == inner
    assert names("torch.nn.Conv2d") == set()
    # Tied weights are safe where every owner is.
    assert names("Linear", "Embedding") == inner | {"embed.weight"}
    with pytest.raises(ConfigError, match="NoSuchLayer"):
        names("NoSuchLayer")
