"""Modules of many kinds under stages 0 and 3, against plain torch.

Most cases run on one rank, where stage 3 gathers, releases and deflates as it does on many.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from twin import STAGES, STEPS, check_released, close, compare, engine_of, inputs, plain_run, square
from zoo import MODELS, Stack

from ds_comm.errors import EngineError
from ds_comm.testing.plugin import Ranks


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, stage: int) -> None:
    """Losses of three steps and the parameters after them, fp32, 1e-5 relative."""
    if name == "torch.func.grad" and stage == 3:
        with pytest.raises(EngineError, match="GatheredParameters"):
            compare(MODELS[name], square, stage)
        return
    compare(MODELS[name], square, stage)


def _double(model: Any, step: int) -> Tensor:
    out: Tensor = model(inputs(step).double()).square().mean()
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float64_models(stage: int) -> None:
    """``model.double()`` trains, to the precision of an fp32 master at least."""
    compare(lambda: Stack().double(), _double, stage)


PAIRED = ("checkpoint", "reentrant checkpoint", "foreign read", "LoRA", "module twice, far apart")


def _on_two_ranks(name: str, stage: int) -> None:
    torch.manual_seed(11)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)

    def both(twin: Any, step: int) -> Tensor:
        return (square(twin, 2 * step) + square(twin, 2 * step + 1)) / 2

    _, values = plain_run(plain, both)
    rank = torch.distributed.get_rank()
    engine = engine_of(model, stage)
    for step in range(STEPS):
        engine.backward(square(engine, 2 * step + rank))
        engine.step()
    check_released(engine)
    close(engine.module_state_dict(), values)


@pytest.mark.parametrize("name", PAIRED)
def test_models_on_two_ranks(ranks: Ranks, name: str) -> None:
    """The same with real collectives, stage 3."""
    ranks(2, _on_two_ranks, name, 3)
