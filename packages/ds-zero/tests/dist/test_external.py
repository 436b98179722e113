"""Parameters that a module keeps out of sight of attribute access."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import check_released, close, engine_of, plain_run, square

import ds_zero
from ds_comm.errors import EngineError
from ds_comm.testing.plugin import Ranks


class Borrower(nn.Module):
    """Multiplies by a weight that it holds in a list."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.held = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + F.linear(x, self.held[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 4)
        self.borrower = Borrower(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.borrower(torch.tanh(self.first(x)))


def _twins() -> tuple[Any, Any]:
    model = Net()
    twin = copy.deepcopy(model)
    twin.borrower.held = [twin.first.weight]
    return model, twin


def _trains(stage: int, late: bool) -> None:
    """fp32, 1e-5 against plain torch; registered before or after ``initialize``."""
    model, twin = _twins()
    losses, wanted = plain_run(twin, square)
    if not late:
        ds_zero.register_external_parameter(model.borrower, model.first.weight)
    engine = engine_of(model, stage)
    if late:
        ds_zero.register_external_parameter(model.borrower, model.first.weight)
    for step, value in enumerate(losses):
        loss = square(engine, step)
        assert loss.item() == pytest.approx(value, rel=1e-5)
        engine.backward(loss)
        engine.step()
    check_released(engine)
    close(engine.module_state_dict(), wanted)
    engine.destroy()
    assert square(model, 0).isfinite()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_registered(ranks: Ranks, stage: int, late: bool) -> None:
    ranks(2, _trains, stage, late)


def _unregistered() -> None:
    """Without registration the read is NaN, not a silent zero; so it is after the undo."""
    model, _ = _twins()
    engine = engine_of(model, 3)
    with torch.no_grad():
        assert square(engine, 0).isnan()
        ds_zero.register_external_parameter(model.borrower, model.first.weight)
        assert square(engine, 0).isfinite()
        ds_zero.unregister_external_parameter(model.borrower, model.first.weight)
        assert square(engine, 0).isnan()
    with pytest.raises(EngineError, match="not registered for this Borrower"):
        ds_zero.unregister_external_parameter(model.borrower, model.first.weight)
    with pytest.raises(TypeError, match="Tensor given"):
        ds_zero.register_external_parameter(model.borrower, torch.zeros(2))


def test_unregistered(ranks: Ranks) -> None:
    ranks(2, _unregistered)
