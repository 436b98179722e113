"""A skipped step names the first non-finite gradient, and the ranks that it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks
from ds_zero.non_finite import NonFinite

STAGES = (0, 1, 2, 3)


class Poison(torch.autograd.Function):
    """Puts a NaN into the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        if ctx.on:
            grad[0, 0] = float("nan")
        return grad, None


class Stack(nn.Module):
    """A NaN comes up below block ``self.bad``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.bad: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = Poison.apply(block(x).tanh(), index == self.bad)
        return x


def _engine(stage: int, precision: str, **extra: Any) -> ds_zero.Engine:
    modes = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "auto_cast": True}},
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **modes[precision],
        **extra,
    }
    return ds_zero.initialize(model=Stack(), config=config).engine


def _step(engine: ds_zero.Engine, factor: float = 1.0) -> NonFinite | None:
    rank = torch.distributed.get_rank()
    dtype = torch.bfloat16 if engine.config.bf16.enabled else torch.float32
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(x).float().square().mean() * factor)
        engine.step()
    return engine.get_non_finite_gradient()


def _named(stage: int, precision: str, accumulation: int) -> list[str]:
    engine = _engine(stage, precision, gradient_accumulation_steps=accumulation)
    rank = torch.distributed.get_rank()
    assert _step(engine) is None
    messages = []
    # In the backward pass of one rank, between blocks 1 and 2.
    for attempt in range(2):
        engine.module.bad = 1 if rank == 1 else None
        problem = _step(engine)
        assert problem is not None
        assert (problem.unit, problem.loss_ranks) == ("blocks.1", ())
        assert problem.param == "blocks.1.bias"
        # Local gradients are watched under loss scaling, and once a step was skipped.
        watched = precision == "fp16" or attempt == 1
        assert problem.ranks == ((1,) if watched else ())
        assert not engine.was_step_applied() and engine.skipped_steps == attempt + 1
        messages.append(str(problem))
    engine.module.bad = None
    assert _step(engine) is None and engine.was_step_applied()
    # In the loss of one rank: everything is contaminated, the last parameter is named.
    problem = _step(engine, factor=float("nan") if rank == 1 else 1.0)
    assert problem is not None
    assert (problem.param, problem.loss_ranks) == ("blocks.3.bias", (1,))
    messages.append(str(problem))
    return messages


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameter_unit_and_rank(ranks: Ranks, stage: int, precision: str) -> None:
    """The same on both ranks."""
    found = ranks(2, _named, stage, precision, 2 if precision == "fp32" else 1)
    assert found[0] == found[1]
    name = "the first non-finite gradient is that of 'blocks.1.bias' in unit 'blocks.1'"
    assert found[0][1] == name + ", computed on rank 1"
    assert found[0][2].endswith("; the loss was not finite on rank 1")


def _only_the_norm() -> None:
    """Finite gradients whose squares overflow fp32."""
    engine = _engine(1, "fp32")
    problem = _step(engine, factor=1e22)
    assert problem is not None and problem.param == ""
    assert "every gradient is finite" in str(problem)


def test_a_norm_that_overflows_alone(ranks: Ranks) -> None:
    ranks(2, _only_the_norm)


def _frugal() -> None:
    """Nothing is looked at in a step that succeeds."""
    engine = _engine(2, "fp32")
    for _ in range(2):
        _step(engine)
        assert not engine.core.gradients.watching
        assert all(g.probe is None for g in engine.core.gradients.all_runs())
    _step(engine, factor=float("nan"))
    for _ in range(100):
        assert engine.core.gradients.watching
        _step(engine)
    assert not engine.core.gradients.watching


def test_watching_ends(ranks: Ranks) -> None:
    ranks(1, _frugal)
