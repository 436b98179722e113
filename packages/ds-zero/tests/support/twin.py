"""A model trained twice: by plain torch and by an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_zero.flat import Presence

STAGES = (0, 3)
STEPS = 3

Loss = Callable[[Any, int], Tensor]


def engine_of(model: nn.Module, stage: int, threshold: int = 0, **extra: Any) -> ds_zero.Engine:
    return ds_zero.initialize(
        model=model,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": threshold,
            },
            **extra,
        },
    ).engine


def inputs(step: int, rows: int = 5, width: int = 4) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def square(model: Any, step: int) -> Tensor:
    out: Tensor = model(inputs(step)).square().mean()
    return out


def plain_run(model: nn.Module, loss: Loss) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_run(model: nn.Module, loss: Loss, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(model, stage)
    losses = []
    for step in range(STEPS):
        value = loss(engine, step)
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    check_released(engine)
    state = engine.module_state_dict()
    return losses, {name: state[name] for name, _ in model.named_parameters()}


def check_released(engine: ds_zero.Engine) -> None:
    """After a step nothing that may be released is still there, and nothing is held."""
    for unit in engine.core.units:
        assert unit.held == 0 and unit.calls_pending == 0
        assert unit.presence is (Presence.RELEASED if unit.releasable else Presence.PRESENT)


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def compare(make: Callable[[], nn.Module], loss: Loss, stage: int) -> None:
    """Train a plain twin and an engine; losses and parameters must agree."""
    models = []
    for _ in range(2):
        torch.manual_seed(11)
        models.append(make())
    losses, values = plain_run(models[0], loss)
    assert all(torch.isfinite(torch.tensor(losses)))
    got_losses, got = engine_run(models[1], loss, stage)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    close(got, values)
