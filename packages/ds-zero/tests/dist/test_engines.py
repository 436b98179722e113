"""Several engines and models in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twin import STAGES, close, engine_of, inputs, plain_run, square
from zoo import Stack


def _gan(
    generator: Any, critic: Any, step: Callable[[int], None], zero: Callable[[int], None]
) -> None:
    """One alternating round: the critic on detached fakes, the generator through the critic."""
    real, noise = inputs(1), inputs(2)
    zero(1)
    (critic(real).mean() - critic(generator(noise).detach()).mean()).square().backward()
    step(1)
    zero(0)
    critic(generator(noise)).square().mean().backward()
    step(0)


class Critic(Stack):
    """Ends in width 3; the generator in width 4."""


class Generator(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 3), (0, 3), (3, 0), (1, 2)])
def test_two_engines_that_alternate(first: int, second: int) -> None:
    """A generator and a critic, each with its own engine and stage."""
    torch.manual_seed(11)
    plain: list[nn.Module] = [Generator(), Critic()]
    models = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    stages = (first, second)
    engines = [engine_of(model, stage) for model, stage in zip(models, stages, strict=True)]
    for _ in range(3):
        _gan(
            plain[0], plain[1], lambda i: optimizers[i].step(), lambda i: optimizers[i].zero_grad()
        )
        _gan(engines[0], engines[1], lambda i: engines[i].step(), lambda i: engines[i].zero_grad())
    for engine, model in zip(engines, plain, strict=True):
        close(engine.module_state_dict(), dict(model.state_dict()))


def test_a_destroyed_engine_leaves_a_plain_model() -> None:
    """No hook of ours remains: training by torch goes on."""
    for stage in STAGES:
        torch.manual_seed(11)
        plain = Stack()
        model = copy.deepcopy(plain)
        engine = engine_of(model, stage)
        engine.backward(square(engine, 9))
        engine.step()
        engine.destroy()
        plain.load_state_dict(model.state_dict())
        for param in model.parameters():
            param.grad = None
        one, two = plain_run(plain, square), plain_run(model, square)
        assert one[0] == two[0]
        close(two[1], one[1])
        assert type(model.out._parameters) is dict
