"""Weights edited, replaced, copied or frozen after ``initialize``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from twin import STAGES, close, compare, engine_of, inputs, square
from zoo import Stack, WithPrompt

import ds_zero
from ds_comm.collectives import RecordingCollectives, collectives_for
from ds_comm.errors import EditError, EngineError
from ds_comm.group import Group
from ds_zero import CoreOptions, ZeroCore
from ds_zero.units import UnitRules


class Clamping(Stack):
    """Edits a weight in its own forward, as clipped critics and max-norm layers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_an_edit_in_forward_is_not_lost() -> None:
    """Stage 3: as in torch, or an EditError; a released buffer may not swallow it."""
    try:
        compare(Clamping, square, 3)
    except EditError:
        return


def test_a_weight_replaced_after_initialize_is_an_error() -> None:
    """``module.weight = Parameter(...)``: it would train on local gradients, or not at all."""
    for stage in STAGES:
        model = Stack()
        engine = engine_of(model, stage)
        model.out.weight = nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(EditError, match=r"out\.weight"):
            engine.backward(square(engine, 0))
            engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_one_model_belongs_to_one_engine(stage: int) -> None:
    """As ``ZeroCore`` says: a second engine on the same parameters is refused."""
    model = Stack()
    engine = engine_of(model, stage)
    before = engine.module_state_dict()
    with pytest.raises(EngineError, match="another engine"):
        engine_of(model, stage)
    close(engine.module_state_dict(), before)
    engine.destroy()
    engine_of(model, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_the_model_is_free(stage: int) -> None:
    """An averaged copy for evaluation runs without collectives, hooks or gradients of ours."""
    model = Stack()
    core, log = _recorded_core(model, stage)
    with ds_zero.GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model)
    wanted = core.model(inputs(0)).detach()
    core.tracker.end_step()
    log.calls.clear()
    assert torch.allclose(twin(inputs(0)), wanted)
    twin(inputs(0)).sum().backward()
    assert log.calls == []
    assert all(p.grad is not None for p in twin.parameters())
    assert not core.gradients.unreduced()
    assert all(unit.calls_pending == 0 for unit in core.units)


def _recorded_core(model: nn.Module, stage: int) -> tuple[ZeroCore, RecordingCollectives]:
    log = RecordingCollectives(collectives_for(Group.world()))
    params = [p for p in model.parameters() if p.requires_grad]
    options = CoreOptions(stage=stage, rules=UnitRules(persistence_numel=0))
    return ZeroCore(model, [params], log, options), log


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_do_not_pile_up(stage: int) -> None:
    """A module that returns its parameter leaves one hook on it at most, not one per call."""
    model = WithPrompt()
    engine = engine_of(model, stage)
    for step in range(4):
        engine.backward(square(engine, step))
        engine.step()
    hooks = model.positions.table._backward_hooks
    assert hooks is None or len(hooks) <= 1


def test_the_trace_of_an_evaluation_does_not_grow() -> None:
    """A server that only runs forwards keeps no list of all gathers ever made."""
    engine = engine_of(Stack(), 3)
    for step in range(60):
        with torch.no_grad():
            engine(inputs(step))
    assert len(engine.core.trace.events) < 200


@pytest.mark.parametrize("stage", STAGES)
def test_requires_grad_toggled_later(stage: int) -> None:
    """Freezing after ``initialize`` changes participation: no gradient, no update, and back."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    engine = engine_of(model, stage)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for owner in (plain, model):
            owner.blocks.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        square(plain, step).backward()
        optimizer.step()
        engine.backward(square(engine, step))
        engine.step()
        close(engine.module_state_dict(), dict(plain.state_dict()))
