"""What is left when a forward, a backward or a gather fails, and stale graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin import STAGES, STEPS, check_released, close, engine_of, inputs, plain_run, square
from zoo import Stack

from ds_comm.collectives import LocalCollectives, Work
from ds_comm.errors import CommError
from ds_comm.group import Group
from ds_zero import CoreOptions, ZeroCore
from ds_zero.units import UnitRules


class Bomb(torch.autograd.Function):
    """Raises in backward when armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Bomb.armed:
            raise RuntimeError("boom")
        return grad


class Mined(Stack):
    """May fail in the middle of forward or backward."""

    fail_in_forward = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        if block is self.blocks[1]:
            if self.fail_in_forward:
                raise ValueError("no forward today")
            x = Bomb.apply(x)  # type: ignore[no-untyped-call]
        return x


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Leave no armed bomb behind."""
    yield
    Bomb.armed = False


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("recover", ["forward", "zero_grad", "kept graph"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_backward(stage: int, recover: str) -> None:
    """Its partial gradients are dropped; training goes on as if it had not been."""
    torch.manual_seed(11)
    plain = Mined()
    model = copy.deepcopy(plain)
    losses, values = plain_run(plain, square)
    engine = engine_of(model, stage)
    for step in range(STEPS):
        spare = square(engine, step) if recover == "kept graph" else None
        Bomb.armed = True
        with pytest.raises(RuntimeError, match="boom"):
            engine.backward(square(engine, step + 50))
        Bomb.armed = False
        if recover != "forward":
            engine.zero_grad()
        loss = square(engine, step) if spare is None else spare
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    check_released(engine)
    close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_forward(stage: int) -> None:
    """Hooks of saved tensors and counts of calls are taken back."""
    torch.manual_seed(11)
    plain = Mined()
    model = copy.deepcopy(plain)
    losses, values = plain_run(plain, square)
    engine = engine_of(model, stage)
    for step in range(STEPS):
        model.fail_in_forward = True
        with pytest.raises(ValueError, match="no forward today"):
            engine(inputs(step))
        model.fail_in_forward = False
        loss = square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    close(engine.module_state_dict(), values)


class Careless(Stack):
    """Edits in place what exp() saved for its backward: an error in torch."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(block(x)).add_(1)


@pytest.mark.parametrize("stage", STAGES)
def test_in_place_edits_of_saved_tensors_are_errors(stage: int) -> None:
    """As in torch; never a wrong gradient without a word."""
    engine = engine_of(Careless(), stage)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(square(engine, 0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_from_before_the_step_is_an_error(stage: int) -> None:
    """Its weights have changed: torch refuses, and so does every stage."""
    model = Stack()
    engine = engine_of(model, stage)
    stale = square(engine, 0)
    engine.backward(square(engine, 1))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


class Flaky(LocalCollectives):
    """Gathers that fail when waited for, as long as it is told so."""

    broken = False

    def gather(self, flat: Tensor, label: str, shard: Tensor | None = None) -> Work:
        super().gather(flat, label, shard)
        return _FlakyWork(self)


class _FlakyWork:
    def __init__(self, owner: Flaky) -> None:
        self._owner = owner

    def wait(self) -> None:
        if self._owner.broken:
            raise CommError("the cable is out")


def test_a_gather_that_fails() -> None:
    """The typed error every time it is tried, and the right values once it works again."""
    model = Stack()
    wanted = model(inputs(0)).detach()
    flaky = Flaky(Group.solo())
    options = CoreOptions(stage=3, rules=UnitRules(persistence_numel=0))
    core = ZeroCore(model, [list(model.parameters())], flaky, options)
    flaky.broken = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(CommError, match="cable"):
                model(inputs(0))
    flaky.broken = False
    core.tracker.end_step()
    assert torch.equal(model(inputs(0)), wanted)
