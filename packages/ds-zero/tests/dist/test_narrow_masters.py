"""16-bit master weights and optimiser states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16 import full_masters
from torch import Tensor, nn

import ds_zero
from ds_comm.errors import ConfigError
from ds_comm.testing.plugin import Ranks

STAGES = (0, 1, 2, 3)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "Adam": {"lr": 0.05, "weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "weight_decay": 0.1},
    "Lamb": {"lr": 0.05, "weight_decay": 0.1},
    "Muon": {"lr": 0.05},
}


def _lin() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def _inputs(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(step)).to(dtype)


def _engine(stage: int, section: dict[str, Any], name: str, **extra: Any) -> ds_zero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": name, "params": OPTIMIZERS[name]},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **section,
        **extra,
    }
    return ds_zero.initialize(model=_lin(), config=config).engine


def _bf16(**flags: bool) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **flags}}


NARROW = {
    "bf16 masters": _bf16(bf16_master_weights_and_grads=True),
    "bf16 states": _bf16(bf16_optimizer_states=True),
    "both": _bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
    "fp16 masters": {
        "fp16": {"enabled": True, "initial_scale_power": 8, "fp16_master_weights_and_grads": True}
    },
}


def _train(stage: int, kind: str, name: str, steps: int = 4) -> list[Tensor]:
    engine = _engine(stage, NARROW[kind], name)
    low = torch.float16 if "fp16" in kind else torch.bfloat16
    rank = torch.distributed.get_rank()
    for step in range(steps):
        engine.backward(engine(_inputs(step, low)[rank]).float().square().mean())
        engine.step()
    assert engine.skipped_steps == 0
    masters = full_masters(engine)
    wanted = low if "masters" in kind or kind == "both" else torch.float32
    assert {value.dtype for value in masters.values()} == {wanted}
    for unit in engine.core.units:
        for run in unit.runs:
            # No second copy, except of what is released.
            assert run.aliased == (wanted == low and not unit.releasable)
    return [value.float() for value in masters.values()]


def _plain(kind: str, name: str, steps: int = 4) -> list[Tensor]:
    """The same by hand, in one process: fp32 arithmetic, rounded where a value is kept."""
    low = torch.float16 if "fp16" in kind else torch.bfloat16
    master_dtype = torch.float32 if kind == "bf16 states" else low
    state_dtype = torch.bfloat16 if kind in ("bf16 states", "both") else torch.float32
    masters = [nn.Parameter(p.detach().to(master_dtype).float()) for p in _lin().parameters()]
    options = {k: v for k, v in OPTIMIZERS[name].items() if k != "adam_w_mode"}
    optimizer = getattr(torch.optim, name)(masters, **options)
    model = copy.deepcopy(_lin()).to(low)
    scale = 256.0 if low == torch.float16 else 1.0
    for step in range(steps):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        totals = [torch.zeros_like(m) for m in masters]
        for x in _inputs(step, low):
            loss = model(x).float().square().mean() * scale
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for total, grad in zip(totals, grads, strict=True):
                total += (grad * 0.5).float()
        for master, total in zip(masters, totals, strict=True):
            kept = total.to(low).float() if master_dtype == low else total
            master.grad = kept / scale
        optimizer.step()
        with torch.no_grad():
            for master in masters:
                master.copy_(master.to(master_dtype))
                for key, value in optimizer.state[master].items():
                    if isinstance(value, Tensor) and value.dim():
                        optimizer.state[master][key] = value.to(state_dtype).float()
    return [master.detach() for master in masters]


@pytest.mark.parametrize("kind", sorted(NARROW))
@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        pytest.param("Adam", marks=pytest.mark.slow),
        pytest.param("SGD", marks=pytest.mark.slow),
        pytest.param("Adagrad", marks=pytest.mark.slow),
    ],
)
def test_equals_rounding_by_hand(ranks: Ranks, kind: str, name: str) -> None:
    """Arithmetic is fp32; only what is kept is rounded.  Sharding stages are bit-identical."""
    wanted = _plain(kind, name)
    found = {stage: ranks(2, _train, stage, kind, name)[0] for stage in STAGES}
    tolerance = 1e-2 if kind != "bf16 states" else 2e-3
    for stage in STAGES:
        for value, other in zip(found[stage], wanted, strict=True):
            # A last bit that rounds the other way moves a 16-bit value by one step.
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
    for stage in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(found[1], found[stage], strict=True))


@pytest.mark.parametrize("kind", sorted(NARROW))
@pytest.mark.parametrize("name", ["Lion", "Lamb", "Muon"])
@pytest.mark.slow
def test_other_optimisers(ranks: Ranks, kind: str, name: str) -> None:
    """Close to the same run with fp32 masters and states, and the same at every stage."""
    found = {stage: ranks(2, _train, stage, kind, name)[0] for stage in (1, 3)}
    for value, other in zip(found[1], found[3], strict=True):
        torch.testing.assert_close(value, other, rtol=1e-2, atol=1e-2)
    wanted = ranks(2, _fp32_masters, name, "fp16" in kind)[0]
    for value, other in zip(found[1], wanted, strict=True):
        torch.testing.assert_close(value, other, rtol=0.1, atol=0.06)


def _fp32_masters(name: str, half: bool) -> list[Tensor]:
    section = {"fp16": {"enabled": True, "initial_scale_power": 8}} if half else _bf16()
    low = torch.float16 if half else torch.bfloat16
    engine = _engine(1, section, name)
    for step in range(4):
        x = _inputs(step, low)[torch.distributed.get_rank()]
        engine.backward(engine(x).float().square().mean())
        engine.step()
    return list(full_masters(engine).values())


def _small_gradients() -> None:
    """With fp16 masters the loss scale is still taken out in fp32."""
    section = copy.deepcopy(NARROW["fp16 masters"])
    section["fp16"]["initial_scale_power"] = 16
    engine = _engine(1, section, "AdamW")
    before = full_masters(engine)
    x = _inputs(0, torch.float16)[torch.distributed.get_rank()]
    engine.backward(engine(x).float().square().mean() * 1e-7)
    engine.step()
    after = full_masters(engine)
    norm = engine.get_global_grad_norm()
    assert norm is not None and 0 < norm < 1e-6
    # Adam's first step has the size of the rate whatever the gradient.
    moved = (after["2.bias"].float() - before["2.bias"].float()).abs()
    assert bool((moved > 0.02).all())


def test_small_gradients_with_fp16_masters(ranks: Ranks) -> None:
    ranks(2, _small_gradients)


def _refusals() -> None:
    with pytest.raises(ConfigError, match="bf16_master_weights_and_grads too"):
        _engine_of_torch(_bf16(bf16_optimizer_states=True))
    with pytest.raises(ConfigError, match="fp16_master_weights_and_grads"):
        _engine_of_torch(NARROW["fp16 masters"])
    engine = _engine_of_torch(NARROW["both"])
    engine.backward(engine(_inputs(0, torch.bfloat16)[0]).float().square().mean())
    engine.step()
    assert engine.was_step_applied()


def _engine_of_torch(section: dict[str, Any]) -> ds_zero.Engine:
    model = _lin()
    return ds_zero.initialize(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 2, **section},
    ).engine


def test_what_torchs_optimisers_cannot_do(ranks: Ranks) -> None:
    ranks(1, _refusals)


def _through_checkpoints(folder: str) -> None:
    """fp32 into bf16 masters and back: what is narrower decides."""
    wide, narrow = _engine(1, _bf16(), "AdamW"), _engine(3, NARROW["both"], "AdamW")
    for engine in (wide, narrow):
        for step in range(3):
            x = _inputs(step, torch.bfloat16)[torch.distributed.get_rank()]
            engine.backward(engine(x).float().square().mean())
            engine.step()
    saved = full_masters(wide), full_masters(narrow)
    wide.save_checkpoint(folder, tag="wide")
    narrow.save_checkpoint(folder, tag="narrow")
    narrow.load_checkpoint(folder, tag="wide")
    wide.load_checkpoint(folder, tag="narrow")
    for name, value in full_masters(narrow).items():
        assert torch.equal(value, saved[0][name].bfloat16())
    for name, value in full_masters(wide).items():
        assert torch.equal(value, saved[1][name].float())
    for engine in (wide, narrow):
        x = _inputs(9, torch.bfloat16)[torch.distributed.get_rank()]
        engine.backward(engine(x).float().square().mean())
        engine.step()
        assert engine.was_step_applied()


def test_checkpoints_of_other_masters(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _through_checkpoints, str(tmp_path))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.body(x) + self.table)
        return out


def _buffers() -> None:
    model = Buffered()
    table = model.table
    engine = ds_zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "data_types": {"buffer_dtype": "bf16"},
            **_bf16(),
        },
    ).engine
    assert model.table is table and table.dtype == torch.bfloat16
    assert model.count.dtype == torch.int64
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == model.norm.weight.dtype == torch.float32
    assert torch.equal(table, torch.linspace(0, 1, 4).bfloat16())
    engine.backward(engine(_inputs(0, torch.bfloat16)[0]).float().square().mean())
    engine.step()


def test_buffer_dtype(ranks: Ranks) -> None:
    """Floating-point buffers are cast in place, except the statistics of batch norm."""
    ranks(1, _buffers)
