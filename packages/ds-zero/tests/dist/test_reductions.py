"""Mean, sum and predivide; reported bugs B29 and B31; dtypes of sums and of the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp16 import full_masters
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks

STAGES = (0, 1, 2, 3)


def _lin() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def _inputs(step: int) -> Tensor:
    return torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))


def _engine(stage: int, model: nn.Module | None = None, **extra: Any) -> ds_zero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **extra,
    }
    return ds_zero.initialize(model=model or _lin(), config=config).engine


def _against_torch(stage: int, accumulation: int, clip: float, extra: dict[str, Any]) -> None:
    """Masters equal torch to 1e-6 and the norm the unclipped one, whatever divides when."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    engine = _engine(
        stage, gradient_accumulation_steps=accumulation, gradient_clipping=clip, **extra
    )
    model = _lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = accumulation * (1 if extra.get("gradient_allreduce_op") == "sum" else world)
    for step in range(3):
        for micro in range(accumulation):
            batch = _inputs(10 * step + micro)
            (sum(model(x).square().mean() for x in batch[:world]) / count).backward()
            engine.backward(engine(batch[rank]).square().mean())
            if stage == 0 and accumulation == 1:
                shown = [p.grad for p in engine.module.parameters()]
                factor = extra.get("gradient_predivide_factor", 1.0)
                for grad, param in zip(shown, model.parameters(), strict=True):
                    assert (grad is None) == (factor != 1.0)
                    if grad is not None:
                        torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=1e-7)
            engine.step()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-6)
    for value, param in zip(full_masters(engine).values(), model.parameters(), strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gradient_allreduce_op": "sum"},
        {"gradient_predivide_factor": 8.0},
        {"gradient_predivide_factor": 3.0, "prescale_gradients": True},
        {"gradient_predivide_factor": 0.5, "gradient_allreduce_op": "sum"},
    ],
)
def test_how_ranks_are_combined(ranks: Ranks, stage: int, extra: dict[str, Any]) -> None:
    ranks(2, _against_torch, stage, 1, 0.05, extra)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_norm_and_clip_equal_torch(ranks: Ranks, stage: int, clip: float) -> None:
    """B31: gas 2, clip 0.05, three ranks too."""
    ranks(2, _against_torch, stage, 2, clip, {})
    ranks(3, _against_torch, stage, 2, clip, {"gradient_predivide_factor": 2.0})


class One(nn.Module):
    """One weight whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self) -> Tensor:
        return self.weight.sum()


def _thousand(stage: int, mode: str, extra: dict[str, Any]) -> float:
    engine = _engine(
        stage,
        One(),
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        gradient_accumulation_steps=1024,
        **{mode: {"enabled": True, **({"initial_scale_power": 4} if mode == "fp16" else {})}},
        **extra,
    )
    for _ in range(1024):
        engine.backward(engine())
        engine.step()
    return float(engine.module_state_dict()["weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_in_bf16(ranks: Ranks, stage: int) -> None:
    """B29: 1.0 with default settings at every stage; sums in bf16 stop growing at 1/4."""
    assert ranks(1, _thousand, stage, "bf16", {}) == [1.0]
    assert ranks(1, _thousand, stage, "fp16", {}) == [1.0]
    narrow = {"data_types": {"grad_accum_dtype": "bf16"}}
    # 256 / 1024 is where adding 1 / 1024 in bf16 rounds to the same; the reduced shards of stages
    # 2 and 3 add up in fp32.
    assert ranks(1, _thousand, stage, "bf16", narrow) == [1.75 if stage < 2 else 1.0]


def _wire(stage: int, dtype: str) -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    engine = _engine(stage, communication_data_type=dtype)
    for step in range(2):
        engine.backward(engine(_inputs(step)[rank]).square().mean())
        engine.step()
    return full_masters(engine)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_communication_data_type(ranks: Ranks, stage: int, dtype: str) -> None:
    """What travels is rounded to the wire's dtype, and nothing else is."""
    found = ranks(2, _wire, stage, dtype)[0]
    model = _lin()
    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for step in range(2):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x in _inputs(step)[:2]:
            grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for value, grad in zip(total, grads, strict=True):
                value += (grad * 0.5).to(narrow).float()
        with torch.no_grad():
            for param, value in zip(model.parameters(), total, strict=True):
                # Stage 0 brings the sum to every rank on the same wire.
                param -= 0.1 * (value.to(narrow).float() if stage == 0 else value)
    for value, param in zip(found.values(), model.parameters(), strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=1e-6, atol=1e-7)
